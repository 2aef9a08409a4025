"""Logs of one message a line: which lines form which conversation, and what of a log was abandoned.

Claude Code's lines form a tree (`uuid`, `parentUuid`): a root begins a context (a session, one after a compaction, a
sub-agent's side chain), and what was taken back stays in the file beside what replaced it. Other logs (Codex,
OpenHands, tables of messages) are told apart by the id of their session, where they have one, and read in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spoc_lib.workload.traces.messages_in import MARKS, Lost

_IDS = ("conversation_id", "session_id", "sessionId", "thread_id", "chat_id", "conversationId", "trajectory_id")


def conversations(lines: list[dict], name: str, lost: Lost) -> Iterator[tuple[str, list[dict], str | None]]:
    """(name, messages, the session whose sub-agent it is) of each conversation in a log."""
    if any("uuid" in line and "parentUuid" in line for line in lines):
        yield from _tree(lines, name, lost)
        return
    groups: dict[str, list[dict]] = {}
    for line in lines:
        own = next((str(line[field]) for field in _IDS if line.get(field) is not None), name)
        groups.setdefault(own, []).append(line)
    yield from ((own, group, None) for own, group in groups.items())


def _tree(lines: list[dict], name: str, lost: Lost) -> Iterator[tuple[str, list[dict], str | None]]:
    # several lines of one reply (the API's message id) are a chain of their own making: all of them stay
    lines = [line for line in lines if line.get("uuid") and line.get("type") not in MARKS]
    parents = {str(line["uuid"]): line.get("parentUuid") for line in lines}
    roots: dict[str, str] = {}
    for uuid in parents:
        chain, one = [], uuid
        while one not in roots and parents.get(one) in parents and one not in chain:
            chain.append(one)
            one = str(parents[one])
        for link in (*chain, one):
            roots[link] = roots.get(one, one)
    contexts: dict[str, list[dict]] = {}
    for line in lines:
        contexts.setdefault(roots[str(line["uuid"])], []).append(line)
    told: dict[str, int] = {}
    for context in contexts.values():
        session = str(context[0].get("sessionId") or name)
        side = bool(context[0].get("isSidechain"))
        told[session] = told.get(session, 0) + 1
        label = (
            session if told[session] == 1 and not side else f"{session}/{context[0].get('agentId') or told[session]}"
        )
        kept = _current(context, parents)
        for _ in range(len(context) - len(kept)):
            lost += "message on an abandoned branch"
        spoken = [
            line for line in kept if line.get("type") in ("user", "assistant") and not line.get("isApiErrorMessage")
        ]
        if any(line.get("type") == "assistant" for line in spoken):
            lost += "session whose log holds neither system prompt nor tools"
            yield label, spoken, session if side else None
        else:
            for _ in spoken:
                lost += "message of a context without a reply"


def _current(context: list[dict], parents: dict[str, Any]) -> list[dict]:
    """The lines that lead to the last message, with all parts of their replies and all results of their calls."""
    one: Any = next((line["uuid"] for line in reversed(context) if line.get("type") in ("user", "assistant")), None)
    chain = set()
    while one is not None and one not in chain:
        chain.add(one)
        one = parents.get(one)
    replies = {_inner(line).get("id") for line in context if line["uuid"] in chain} - {None}
    kept = [line for line in context if line["uuid"] in chain or _inner(line).get("id") in replies]
    calls = {id_ for line in kept for id_ in _ids(line, "tool_use", "id")}
    return [line for line in context if line in kept or calls & _ids(line, "tool_result", "tool_use_id")]


def _inner(line: dict) -> dict:
    message = line.get("message")
    return message if isinstance(message, dict) else {}


def _ids(line: dict, kind: str, field: str) -> set[str]:
    content = _inner(line).get("content")
    return (
        {str(part[field]) for part in content if isinstance(part, dict) and part.get("type") == kind and field in part}
        if isinstance(content, list)
        else set()
    )
