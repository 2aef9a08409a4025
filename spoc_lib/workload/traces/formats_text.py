"""Full-text trajectories: SWE-agent `.traj`, OpenAI-style message lists, ShareGPT conversations.

What is kept: the text (as the prompts that are really sent), its lengths as the tokenizer counts them, the order of
turns, and the time a tool took where the source has it. A tool's result becomes a user message.
"""

from __future__ import annotations

from typing import Any

import orjson

from spoc_lib.workload.script import Layer
from spoc_lib.workload.template import MESSAGE_TOKENS, PROMPT_TOKENS
from spoc_lib.workload.tokenizer import Tokenizer
from spoc_lib.workload.traces.formats_blocks import number
from spoc_lib.workload.traces.sessions import Message, Reject, Request, Session

SWE_AGENT = "swe-agent"
MESSAGES = "messages"
_BLOCK_TOKENS = 16
#: Fields that hold a list of messages.
LISTS = ("messages", "conversations", "conversation", "history", "trajectory")
_SYSTEM = frozenset({"system", "developer"})
_ASSISTANT = frozenset({"assistant", "gpt", "ai", "model", "bot"})
_TOOL = frozenset({"tool", "function", "observation", "ipython"})
_USER = frozenset({"user", "human"})


def find_messages(record: Any) -> list[Any] | None:
    """The list of messages in a record: the record itself, or one of its usual fields (JSON text is unpacked)."""
    if isinstance(record, (str, bytes)):
        try:
            record = orjson.loads(record)
        except orjson.JSONDecodeError:
            return None
    if isinstance(record, list):
        return record if record and all(isinstance(m, dict) and ("role" in m or "from" in m) for m in record) else None
    if isinstance(record, dict):
        for field in LISTS:
            found = find_messages(record[field]) if field in record and not isinstance(record[field], dict) else None
            if found is not None:
                return found
    return None


def is_trajectory(record: Any) -> bool:
    """SWE-agent's own file: a `trajectory` of steps, or a `history` of messages."""
    return isinstance(record, dict) and (
        isinstance(record.get("history"), list) and find_messages(record["history"]) is not None
        or isinstance(record.get("trajectory"), list) and any(
            isinstance(step, dict) and "action" in step for step in record["trajectory"]))


def trajectory(record: dict, name: str, at: int, tokenizer: Tokenizer) -> Session:
    """A session from a SWE-agent trajectory: its `history`, or its steps where there is no history."""
    history = find_messages(record.get("history"))
    steps = record.get("trajectory")
    steps = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if history is None:
        history = []
        for step in steps:
            history += [{"role": "assistant", "content": step.get("response") or step.get("action") or ""},
                        {"role": "user", "content": step.get("observation") or ""}]
    times = [step.get("execution_time") for step in steps]
    return _session(history, name, SWE_AGENT, at, tokenizer, times)


def conversation(messages: list, name: str, at: int, tokenizer: Tokenizer) -> Session:
    """A session from a list of OpenAI or ShareGPT messages."""
    return _session(messages, name, MESSAGES, at, tokenizer, [])


def _session(messages: list, name: str, form: str, at: int, tokenizer: Tokenizer, times: list) -> Session:
    """Every assistant message but a demonstration's is a reply to a request made of all that stands before it."""
    requests: list[Request] = []
    pending: list[tuple[str, str]] = []
    prompt, reply = 0, 0
    for message in messages:
        role, text = _role(message), _text(message)
        if role != "assistant" or message.get("is_demo"):
            if text:
                pending.append(("user" if role == "assistant" else role, text))
            continue
        if not pending and not requests:
            continue  # an assistant's greeting is no request
        appended = _merge(pending, tokenizer)
        own = (prompt + 1 + reply) // _BLOCK_TOKENS * _BLOCK_TOKENS if requests else None
        prompt += sum(part.tokens for part in appended) + MESSAGE_TOKENS * len({_side(part) for part in appended})
        prompt += reply + MESSAGE_TOKENS if requests else PROMPT_TOKENS
        reply = tokenizer.count(text)
        k = len(requests)
        requests.append(Request(
            prompt, max(1, reply), own or 0, (at, k - 1) if k else None, own, _gap(times, k),
            bool(pending) and pending[-1][0] not in ("tool", "observation") and (form != SWE_AGENT or k == 0),
            messages=appended,
        ))
        pending = []
    if not requests:
        raise Reject("it holds no assistant message, so no request")
    return Session(name, form, tuple(requests))


def _role(message: Any) -> str:
    if not isinstance(message, dict):
        raise Reject("a message is not an object")
    role = str(message.get("role") or message.get("from") or "").lower()
    if role in _ASSISTANT:
        return "assistant"
    if role in _SYSTEM:
        return "system"
    if role in _TOOL:
        return "tool"
    if role in _USER:
        return "user"
    raise Reject(f"a message has the unknown role '{role}'")


def _text(message: dict) -> str:
    """Text of a message: content, its text parts, and tool calls as JSON."""
    content = message.get("content", message.get("value"))
    if content is None:
        parts: list[str] = []
    elif isinstance(content, str):
        parts = [content]
    elif isinstance(content, list):
        parts = [part if isinstance(part, str) else str(part.get("text") or "") for part in content
                 if isinstance(part, (str, dict))]
    else:
        raise Reject("a message's content is neither text nor a list of parts")
    calls = message.get("tool_calls")
    if isinstance(calls, (list, dict)) and calls:
        parts.append(orjson.dumps(calls, default=str).decode())
    return "\n".join(part for part in parts if part)


def _merge(pending: list[tuple[str, str]], tokenizer: Tokenizer) -> tuple[Message, ...]:
    """What a request appends: at most one system text (common ground) and one user text."""
    merged = []
    sides: tuple[tuple[Layer, tuple[str, ...]], ...] = (("organisation", ("system",)), ("turn", ("user", "tool")))
    for layer, roles in sides:
        text = "\n".join(text for role, text in pending if role in roles)
        if text:
            merged.append(Message(text, max(1, tokenizer.count(text)), layer))
    if not merged:
        merged.append(Message("\n", 1, "turn"))
    return tuple(merged)


def _side(message: Message) -> str:
    return "system" if message.layer == "organisation" else "user"


def _gap(times: list, k: int) -> float | None:
    if not 0 < k <= len(times) or times[k - 1] is None:
        return None
    return number({"execution_time": times[k - 1]}, "execution_time")
