"""What a streamed chat or completion answer said, and when. Pure; no sockets, no clock.

`StreamReader` interprets events as the OpenAI protocol and keeps only what a measurement needs: the time and the text
of each chunk that carries tokens, the server's usage, the finish reason, and what went wrong. Servers differ in where
they put things and in what they call them; whatever can be understood is, and what cannot be is counted (`odd`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from spoc_lib.load.sse import EventParser, event_name

#: Finish reasons of an answer that came to its own end, in the words of OpenAI, vLLM, TGI, TensorRT-LLM, llama.cpp,
#: Mistral, Anthropic, Gemini, Cohere, watsonx and Qianfan; letters alone, small. Any other word ends a request that is
#: not completed, but for those that tell of an answer that goes on.
ENDINGS = frozenset((
    "stop", "length", "toolcalls", "functioncall", "eos", "eostoken", "endturn", "stopsequence", "stoptoken",
    "maxtokens", "maxoutputtokens", "maxlength", "modellength", "tooluse", "complete", "completed", "finish",
    "finished", "done", "end", "endid", "endoftext", "eot", "limit", "maxnewtokens", "maxoutput", "normal",
    "repetition", "stopword", "stopwords", "tokenlimit", "toolcall", "word"))
NO_END = frozenset(("none", "null", "notfinished", "unspecified", "inprogress"))
#: The names of the usage's counts in OpenAI's Responses, which some gateways keep, by those of its chats.
COUNTS = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens",
          "prompt_tokens_details": "input_tokens_details", "completion_tokens_details": "output_tokens_details"}
#: What heartbeats say, as text or as the type of an object.
BEATS = frozenset(("ping", "pong", "heartbeat", "keepalive", "null"))
#: Where servers put the text of an error that is an object without choices, and the words that mark one.
ERROR_FIELDS = ("message", "detail", "error_message", "error_msg", "errors", "msg", "errorMessage", "error_code")
ERROR_MARKS = ("object", "type", "status", "event")
FOREIGN = "events that are none of this API's: left out"
MENDED = "events with bytes or numbers that JSON does not allow: read as meant, U+FFFD for what is no letter"


@dataclass(slots=True)
class StreamReader:
    """What a stream of `chat.completion.chunk` or `text_completion` events said.

    times_s, texts: one entry a chunk that carries content, reasoning or a tool call; role-only, empty and usage
    chunks never count. running_tokens: the server's cumulative count at each chunk, where it sends one a chunk.
    content, content_at: the content alone, and the numbers of the chunks that carried some; thoughts: the reasoning.
    error_class: bad_event (not JSON, or not an object), stream_error or context_overflow (the server's own error
    event), else None; `fault` says besides whether the answer came to its end. odd: events that were left out or
    mended, by kind; foreign: the first that was left out.
    """

    parser: EventParser = field(default_factory=EventParser)
    times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    running_tokens: list[int | None] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    content_at: list[int] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    finish_s: float | None = None
    done: bool = False
    error_class: str | None = None
    error_message: str | None = None
    events: int = 0
    odd: Counter[str] = field(default_factory=Counter)
    foreign: str = ""
    _broken_off: tuple[str, str] | None = None

    def feed(self, time_s: float, piece: bytes) -> None:
        """Read `piece`, which arrived at `time_s`; an event bears the time of the piece that completed it."""
        for data in self.parser.feed(piece):
            self._event(time_s, data)

    def close(self, time_s: float) -> None:
        """The stream ended cleanly; take a last event that lacks only its empty line."""
        data = self.parser.close()
        if data is not None:
            self._event(time_s, data)

    def _event(self, time_s: float, data: bytes) -> None:
        if self.done or self.error_class:
            return
        try:
            if data[:1] != b"{" and not self._is_object(data):
                return
            self.events += 1
            try:
                chunk = orjson.loads(data if data.__class__ is bytes else bytes(data))
            except orjson.JSONDecodeError:
                chunk = self._mended(data)
            if "error" in chunk and chunk["error"]:
                self._fail(*classify_error(chunk["error"], "stream_error"))
                return
            usage, choices = chunk.get("usage"), chunk.get("choices")
            if usage is not None:
                usage = usage if isinstance(usage, dict) else None
                self._take(usage)
            if choices:
                for choice in choices:
                    self._choice(time_s, choice, usage, chunk)
            elif not usage:
                self._no_choice(chunk, data)
        except (AttributeError, TypeError, KeyError, ValueError, RecursionError):
            self._fail("bad_event", data[:200].decode("utf-8", "replace"))

    def _is_object(self, data: bytes) -> bool:
        """Whether an event that does not begin like an object is one; else it is the end, a heartbeat or an error told
        as text. ValueError for anything that is none of these."""
        word = data.strip()
        if word[:1] == b"{" or not word:
            return bool(word)
        if word.strip(b'"') == b"[DONE]":
            self.done = True
        elif word.strip(b':-" ').replace(b"-", b"").lower().decode("latin-1") not in BEATS:
            self.events += 1
            name = event_name(data)
            if "error" in name:
                self._fail(*classify_error(word.decode("utf-8", "replace"), "stream_error"))
            elif name in ("", "message"):
                raise ValueError("neither an object nor a word that servers send")
            else:
                self._left_out(data)
        return False

    def _left_out(self, data: bytes) -> None:
        self.odd[FOREIGN] += 1
        self.foreign = self.foreign or data[:200].decode("utf-8", "replace")

    def _mended(self, data: bytes) -> dict[str, Any]:
        """An object that only the standard library reads: halves of surrogate pairs, NaN, Infinity, bytes that are no
        UTF-8, which become U+FFFD."""
        chunk = json.loads(data.decode("utf-8", "replace"))
        self.odd[MENDED] += 1
        return chunk

    def _no_choice(self, chunk: dict[str, Any], data: bytes) -> None:
        """An event without choices or usage: an error, a heartbeat, usage elsewhere, or another API's."""
        marks = {str(chunk.get(mark)).lower().replace("-", "").replace("_", "") for mark in ERROR_MARKS}
        marks.add(event_name(data))
        empty = chunk.get("choices") is None
        if any("error" in mark for mark in marks) or empty and any(map(chunk.get, ERROR_FIELDS)):
            self._fail(*classify_error(chunk, "stream_error"))
        elif empty and chunk and not marks & BEATS and not self._usage_within(chunk):
            self._left_out(data)

    def _choice(self, time_s: float, choice: dict[str, Any], usage: dict[str, Any] | None, chunk: dict[str, Any]
                ) -> None:
        delta, reasoning, calls = choice.get("delta"), "", None
        text: Any = choice.get("text") if delta is None else delta.get("content")
        content = text
        if not text or text.__class__ is not str or delta is not None and len(delta) > 1:  # unlike most chunks
            content, reasoning, calls = self._said(content, choice, delta or {})
            text = content + reasoning + (_calls_text(calls) if calls else "")
        if reasoning:
            self.thoughts.append(reasoning)
        if content:
            self.content.append(content)
            self.content_at.append(len(self.times_s))
        if text or calls:
            self.times_s.append(time_s)
            self.texts.append(text)
            self.running_tokens.append(_tokens(usage.get("completion_tokens")) if usage else None)
        reason = choice.get("finish_reason")
        if reason:
            self._finish(time_s, reason)
            if not usage and not self._usage_within(choice):
                self._usage_within(chunk)

    def _said(self, content: Any, choice: dict[str, Any], delta: dict[str, Any]) -> tuple[str, str, Any]:
        """(content, reasoning, calls) of a choice, wherever a server puts them; TypeError where it sends no text."""
        reasoning = _reasoning(delta)
        calls = delta.get("tool_calls")
        if not content and not reasoning and not calls:
            if choice.get("error"):
                self._fail(*classify_error(choice["error"], "stream_error"))
            message = choice.get("message")
            repeated = len(self.content) > 1 and isinstance(message, dict) and message.get("content") == self.reply
            delta = delta or (message if isinstance(message, dict) and not repeated else {})
            call, audio = delta.get("function_call"), delta.get("audio")
            calls = delta.get("tool_calls") or ([{"function": call}] if call else None)
            if audio and not calls:
                calls = [{"function": {"arguments": audio.get("transcript")}}]
            content = delta.get("content") or choice.get("text") or delta.get("refusal")
            reasoning = _reasoning(delta) or delta.get("reasoning_details") or delta.get("thinking")
        text, thought = _parts(content) if content else ("", "")
        return text, "".join(_parts(reasoning)) if reasoning else thought, calls

    def _usage_within(self, holder: dict[str, Any]) -> bool:
        """Take the usage that stands in `holder` or in an object of its own within it (`x_groq`, `response`)."""
        for part in (holder, *holder.values()):
            usage = part.get("usage") if isinstance(part, dict) else None
            if usage and isinstance(usage, dict):
                self._take(usage)
                return True
        return False

    def _take(self, usage: dict[str, Any] | None) -> None:
        """Keep a usage; one that counts nothing does not replace one that does."""
        if usage and (not self.usage or any(map(_tokens, usage.values()))):
            self.usage = usage

    def _finish(self, time_s: float, reason: Any) -> None:
        """Keep the finish reason, a word or an object of `type`; one that is no end of an answer is an error."""
        said = (reason.get("type") or reason.get("reason") or reason) if isinstance(reason, dict) else reason
        word = re.sub("[^a-z0-9]+", "_", _shown(said).rpartition(".")[2].lower())[:40].strip("_") or "unknown"
        plain = word.replace("_", "").removeprefix("finishreason")
        if plain in NO_END:
            return
        self.finish_s, self.finish_reason = time_s, word
        if plain not in ENDINGS:
            told = f"the server ended the answer with the finish reason {_shown(reason)[:200]}"
            self._broken_off = classify_error(reason, f"finish_{word}")[0], readable(told)

    def _fail(self, error_class: str, message: str) -> None:
        if self.error_class is None:
            self.error_class, self.error_message = error_class, readable(message)

    @property
    def fault(self) -> tuple[str, str] | None:
        """(error class, message) of an answer that is none: an error; ended for another reason (finish_WORD) than an
        end of its own; without a finish reason although [DONE] came (unfinished), which servers send after whatever
        happened; or cut. None for a whole answer."""
        if self.error_class:
            return self.error_class, self.error_message or ""
        if self.finish_reason is not None:
            return self._broken_off
        more = f"; an event that is none of this API's: {self.foreign}" if self.foreign else ""
        if self.done:
            return "unfinished", "the server ended the stream without a finish reason: nothing tells that the " \
                                 f"answer is whole{more}"
        return "cut", f"the stream ended without finish reason or [DONE]{more}"

    @property
    def reply(self) -> str:
        """The content that goes into the history: what the model answered, without its reasoning."""
        return readable("".join(self.content))

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered; it goes into the history only where personas echo it."""
        return readable("".join(self.thoughts))

    @property
    def text(self) -> str:
        """All that the chunks carried, in their order."""
        return readable("".join(self.texts))

    def count(self, name: str) -> int | None:
        """`prompt_tokens`, `completion_tokens` or `cached_tokens` of the server's usage; None when it has none, or none
        that can be: less than nothing, or nothing where chunks came. Reasoning is part of the completion; of a server
        that counts it apart, as its total tells (xAI, Gemini), it is added."""
        if self.usage is None:
            return None
        if name == "cached_tokens":
            told = _tokens(_within(self._told("prompt_tokens_details"), name))
            return _tokens(self.usage.get(name, self.usage.get("prompt_cache_hit_tokens"))) if told is None else told
        value = _tokens(self._told(name))
        if name == "completion_tokens" and value is not None:
            thought, rest = self._thought_tokens, _tokens(self._told("prompt_tokens"))
            if thought and rest is not None and self.usage.get("total_tokens") == rest + value + thought:
                value += thought
        return None if value == 0 and name == "completion_tokens" and self.times_s else value

    def _told(self, name: str) -> Any:
        usage = self.usage or {}
        return usage.get(name, usage.get(COUNTS[name]))

    @property
    def _thought_tokens(self) -> int | None:
        return _tokens(_within(self._told("completion_tokens_details"), "reasoning_tokens"))

    @property
    def hidden_tokens(self) -> int:
        """Tokens of reasoning that the usage counts and no chunk carried: the server kept them to itself."""
        total, hidden = self.count("completion_tokens"), self._thought_tokens
        if total is None or not hidden or self.thoughts or total - hidden < len(self.times_s):
            return 0
        return hidden

    @property
    def output_tokens(self) -> int | None:
        """The tokens that the chunks carried, by the server's count; None without usage."""
        total = self.count("completion_tokens")
        return None if total is None else total - self.hidden_tokens


def _tokens(value: Any) -> int | None:
    """A number of tokens as a server states it, None when it is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1 << 53:
        return int(value)
    return None


def _within(details: Any, name: str) -> Any:
    return details.get(name) if isinstance(details, dict) else None


def _reasoning(delta: dict[str, Any]) -> Any:
    return delta.get("reasoning_content") or delta.get("reasoning")


def _parts(value: Any) -> tuple[str, str]:
    """(text, thought) of content that is no text but a part or a list of parts; TypeError for another thing."""
    if isinstance(value, str):
        return value, ""
    if isinstance(value, list):
        both = [_parts(one) for one in value if one]
        return "".join(text for text, _ in both), "".join(thought for _, thought in both)
    kind = str(value.get("type"))
    inner = (value.get("text") or value.get("thinking") or value.get("content") or value.get("reasoning")
             or value.get("summary") or value.get("refusal") or value.get("parts") or "")
    text, thought = _parts(inner)
    return ("", text + thought) if "thinking" in kind or "reasoning" in kind or "thinking" in value else (text, thought)


def _calls_text(calls: Any) -> str:
    """The names and arguments of tool calls, which some servers send as objects."""
    text = ""
    for call in calls if isinstance(calls, list) else [calls]:
        function = (call or {}).get("function") or {}
        for said in (function.get("name"), function.get("arguments")):
            text += said if isinstance(said, str) else json.dumps(said) if said else ""
    return text


def readable(text: str) -> str:
    """`text` with the halves of surrogate pairs joined; one without its other half becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


OVERFLOW_SIGNS = ("maximum context length", "context_length_exceeded", "max_model_len", "context window",
                  "maximum model length", "context length", "longer than the maximum", "input is too long",
                  "prompt is too long", "context size", "input token count", "max_new_tokens` must be")


def classify_error(error: Any, otherwise: str) -> tuple[str, str]:
    """(error class, message) of a server's error object: `context_overflow` when it says so, else `otherwise`."""
    while isinstance(error, dict) and error.get("error") and isinstance(error["error"], (dict, str)):
        error = error["error"]
    signs = ""
    if isinstance(error, dict):
        told = next((error[name] for name in ERROR_FIELDS if error.get(name)), error)
        signs = f" {error.get('code')} {error.get('type')}"
        where = error.get("param") or error.get("loc")
        message = _shown(told)
        if where and _shown(where) not in message:
            message += f" (param: {_shown(where)})"
    else:
        message = _shown(error)
    signs = (message + signs).lower()
    overflow = any(sign in signs for sign in OVERFLOW_SIGNS)
    return ("context_overflow" if overflow else otherwise), readable(message[:300])


def _shown(value: Any) -> str:
    try:
        return str(value)
    except (RecursionError, ValueError):  # deeper, or a number longer, than Python prints
        return "an error that cannot be shown"


def token_shares(texts: Iterable[str], running_tokens: Iterable[int | None], total: int | None) -> list[float]:
    """Tokens that each chunk carries; they sum to `total`, the server's own count.

    A server that counts a chunk (cumulative usage in each) is taken at its word. Else every chunk carries one
    token, and what the total has beyond that is spread by the length of the text: exact for one token a chunk,
    near for `stream_interval` and speculative decoding. Fewer tokens than chunks: equal shares. Without a total:
    one a chunk.
    """
    texts = list(texts)
    running = [value for value in running_tokens if value is not None]
    if not texts:
        return []
    count = len(texts)
    if total is None:
        return [1.0] * count
    if len(running) == count:
        steps = [float(b - a) for a, b in zip([0, *running[:-1]], running, strict=True)]
        if all(step > 0 for step in steps) and 0 <= total - running[-1] <= 1:
            steps[-1] += total - running[-1]  # an end token without text
            return steps
    if total < count:
        return [total / count] * count
    extra, characters = total - count, sum(map(len, texts))
    if extra == 0:
        return [1.0] * count
    if characters == 0:
        return [total / count] * count
    return [1.0 + extra * len(text) / characters for text in texts]
