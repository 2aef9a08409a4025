"""Messages as tools write them, each as (role, text): chat APIs, agents' logs, ShareGPT and its kin.

Everything that a model reads or writes is text that costs tokens: content and its parts, reasoning, calls of tools and
their results. What has no text here (images, sealed reasoning) is counted by kind in `lost`, never dropped in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from spoc_lib.workload.traces.sessions import Reject

#: Role of a message by the word that tools use for it.
ROLES = {
    word: role
    for role, words in {
        "system": "system developer instructions system_prompt",
        "assistant": "assistant gpt ai model bot chatgpt chatbot bing bard claude gemini agent ai_message aimessage "
        "aimessagechunk function_call tool_call tool_use reasoning thinking chatgpt-4 gpt-4 assistant_message",
        "tool": "tool function observation ipython environment env tool_result tool_response tool_output "
        "function_response function_result function_call_output toolmessage functionmessage computer execution",
        "user": "user human prompter humanmessage chatmessage user_message human_message",
    }.items()
    for word in words.split()
} | {"systemmessage": "system"}
#: How an item of OpenAI's Responses, of Codex or of LangChain says by its type who wrote it.
ITEMS = {
    "function_call": "assistant",
    "custom_tool_call": "assistant",
    "local_shell_call": "assistant",
    "web_search_call": "assistant",
    "reasoning": "assistant",
    "function_call_output": "tool",
    "custom_tool_call_output": "tool",
    "local_shell_call_output": "tool",
    "computer_call": "assistant",
    "computer_call_output": "tool",
    "human": "user",
    "ai": "assistant",
    "user": "user",
    "assistant": "assistant",
    "gemini": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}
#: Lines of session logs that carry no message of the conversation: marks, snapshots, and copies of what stands beside.
MARKS = frozenset(
    {
        "summary",
        "event_msg",
        "turn_context",
        "file-history-snapshot",
        "queue-operation",
        "progress",
        "info",
        "attachment",
        "last-prompt",
        "custom-title",
        "ai-title",
        "tag",
        "agent-name",
        "pr-link",
        "mode",
        "permission-mode",
        "ghost_snapshot",
    }
)
#: Fields of a message or part that hold text, by what it is. A value that is no text is written as JSON.
_TEXTS = (
    "text",
    "input_text",
    "output_text",
    "content",
    "value",
    "parts",
    "summary",
    "refusal",
    "output",
    "result",
    "response",
    "data",
)
_REASONING = ("reasoning_content", "reasoning", "thinking", "thoughts", "thought")
_CALLS = ("tool_calls", "toolCalls", "function_call", "functionCall")
_MEDIA = ("image", "audio", "video", "document", "file", "pdf", "inline_data", "inlinedata", "blob")
_SEALED = ("redacted", "encrypted")
#: Kinds in `Lost` that cost tokens in the recorded prompts.
UNTOLD = frozenset({*_MEDIA, "sealed reasoning", "compacted history"})
#: OpenHands' actions and observations that no model sees.
_SILENT = frozenset({"change_agent_state", "agent_state_changed", "null", "recall", "start", "stop", "pause", "resume"})


@dataclass
class Lost:
    """Counts by kind of what has no place in the sessions; `reasoning kept` is there for the record."""

    kinds: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, kind: str) -> Lost:
        self.kinds[kind] += 1
        return self


@dataclass(frozen=True)
class Said:
    """One message: who (system, user, tool, assistant, or an unknown word), what, when (s), and whether it is a
    demonstration in the prompt."""

    role: str
    text: str
    time_s: float | None = None
    demonstration: bool = False


def is_message(value: Any) -> bool:
    """Whether a value looks like one message, event or item of a conversation."""
    if not isinstance(value, dict):
        return False
    if isinstance(value.get("role"), str) or isinstance(value.get("from"), str):
        return True
    kind = value.get("type")
    if isinstance(kind, str) and (
        kind in MARKS or kind in ("session_meta", "response_item", "compacted") or kind.lower() in ITEMS
    ):
        return any(
            key in value
            for key in (
                "message",
                "payload",
                "content",
                "data",
                "uuid",
                "sessionId",
                "leafUuid",
                "messageId",
                "output",
                "arguments",
                "summary",
                "input",
                "action",
                "encrypted_content",
                "toolCalls",
            )
        )
    return isinstance(value.get("source"), str) and ("action" in value or "observation" in value)


def said(message: Any, lost: Lost) -> Iterator[Said]:
    """What a message says; nothing for a mark. Reject when it is no message at all."""
    if not isinstance(message, dict):
        raise Reject("a message is not an object")
    time_s = seconds(message.get("timestamp", message.get("time")))
    demonstration = bool(message.get("is_demo"))
    kind = str(message.get("type") or "")
    if kind in MARKS and not isinstance(message.get("role"), str):
        return
    if kind == "session_meta":
        yield from _session_meta(message.get("payload"), time_s)
        return
    if kind == "compacted":
        lost += "compacted history"
        return
    for wrapped in ("payload", "message", "data", "kwargs"):  # Codex, Claude Code, LangChain, LangChain's dumps
        inner = message.get(wrapped)
        if (
            isinstance(inner, dict)
            and not isinstance(message.get("role"), str)
            and (is_message(inner) or "content" in inner)
        ):
            message = {"type": kind, **inner} if wrapped != "payload" else inner
            kind = str(message.get("type") or kind)
            break
    if kind in MARKS and not isinstance(message.get("role"), str):
        return
    if "source" in message and ("action" in message or "observation" in message) and "role" not in message:
        event = _openhands(message)
        if event is not None:
            yield Said(*event, time_s)
        return
    role = _role(message, kind)
    pieces = list(_pieces(message, lost))
    if role == "user" and any(one == "tool" for one, _ in pieces):
        role = "tool"
    text = "\n".join(text for where, text in pieces if text and where != "result")
    results = "\n".join(text for where, text in pieces if text and where == "result")
    yield Said(role, text, time_s, demonstration)
    if results:  # Gemini's log keeps a tool's result beside its call
        yield Said("tool", results, time_s)


def _session_meta(payload: Any, time_s: float | None) -> Iterator[Said]:
    given = payload.get("base_instructions") or payload.get("instructions") if isinstance(payload, dict) else None
    text = given.get("text") if isinstance(given, dict) else given
    if isinstance(text, str) and text:
        yield Said("system", text, time_s)


def _role(message: dict, kind: str) -> str:
    word = str(message.get("role") or message.get("from") or "").strip().lower()
    if not word:
        word = ITEMS.get(kind.lower(), kind.lower())
    return ROLES.get(word, word)


def _openhands(event: dict) -> tuple[str, str] | None:
    given = event.get("args")
    args: dict = given if isinstance(given, dict) else {}
    action, observation = event.get("action"), event.get("observation")
    if action in _SILENT or (observation in _SILENT and not event.get("content")):
        return None
    if observation is not None:
        return "tool", _plain(event.get("content"))
    if action == "system":
        return "system", _plain(args.get("content"))
    if event.get("source") != "agent":
        return "user", _plain(args.get("content") or event.get("message"))
    thought = _plain(args.get("thought") or args.get("content"))
    call = {
        key: value for key, value in args.items() if key not in ("thought", "content") and value not in (None, "", [])
    }
    return "assistant", "\n".join(part for part in (thought, _call({"name": action, "arguments": call})) if part)


def _pieces(message: dict, lost: Lost) -> Iterator[tuple[str, str]]:
    """(what it is, text) of a message's fields."""
    for name in _REASONING:
        value = message.get(name)
        if value and not (name == "thinking" and message.get("type") == "thinking"):
            text = "\n".join(text for _, text in _parts(value, lost))
            if text:
                lost += "reasoning kept"
                yield "reasoning", text
            break
    kind = str(message.get("type") or "").lower()
    if message.get("encrypted_content") and not message.get("summary"):
        lost += "sealed reasoning"
    if kind in ("function_call", "custom_tool_call", "local_shell_call", "web_search_call", "computer_call"):
        yield "call", _call(message)
        return
    field_name = next((name for name in _TEXTS if message.get(name) is not None), None)
    content = message.get(field_name) if field_name else None
    if content is not None and not isinstance(content, (str, list, dict)):
        raise Reject("a message's content is neither text nor a list of parts")
    if field_name:
        yield from _parts(content, lost)
    for name in _CALLS:
        calls = message.get(name)
        for call in calls if isinstance(calls, list) else [calls] if calls else []:
            yield "call", _call(call)
            result = call.get("result") if isinstance(call, dict) else None
            if result is not None:
                yield "result", "\n".join(text for _, text in _parts(result, lost))


def _parts(value: Any, lost: Lost) -> Iterator[tuple[str, str]]:
    """(what it is, text) of a content: text, a part, or a list of parts, nested as deep as it may be."""
    if value is None:
        return
    if isinstance(value, str):
        yield "text", value
        return
    if isinstance(value, list):
        for part in value:
            yield from _parts(part, lost)
        return
    if not isinstance(value, dict):
        yield "text", _plain(value)
        return
    kind = str(value.get("type") or "").lower()
    if any(word in kind for word in _SEALED) or (value.get("encrypted_content") and not value.get("summary")):
        lost += "sealed reasoning"
    elif kind in ("tool_use", "tool_call", "server_tool_use", "function_call", "toolcall", "tool-call"):
        yield "call", _call(value)
    elif call := value.get("functionCall") or value.get("function_call"):
        yield "call", _call(call)
    elif answer := value.get("functionResponse") or value.get("function_response"):
        yield "tool", _plain(answer.get("response") if isinstance(answer, dict) else answer)
    elif "tool_result" in kind or kind in ("function_result", "tool-result", "web_search_result"):
        inner = next(
            (value[name] for name in ("content", "output", "result", "text") if value.get(name) is not None), ""
        )
        yield "tool", "\n".join(text for _, text in _parts(inner, lost) if text)
    elif value.get("thinking") or kind in ("thinking", "reasoning", "reasoning_text") or value.get("thought") is True:
        text = _plain(value.get("thinking") or value.get("reasoning") or value.get("text") or value.get("content"))
        if text:
            lost += "reasoning kept"
            yield "reasoning", text
        else:
            lost += "sealed reasoning"
    elif media := _medium(value, kind):
        source = value.get("source")
        if isinstance(source, dict) and source.get("type") in ("text", "content"):  # a document given as text
            yield from _parts(source.get("data") or source.get("content"), lost)
        else:
            lost += media
    else:
        name = next((name for name in (*_TEXTS, "description", "subject") if value.get(name) is not None), None)
        if name is not None:
            yield from _parts(value[name], lost)
        elif value and not set(value) <= {"type", "cache_control", "id"}:
            yield "text", _plain(value)


def _medium(part: dict, kind: str) -> str | None:
    """The medium of a part that has no text, by its type or, where it has none, by its fields."""
    words = [kind] if kind else [] if "text" in part else [str(key).lower() for key in part]
    return next((medium for medium in _MEDIA for word in words if medium in word), None)


def _call(call: Any) -> str:
    """A tool's call as the text that a model writes: its name and arguments as JSON."""
    if not isinstance(call, dict):
        return _plain(call)
    function = call.get("function")
    inner: dict = function if isinstance(function, dict) else call
    arguments = next(
        (inner[name] for name in ("arguments", "input", "args", "parameters", "action") if inner.get(name) is not None),
        None,
    )
    if arguments is None and "name" not in inner:
        return _plain(call)
    return (
        f'{{"name": {_plain(inner.get("name") or call.get("type") or "", quoted=True)}, "arguments": '
        f"{_plain(arguments if arguments is not None else {})}}}"
    )


def _plain(value: Any, *, quoted: bool = False) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and not quoted:
        return value
    try:
        return orjson.dumps(value, default=str).decode()
    except (TypeError, ValueError):
        return str(value)


def seconds(value: Any) -> float | None:
    """A time of a log in seconds: ISO 8601, or a number since 1970 in s or ms; None where it says none."""
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError):
            return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1e9 <= value < 1e14:
        return value / 1000 if value >= 1e11 else float(value)
    return None
