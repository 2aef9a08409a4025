"""Full-text trajectories: SWE-agent `.traj`, lists of messages, agents' session logs, requests as they were logged.

What is kept: the text (as the prompts that are really sent), its lengths as the tokenizer counts them, the order of
turns, and the time a tool took where the source has it. A tool's result becomes a user message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from spoc_lib.workload.script import Layer
from spoc_lib.workload.template import MESSAGE_TOKENS, PROMPT_TOKENS
from spoc_lib.workload.tokenizer import Tokenizer
from spoc_lib.workload.traces.formats_blocks import number, tokens
from spoc_lib.workload.traces.messages_in import Lost, Said, is_message, said
from spoc_lib.workload.traces.sessions import MOST_S, Message, Reject, Request, Session

SWE_AGENT = "swe-agent"
MESSAGES = "messages"
_BLOCK_TOKENS = 16
#: Fields that hold a list of messages, and those in which a logged request or its answer lies.
LISTS = ("messages", "conversations", "conversation", "history", "trajectory", "events", "items", "contents", "chat",
         "chat_history", "dialog", "dialogue", "turns", "input")
WRAPS = ("body", "request", "request_body", "requestBody", "params", "kwargs", "inputs", "input", "data", "postData",
         "text",         "payload", "json", "optional_params", "model_call_dict")
#: A question and its answer: fields of the prompt (joined), and of the reply.
PAIRS = ((("instruction", "input"), "output"), (("prompt",), "completion"), (("prompt",), "response"),
         (("prompt",), "output"), (("question",), "answer"), (("query",), "response"), (("input",), "output"),
         (("problem",), "solution"), (("text_input",), "text_output"), (("prompt",), "chosen"))
_PROMPTS = ("prompt", "text_input", "question", "query")
#: Fields that state how long a reply was (or may be) whose text is not there.
_STATED = ("output_length", "output_tokens", "completion_tokens", "output_len", "max_completion_tokens", "max_tokens",
           "max_output_tokens")


def unpacked(record: Any) -> Any:
    """A record that is JSON in a text, as its value."""
    if isinstance(record, (str, bytes)) and record.lstrip()[:1] in ("{", "[", b"{", b"["):
        try:
            return orjson.loads(record)
        except orjson.JSONDecodeError:
            return None
    return None if isinstance(record, (str, bytes)) else record


def find_messages(record: Any) -> list[Any] | None:
    """The list of messages in a record: the record itself, or one of its usual fields (JSON text is unpacked)."""
    record = unpacked(record)
    if isinstance(record, list):
        if record and all(isinstance(pair, list) and all(isinstance(one, dict) and "source" in one for one in pair)
                          for pair in record):  # OpenHands' pairs of an action and its observation
            record = [one for pair in record for one in pair]
        return record if record and all(map(is_message, record)) else None
    if isinstance(record, dict):
        for field in LISTS:
            found = find_messages(record[field]) if field in record and not isinstance(record[field], dict) else None
            if found is not None:
                return found
    return None


def logged(record: Any, depth: int = 0) -> list[Any] | None:
    """The messages of a request as a client, gateway or batch file logs it, its answer appended; a single prompt and
    its answer, too. None when there is none."""
    record = unpacked(record)
    if not isinstance(record, dict) or depth > 3:
        return None
    found = find_messages(record)
    for field in WRAPS if found is None else ():
        found = logged(record.get(field), depth + 1)
        if found is not None:
            break
    if found is not None:
        system = record.get("system") or record.get("instructions") or record.get("systemInstruction")
        head = [{"role": "system", "content": system}] if isinstance(system, (str, list, dict)) and system and (
            not any(m.get("role") == "system" for m in found)) else []
        tools = record.get("tools") or record.get("functions")
        if isinstance(tools, list) and tools:
            head.append({"role": "system", "content": orjson.dumps(tools, default=str).decode()})
        return [*head, *found, *_answer(record)]
    for prompts, reply in PAIRS:
        asked = [record[name] for name in prompts if isinstance(record.get(name), str) and record[name]]
        if asked and isinstance(record.get(reply), str):
            head = [{"role": "system", "content": record["system"]}] if isinstance(record.get("system"), str) else []
            return [*head, {"role": "user", "content": "\n".join(asked)},
                    {"role": "assistant", "content": record[reply]}]
    for name in (*_PROMPTS, "input"):
        prompt = record.get(name)
        if isinstance(prompt, str) and prompt and (depth or stated_output(record) is not None):
            return [{"role": "user", "content": prompt}, *_answer(record)]
    return None


def _answer(record: dict) -> list[Any]:
    """The answer logged with a request: the message of the first choice, or what it holds else."""
    for name in ("response", "response_body", "responseBody", "output", "completion", "outputs", "choices"):
        value = unpacked(record.get(name))
        if value is None and isinstance(record.get(name), str):
            return [{"role": "assistant", "content": record[name]}]
        if name == "choices":
            value = record
        for field in ("body", "content", "text", "model_response"):
            inner = unpacked(value.get(field)) if isinstance(value, dict) else None
            value = inner if isinstance(inner, dict) else value
        if isinstance(value, dict):
            choices = value.get("choices") or value.get("candidates")
            first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
            if first is not None:
                value = first.get("message") or first.get("content") or first
            elif isinstance(value.get("output"), list):
                return [item for item in value["output"] if is_message(item)]
            if isinstance(value, dict) and any(key in value for key in ("content", "text", "parts", "tool_calls")):
                return [{**{k: v for k, v in value.items() if k != "type"}, "role": "assistant"}]
        if isinstance(value, list) and value and all(map(is_message, value)):
            return value
    return []


def stated_output(record: Any, depth: int = 0) -> int | None:
    """Length of a reply whose text is not logged: as its usage says, else as the request allowed it."""
    record = unpacked(record)
    if not isinstance(record, dict) or depth > 3:
        return None
    for name in ("usage", "response", *WRAPS):
        inner = stated_output(record.get(name), depth + 1)
        if inner is not None:
            return inner
    for name in _STATED:
        if record.get(name) is not None and not isinstance(record[name], (list, dict)):  # a list is one of each reply
            return max(1, tokens(record, name))
    return None


def is_trajectory(record: Any) -> bool:
    """SWE-agent's own file: a `trajectory` of steps, or a `history` of messages with roles."""
    if not isinstance(record, dict):
        return False
    history, steps = record.get("history"), record.get("trajectory")
    return (isinstance(history, list) and find_messages(history) is not None
            and all(isinstance(m, dict) and "role" in m for m in history)
            or isinstance(steps, list) and any(isinstance(step, dict) and "action" in step and "source" not in step
                                               for step in steps))


def trajectory(record: dict, name: str, at: int, tokenizer: Tokenizer, lost: Lost) -> Session:
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
    return _session(history, name, SWE_AGENT, at, tokenizer, lost, times)


def conversation(messages: list, name: str, at: int, tokenizer: Tokenizer, lost: Lost, *, parent: str | None = None,
                 unanswered: int | None = None) -> Session:
    """A session from messages of any kind that `messages_in` knows. `unanswered`: tokens of a last reply whose text is
    not there."""
    return _session(messages, name, MESSAGES, at, tokenizer, lost, [], parent, unanswered)


def unanswered(messages: list) -> bool:
    """Whether the last message that says anything waits for a reply."""
    last = [one.role for message in messages for one in said(message, Lost()) if one.text]
    return bool(last) and last[-1] != "assistant"


def _turns(messages: list, lost: Lost) -> Iterator[tuple[list[Said], list[Said]]]:
    """(what is appended, the reply) of each request. Messages of the assistant that follow each other are one reply; a
    demonstration is no reply; what it says before anybody asked stands in the prompt."""
    known = ("system", "user", "tool", "assistant")
    told = [one for message in messages for one in said(message, lost)]
    last = max((k for k, one in enumerate(told) if one.role == "assistant"), default=-1)
    odd = [one.role for one in told[:last] or told if one.role not in known]
    if odd:
        raise Reject(f"a message has the unknown role '{odd[0]}'")
    pending: list[Said] = []
    reply: list[Said] = []
    asked = False
    for one in [*told, Said("end", "")]:
        if one.role == "assistant" and not one.demonstration and asked:
            reply.append(one)
            continue
        if reply:
            yield pending, reply
            pending, reply = [], []
        if one.role in known and one.text:
            pending.append(one)
            asked = asked or one.role != "assistant"
        elif one.role not in (*known, "end"):
            lost += f"closing message of role '{one.role}'"
    if pending:
        yield pending, []


def _session(messages: list, name: str, form: str, at: int, tokenizer: Tokenizer, lost: Lost, times: list,
             parent: str | None = None, unanswered: int | None = None) -> Session:
    """Every reply of the assistant answers a request made of all that stands before it."""
    requests: list[Request] = []
    prompt = reply_tokens = 0
    before_s = None
    for pending, reply in _turns(messages, lost):
        if not reply and unanswered is None:
            if requests:
                lost += "text after the last reply, to which no request is recorded"
            break
        appended = _merge(pending, tokenizer)
        own = (prompt + 1 + reply_tokens) // _BLOCK_TOKENS * _BLOCK_TOKENS if requests else None
        prompt += sum(part.tokens for part in appended) + MESSAGE_TOKENS * len({_side(part) for part in appended})
        prompt += reply_tokens + MESSAGE_TOKENS if requests else PROMPT_TOKENS
        reply_tokens = tokenizer.count("\n".join(one.text for one in reply if one.text)) if reply else unanswered or 1
        k, sent_s = len(requests), next((one.time_s for one in reversed(pending) if one.time_s is not None), None)
        requests.append(Request(
            prompt, max(1, reply_tokens), own or 0, (at, k - 1) if k else None, own, _gap(times, k, sent_s, before_s),
            bool(pending) and pending[-1].role != "tool" and (form != SWE_AGENT or k == 0), sent_s, messages=appended,
        ))
        before_s = next((one.time_s for one in reversed(reply) if one.time_s is not None), None)
    if not requests:
        raise Reject("it holds no assistant message, so no request")
    return Session(name, form, tuple(requests), parent=parent)


def _merge(pending: list[Said], tokenizer: Tokenizer) -> tuple[Message, ...]:
    """What a request appends: at most one system text (common ground) and one user text."""
    merged = []
    sides: tuple[tuple[Layer, bool], ...] = (("organisation", True), ("turn", False))
    for layer, system in sides:
        text = "\n".join(one.text for one in pending if (one.role == "system") is system)
        if text:
            merged.append(Message(text, max(1, tokenizer.count(text)), layer))
    if not merged:
        merged.append(Message("\n", 1, "turn"))
    return tuple(merged)


def _side(message: Message) -> str:
    return "system" if message.layer == "organisation" else "user"


def _gap(times: list, k: int, sent_s: float | None, before_s: float | None) -> float | None:
    if 0 < k <= len(times) and times[k - 1] is not None:
        return number({"execution_time": times[k - 1]}, "execution_time")
    if k and sent_s is not None and before_s is not None and 0 <= sent_s - before_s <= MOST_S:
        return sent_s - before_s
    return None
