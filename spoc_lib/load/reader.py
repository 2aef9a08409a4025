"""What a streamed chat or completion answer said, and when. Pure; no sockets, no clock.

`StreamReader` interprets events as the OpenAI protocol and keeps only what a measurement needs: the time and the text
of each chunk that carries tokens, the server's usage, the finish reason, and what went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from spoc_lib.load.sse import EventParser


@dataclass(slots=True)
class StreamReader:
    """What a stream of `chat.completion.chunk` or `text_completion` events said.

    times_s, texts: one entry a chunk that carries content, reasoning or a tool call; role-only, empty and usage
    chunks never count. running_tokens: the server's cumulative count at each chunk, where it sends one a chunk.
    content, content_at: the content alone, and the numbers of the chunks that carried some; thoughts: the reasoning.
    error_class: bad_event (not JSON, or not an object), stream_error or context_overflow (the server's own error
    event), else None.
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
            return None
        if data[:1] != b"{" and data.strip() == b"[DONE]":
            self.done = True
            return None
        self.events += 1
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return self._fail("bad_event", data[:200].decode("utf-8", "replace"))
        if not isinstance(chunk, dict):
            return self._fail("bad_event", data[:200].decode("utf-8", "replace"))
        if "error" in chunk and chunk["error"]:
            return self._fail(*classify_error(chunk["error"], "stream_error"))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        choices = chunk.get("choices")
        if not choices:
            if choices is None and usage is None and (chunk.get("object") == "error"
                                                      or isinstance(chunk.get("message"), str)):
                self._fail(*classify_error(chunk, "stream_error"))
            return None
        try:
            self._choice(time_s, choices[0], usage)
        except (AttributeError, TypeError, KeyError, IndexError):
            self._fail("bad_event", data[:200].decode("utf-8", "replace"))
        return None

    def _choice(self, time_s: float, choice: dict[str, Any], usage: dict[str, Any] | None) -> None:
        delta = choice.get("delta")
        if delta is None:
            content, reasoning, calls = choice.get("text"), None, None
        else:
            content = delta.get("content")
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            calls = delta.get("tool_calls")
        text = "" + (content or "") + (reasoning or "")  # TypeError where a server sends no text
        if calls:
            text += "".join(_call_text(call) for call in calls)
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
            self.finish_reason = str(reason)[:100]
            self.finish_s = time_s

    def _fail(self, error_class: str, message: str) -> None:
        self.error_class, self.error_message = error_class, message

    @property
    def reply(self) -> str:
        """The content that goes into the history: what the model answered, without its reasoning."""
        return "".join(self.content)

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered; it goes into the history only where personas echo it."""
        return "".join(self.thoughts)

    @property
    def complete(self) -> bool:
        """The answer came to its end: a finish reason or [DONE]."""
        return self.error_class is None and (self.done or self.finish_reason is not None)

    def count(self, name: str) -> int | None:
        """`prompt_tokens`, `completion_tokens` or `cached_tokens` of the server's usage; None when it has none, or none
        that can be: less than nothing, or nothing where chunks came."""
        if self.usage is None:
            return None
        if name == "cached_tokens":
            return _tokens(_within(self.usage.get("prompt_tokens_details"), name))
        value = _tokens(self.usage.get(name))
        return None if value == 0 and name == "completion_tokens" and self.times_s else value

    @property
    def hidden_tokens(self) -> int:
        """Tokens of reasoning that the usage counts and no chunk carried: the server kept them to itself."""
        total = self.count("completion_tokens")
        details = None if self.usage is None else self.usage.get("completion_tokens_details")
        hidden = _tokens(_within(details, "reasoning_tokens"))
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


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    return (function.get("name") or "") + (function.get("arguments") or "")


OVERFLOW_SIGNS = ("maximum context length", "context_length_exceeded", "max_model_len", "context window",
                  "maximum model length", "context length", "longer than the maximum", "input is too long",
                  "prompt is too long", "context size", "input token count", "max_new_tokens` must be")


def classify_error(error: Any, otherwise: str) -> tuple[str, str]:
    """(error class, message) of a server's error object: `context_overflow` when it says so, else `otherwise`."""
    if isinstance(error, dict):
        inner = error.get("error")
        if isinstance(inner, (dict, str)):
            return classify_error(inner, otherwise)
        message = str(error.get("message") or error.get("detail") or error)
        signs = f"{message} {error.get('code')} {error.get('type')}".lower()
    else:
        message = str(error)
        signs = message.lower()
    overflow = any(sign in signs for sign in OVERFLOW_SIGNS)
    return ("context_overflow" if overflow else otherwise), message[:300]


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
