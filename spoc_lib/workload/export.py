"""The workload in peers' formats, so that anyone can check us with their own tool.

What each keeps and loses stands beside its function. All are JSON Lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from spoc_lib.workload.audit.sharing import layout
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.identity import mix
from spoc_lib.workload.messages import Conversation
from spoc_lib.workload.playback import Pace, Played, play
from spoc_lib.workload.script import ConversationScript, Segment

MOONCAKE_BLOCK_TOKENS = 512
#: The number of each block, known by its parent's number and its own pieces (stream, start, tokens).
Ids = dict[tuple[int, tuple[tuple[int, int, int], ...]], int]


def mooncake(script: ConversationScript, users: int, turns: int, pace: Pace | None = None,
             block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Iterator[dict[str, Any]]:
    """One line a request in the order of sending: timestamp (ms), input_length, output_length, hash_ids, and beside
    Mooncake's own fields conversation_id and think_time_ms (peers that know `session_id` and `delay` take the lengths
    of later turns for what is added, so these names are not theirs).

    Kept: lengths, times at the stated pace, who shares which prefix (in blocks). Lost: text, personas, the dependence
    of a turn on the reply before it.
    """
    ids: Ids = {}
    played = sorted(play(script, users, turns, pace), key=lambda p: (p.time_s, p.turn.user, p.turn.turn))
    contexts: dict[int, list[tuple[int, int]]] = {}
    for item in played:
        turn = item.turn
        runs, after = layout(contexts.get(turn.user), turn)
        contexts[turn.user] = after
        yield {"timestamp": round(item.time_s * 1000), "input_length": turn.prompt_tokens,
               "output_length": turn.output_tokens, "hash_ids": _block_ids(runs, turn.prompt_tokens, block_tokens, ids),
               "conversation_id": f"{turn.user}-{turn.conversation}",
               "think_time_ms": round(turn.think_time_s * 1000)}


def _block_ids(runs: list[tuple[int, int]], prompt_tokens: int, block_tokens: int, ids: Ids) -> list[int]:
    """Ids of a prompt's blocks: equal exactly where two prompts agree up to the block's end."""
    blocks: list[int] = []
    parent = -1
    piece: list[tuple[int, int, int]] = []
    room = block_tokens
    for stream, tokens in [*runs, (0, prompt_tokens - sum(tokens for _, tokens in runs))]:
        start = 0
        while start < tokens:
            take = min(room, tokens - start)
            piece.append((stream, start, take))
            start += take
            room -= take
            if room == 0:
                parent = ids.setdefault((parent, tuple(piece)), len(ids))
                blocks.append(parent)
                piece, room = [], block_tokens
    if piece:
        blocks.append(ids.setdefault((parent, tuple(piece)), len(ids)))
    return blocks


def openai_messages(script: ConversationScript, users: int, turns: int, corpus: Corpus) -> Iterator[dict[str, Any]]:
    """One line a conversation: `messages` with role and content, replies synthetic, and `output_tokens` of each reply.

    Kept: text, sizes, order. Lost: think times, the server's own replies.
    """
    for key, items in _conversations(script, users, turns):
        conversation = Conversation(corpus)
        outputs = []
        for item in items:
            conversation.apply(item.turn)
            outputs += [reply for _, reply in item.turn.history if reply] + [item.turn.output_tokens]
            conversation.add_reply(_reply_text(corpus, item), item.turn.output_tokens)
        yield {"id": key, "persona": items[0].turn.persona, "messages": conversation.messages, "output_tokens": outputs}


def sharegpt(script: ConversationScript, users: int, turns: int, corpus: Corpus) -> Iterator[dict[str, Any]]:
    """One line a conversation in ShareGPT's form (`conversations` with from and value); as `openai_messages`."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    for record in openai_messages(script, users, turns, corpus):
        yield {"id": record["id"], "conversations": [{"from": names[m["role"]], "value": m["content"]}
                                                     for m in record["messages"]]}


def aiperf(script: ConversationScript, users: int, turns: int, corpus: Corpus) -> Iterator[dict[str, Any]]:
    """aiperf's conversations (`--custom-dataset-type multi-turn`), one line each: live replies join the history.

    Kept: text, sizes, output budgets (exactly, where the server knows ignore_eos), think times, when each begins
    (`--fixed-schedule`). Lost: personas. The replies of a conversation that begins in its middle are part of its first
    prompt.
    """
    for key, items in _conversations(script, users, turns):
        said: list[dict[str, Any]] = []
        for k, item in enumerate(items):
            system, text = _texts(corpus, item)
            if system:
                said.append({"role": "system", "text": system})
            field, at_s = ("timestamp", item.time_s) if k == 0 else ("delay", item.turn.think_time_s)
            said.append({"text": text, "output_length": item.turn.output_tokens, field: round(at_s * 1000),
                         "extra": {"ignore_eos": True}})
        yield {"session_id": key, "turns": said}


def guidellm(script: ConversationScript, users: int, turns: int, corpus: Corpus) -> Iterator[dict[str, Any]]:
    """guidellm's turn-indexed columns: one line a conversation, `prefix`, `prompt_0`, `output_tokens_count_0`, …

    Kept: text, sizes, output budgets, common ground as the prefix. Lost: think times, personas. The replies of a
    conversation that begins in its middle are part of its first prompt.
    """
    for key, items in _conversations(script, users, turns):
        record: dict[str, Any] = {"id": key}
        for k, item in enumerate(items):
            system, record[f"prompt_{k}"] = _texts(corpus, item)
            if system:
                record["prefix"] = system
            record[f"output_tokens_count_{k}"] = item.turn.output_tokens
        yield record


FORMATS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "mooncake": mooncake, "openai": openai_messages, "sharegpt": sharegpt, "aiperf": aiperf, "guidellm": guidellm,
}


def lines(records: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Records as lines of JSON."""
    for record in records:
        yield orjson.dumps(record) + b"\n"


def _conversations(script: ConversationScript, users: int, turns: int) -> Iterator[tuple[str, list[Played]]]:
    """Turns grouped by context: a conversation that compacts or rewrites its history goes on as another record."""
    key, part = "", 0
    group: list[Played] = []
    for item in play(script, users, turns):
        if item.turn.starts:
            if group:
                yield key, group
            group, part = [], part + 1
            key = f"{item.turn.user}-{item.turn.conversation}-{part}"
        group.append(item)
    if group:
        yield key, group


def _texts(corpus: Corpus, item: Played) -> tuple[str, str]:
    """(system message, all else) that a turn brings; no system message: empty."""
    messages = Conversation(corpus).apply(item.turn)
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
    return system, "".join(message["content"] for message in messages)


def _reply_text(corpus: Corpus, item: Played) -> str:
    turn = item.turn
    return corpus.text(Segment(mix(91, turn.user, turn.conversation, turn.turn), turn.output_tokens, "turn"))
