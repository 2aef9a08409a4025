"""Length-only traces: kv-cache-tester JSON, its Parquet tables, Mooncake JSONL.

They hold lengths, times and block hashes but no text. What is kept: lengths, output budgets, gaps, and which prompt
shares which prefix with which; the text is synthesised when the session is played.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.workload.tokenizer import Tokenizer
from spoc_lib.workload.traces.sessions import (
    MOST_S,
    MOST_TOKENS,
    Message,
    Owner,
    PrefixIndex,
    Reject,
    Request,
    Session,
    shared_blocks,
)

KV_CACHE_TESTER = "kv-cache-tester"
MOONCAKE = "mooncake"
#: (record, reason) of what is left out.
Skipped = tuple[str, str]
#: Times may count from 1970; later than the year 5000 none does.
_LAST_S = 1e11
#: Tokens a hash in Mooncake's own traces.
MOONCAKE_BLOCK_TOKENS = 512
#: Columns that make a table one of kv-cache-tester's requests.
TABLE_COLUMNS = frozenset({"cid", "k", "inp", "out", "lcp"})


def number(record: dict[str, Any], field: str, *, least: float = 0, most: float = MOST_S, default: Any = ...) -> Any:
    """A number of a record as a float; Reject names the field when it is absent, not a number, or out of bounds."""
    value = record.get(field)
    if value is None:
        if default is not ...:
            return default
        raise Reject(f"'{field}' is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Reject(f"'{field}' is not a number: {value!r:.40}")
    if value < least:
        raise Reject(f"'{field}' is {value:g}, below {least:g}: a negative time or length cannot be played")
    if value > most:
        raise Reject(f"'{field}' is {value:g}, beyond {most:g}: no such recording can be played")
    return float(value)


def tokens(record: dict[str, Any], field: str, *, least: int = 0, default: Any = ...) -> Any:
    """A whole number of tokens of a record, else as `number`."""
    value = number(record, field, least=least, most=MOST_TOKENS, default=default)
    if value is None or value is default:
        return value
    if value != int(value):
        raise Reject(f"'{field}' is not a whole number: {value!r:.40}")
    return int(value)


def is_kv_cache_tester(record: Any) -> bool:
    """Whether a record looks like a kv-cache-tester session."""
    return isinstance(record, dict) and isinstance(record.get("requests"), list) and (
        "block_size" in record or "hash_id_scope" in record or "tool_tokens" in record)


def is_mooncake(record: Any) -> bool:
    """Whether a record looks like a line of a Mooncake trace."""
    return isinstance(record, dict) and (
        "input_length" in record and ("output_length" in record or "hash_ids" in record)
        or "text_input" in record and "output_length" in record)


def kv_cache_tester(record: dict[str, Any], name: str, first: int, global_index: PrefixIndex,
                    ) -> tuple[list[Session], list[Skipped]]:
    """A session and its sub-agents' sessions, with the records left out as (record, reason).

    `first`: position that the first session gets in the import; `global_index`: blocks of traces whose hashes mean the
    same in all files (`hash_id_scope: global`).
    """
    block = tokens(record, "block_size", least=1)
    index = global_index if record.get("hash_id_scope") == "global" else PrefixIndex()
    root = tuple(tokens(record, field, default=0) for field in ("tool_tokens", "system_tokens"))
    name = str(record.get("id") or name)
    sessions: list[Session] = []
    skipped: list[Skipped] = []
    nested: list[dict[str, Any]] = []
    main = _kv_requests(record["requests"], name, first, block, index, skipped, nested)
    if main:
        sessions.append(Session(name, KV_CACHE_TESTER, tuple(main), root))
    for k, agent in enumerate(nested, 1):
        label = f"{name}/{agent.get('agent_id') or f'agent_{k:03d}'}"
        at = first + len(sessions)
        requests = _kv_requests(agent["requests"], label, at, block, index, skipped, [])
        if requests:
            sessions.append(Session(label, KV_CACHE_TESTER, tuple(requests), parent=name))
    if not sessions and not skipped:
        skipped.append((name, "it holds no request"))
    return sessions, skipped


def _kv_requests(records: list[Any], name: str, at: int, block: int, index: PrefixIndex, skipped: list[Skipped],
                 nested: list[dict[str, Any]]) -> list[Request]:
    requests: list[Request] = []
    before: tuple[list[int], float, float | None] | None = None
    for k, record in enumerate(records):
        if isinstance(record, dict) and isinstance(record.get("requests"), list):
            nested.append(record)
            continue
        try:
            if not isinstance(record, dict):
                raise Reject("it is not an object")
            ids = _block_ids(record)
            prompt = tokens(record, "in", least=1)
            output = max(1, tokens(record, "out", default=1))
            time_s = number(record, "t", most=_LAST_S)
            service = number(record, "api_time", default=None)
            gap = number(record, "think_time", default=None)
            if before is not None:
                _in_order(time_s, before[1])
        except Reject as reason:
            skipped.append((f"{name} request {k}", str(reason)))
            continue
        if gap is None and before is not None and before[2] is not None:
            gap = max(0.0, time_s - before[1] - before[2])
        own = 0 if before is None else shared_blocks(before[0], ids)
        owner: Owner | None
        if before is not None and own >= len(before[0]) - 1:  # only appends, but for the last, partial block
            kept, owner = own, (at, len(requests) - 1)
        else:
            kept, owner = index.longest(ids)
            own = max(own, kept) if owner and owner[0] == at else own
        requests.append(Request(
            prompt, output, min(kept * block, prompt), owner if kept else None,
            None if before is None else min(own * block, prompt), gap, _is_human(record.get("input_types")), time_s,
            service,
        ))
        index.add(ids, (at, len(requests) - 1), own)
        before = (ids, time_s, service)
    return requests


def _in_order(time_s: float, before_s: float) -> None:
    if time_s < before_s:
        raise Reject(f"'t' is {time_s:g}, before the {before_s:g} of the request ahead of it: put them in the order of "
                     "their times")
    if time_s - before_s > MOST_S:
        raise Reject(f"'t' is {time_s:g}, more than {MOST_S:g} s after the request ahead of it")


def _block_ids(record: dict[str, Any]) -> list[int]:
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not ids:
        raise Reject("'hash_ids' is missing or empty")
    if not all(type(block) is int for block in ids):
        raise Reject("'hash_ids' holds something other than whole numbers")
    return ids


def _is_human(types: Any) -> bool:
    return not (isinstance(types, list) and any("tool_result" in str(kind) for kind in types))


def table(frame: pd.DataFrame, first: int) -> tuple[list[Session], list[Skipped]]:
    """Sessions from kv-cache-tester's table of requests: one row a request, with the length of the common prefix.

    Columns: cid, k, inp, out, lcp, and where present agent, depth, t, api, think, itypes, nblk. Blocks have 64 tokens.
    """
    block = 64
    frame = frame.assign(cid=_names(frame["cid"]), agent=_names(frame["agent"]) if "agent" in frame else None)
    skipped: list[Skipped] = [(f"row {at}", "'cid' is missing") for at in frame.index[frame["cid"].isna()]]
    sessions: list[Session] = []
    for (cid, agent), rows in frame.groupby(["cid", frame["agent"].fillna("main")], sort=False):
        rows = rows.sort_values("k", key=lambda k: pd.to_numeric(k, errors="coerce"), kind="stable")
        name = cid if agent == "main" else f"{cid}/{agent.removeprefix('main/')}"
        requests: list[Request] = []
        for row in rows.to_dict("records"):
            try:
                record = {key: _plain(value) for key, value in row.items()}
                requests.append(_table_request(record, first + len(sessions), requests, block))
            except Reject as reason:
                skipped.append((f"{name} request {row.get('k')}"[:100], str(reason)))
        if requests:
            sessions.append(Session(name, KV_CACHE_TESTER, tuple(requests), parent=None if agent == "main" else cid))
    return sessions, skipped


def _names(column: pd.Series) -> pd.Series:
    """Names as text, whatever stands in the column; None where there is none."""
    return pd.Series([None if absent else str(value) for value, absent in zip(column, column.isna(), strict=True)],
                     index=column.index, dtype=object)


def _plain(value: Any) -> Any:
    """A cell as JSON would hold it: numpy's numbers as Python's, absent ones as None."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value)) else value


def _table_request(record: dict[str, Any], at: int, before: list[Request], block: int) -> Request:
    prompt = tokens(record, "inp", least=1)
    kept = min(tokens(record, "lcp") * block, prompt)
    time_s, k = number(record, "t", most=_LAST_S, default=None), len(before)
    if k and time_s is not None and before[-1].time_s is not None:
        _in_order(time_s, before[-1].time_s)
    return Request(
        prompt, max(1, tokens(record, "out")), kept if k else 0, (at, k - 1) if k and kept else None,
        kept if k else None, number(record, "think", default=None), "tool_result" not in str(record.get("itypes", "")),
        time_s, number(record, "api", default=None),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a Mooncake-like trace. `parent`: the request that it continues; `delay_s`: pause since its session's
    previous reply, where stated; `text`: the prompt's own, instead of hashes."""

    name: str
    ids: list[int]
    prompt_tokens: int
    output_tokens: int
    time_s: float
    own: str | None
    session: str | None
    delay_s: float | None
    text: str | None


def _line(name: str, record: dict[str, Any], unit_s: float, tokenizer: Tokenizer) -> _Line:
    pause = next((field for field in ("think_time_ms", "delay_ms") if field in record), "delay")
    delay_ms = number(record, pause, most=MOST_S * 1000, default=None)
    text = record.get("text_input")
    if text is not None and not isinstance(text, str):
        raise Reject("'text_input' is no text")
    ids = _block_ids(record) if text is None and ("hash_ids" in record or "block_hashes" not in record
                                                  ) and record.get("hash_ids") is not None else []
    prompt = tokens(record, "input_length", least=1, default=None) if text is None else max(1, tokenizer.count(text))
    if prompt is None:
        raise Reject("'input_length' is missing")
    if len(ids) > prompt:
        raise Reject(f"'hash_ids' holds {len(ids)} blocks, more than the {prompt} tokens of 'input_length'")
    parent = record.get("parent_chat_id")
    own = record.get("chat_id")
    named = next((record[field] for field in ("conversation_id", "session_id") if record.get(field) is not None), None)
    if named is None and isinstance(parent, int) and parent >= 0:
        named = f"chat {parent}"
    time = next((field for field in ("timestamp", "timestamp_ms", "arrived_at") if field in record), "timestamp")
    return _Line(name, ids, prompt, max(1, tokens(record, "output_length", default=1)),
                 number(record, time, most=_LAST_S * 1000, default=0.0) * unit_s,
                 None if own is None else f"chat {own}",
                 None if named is None else str(named), None if delay_ms is None else delay_ms / 1000, text)


def _unit_s(records: list[dict[str, Any]], notes: list[str]) -> float:
    """Seconds of one unit of `timestamp`: Mooncake writes ms; Bailian's traces and Unix times of today are in s."""
    times = [record[field] for record in records for field in ("timestamp", "arrived_at")
             if isinstance(record.get(field), (int, float)) and not isinstance(record[field], bool)
             and math.isfinite(record[field])]
    if not times:
        return 1e-3
    fractions = sum(value != int(value) for value in times) > len(times) / 2
    if 1e9 <= min(times) < 1e11 or any("chat_id" in record or "arrived_at" in record for record in records):
        return 1.0
    if fractions and max(times) < 1e5:
        notes.append("'timestamp' holds fractions and is taken for seconds; Mooncake's own traces count milliseconds")
        return 1.0
    return 1e-3


def _fits(length: int, blocks: int, size: int) -> bool:
    """Whether a prompt has this many blocks of a size, its last and partial one hashed or not."""
    return blocks in (-(-length // size), length // size)


def block_tokens(records: list[dict[str, Any]], notes: list[str]) -> int:
    """Tokens a hash: as a record states it, else the size that the lengths give; Mooncake's 512 where they allow it.

    Reject where no size fits nine records of ten: what they share would be invented.
    """
    stated = {int(number(record, "block_size", least=1)) for record in records if record.get("block_size") is not None}
    if len(stated) > 1:
        raise Reject(f"its records state several block sizes: {', '.join(map(str, sorted(stated)))}")
    pairs = [(record["input_length"], len(record["hash_ids"])) for record in records
             if isinstance(record.get("hash_ids"), list) and record["hash_ids"]
             and type(record.get("input_length")) in (int, float) and math.isfinite(record["input_length"])
             and record["input_length"] >= len(record["hash_ids"])]
    pairs = [(int(length), count) for length, count in pairs]
    if stated or not pairs:
        size = stated.pop() if stated else MOONCAKE_BLOCK_TOKENS
        wrong = sum(not _fits(*pair, size) for pair in pairs)
        if wrong:
            notes.append(f"{wrong} of {len(pairs)} requests have another number of 'hash_ids' than their "
                         f"'input_length' has blocks of the {size} tokens that 'block_size' states")
        return size

    def share(size: int) -> float:
        return sum(_fits(*pair, size) for pair in pairs) / len(pairs)

    longest = max(pairs, key=lambda pair: pair[1])
    near = range(max(1, longest[0] // (longest[1] + 1)), min(longest[0] // max(1, longest[1] - 1), 1 << 16) + 1)
    common = [1 << power for power in range(17)]
    fitting = [size for size in (MOONCAKE_BLOCK_TOKENS, *common) if share(size) == 1]
    if not fitting and len(near) <= 4096:
        fitting = [size for size in near if share(size) == 1]
    if not fitting:
        best = max((MOONCAKE_BLOCK_TOKENS, *common), key=share)
        if share(best) < 0.9:
            raise Reject(f"the number of 'hash_ids' fits blocks of no one size to 'input_length' (512 tokens fit "
                         f"{share(MOONCAKE_BLOCK_TOKENS):.0%} of {len(pairs)} requests): state 'block_size' in "
                         "each record")
        fitting = [best]
        notes.append(f"blocks of {best} tokens fit {share(best):.1%} of {len(pairs)} requests, not all")
    size, others = fitting[0], sorted(set(fitting[1:]) - {fitting[0]})
    if size != MOONCAKE_BLOCK_TOKENS:
        notes.append(f"read with blocks of {size} tokens: that is what 'input_length' and the number of 'hash_ids' "
                     f"give (Mooncake's own have {MOONCAKE_BLOCK_TOKENS})")
    if others and any(count > 1 for _, count in pairs):
        notes.append(f"the lengths allow other block sizes than {size} tokens, too ({others[0]} to {others[-1]}): "
                     "state 'block_size' in each record to be sure")
    return size


def mooncake(records: Iterable[tuple[str, Any]], first: int, tokenizer: Tokenizer,
             ) -> tuple[list[Session], list[Skipped], list[str]]:
    """Sessions from Mooncake's requests in the order of their times, with sentences on how they were read. They name no
    session; a `conversation_id`, `session_id` or `parent_chat_id` decides where there is one.

    A request continues the session whose last prompt it repeats whole (but for its last, partial block); a prefix of
    512 tokens or less is common ground, not a session. Gaps include the unknown service time.
    """
    named = list(records)
    lines: list[_Line] = []
    skipped: list[Skipped] = []
    notes: list[str] = []
    values = [record for _, record in named]
    try:
        block = block_tokens(values, notes)
    except Reject as reason:
        return [], [(f"{named[0][0]} and {len(named) - 1} more" if len(named) > 1 else named[0][0], str(reason))], []
    unit_s = _unit_s(values, notes)
    for name, record in named:
        try:
            lines.append(_line(name, record, unit_s, tokenizer))
        except Reject as reason:
            skipped.append((name, str(reason)))
    for count, what in ((sum("output_length" not in record for record in values),
                         "state no 'output_length': one token is taken"),
                        (sum(not line.ids and line.text is None for line in lines),
                         "hold neither 'hash_ids' nor text: they share nothing")):
        if count:
            notes.append(f"{count} of {len(named)} requests {what}")
    index = PrefixIndex()
    sessions: list[list[Request]] = []
    last: list[_Line] = []
    names: list[str] = []
    by_name: dict[str, int] = {}
    for line in sorted(lines, key=lambda line: line.time_s):
        kept, owner = index.longest(line.ids)
        if line.session is not None:
            session = by_name.setdefault(line.session, len(sessions))
            continues = session < len(sessions)
        else:
            session = owner[0] - first if owner and line.own is None else -1
            continues = session >= 0 and 1 < len(last[session].ids) <= len(line.ids) and kept > 1 and (
                kept >= max(len(last[session].ids) - 1, 512 // block))
        if not continues:
            session = len(sessions)
            sessions.append([])
            last.append(line)
            names.append(line.name if line.session is None else line.session)
        if line.own is not None:
            by_name[line.own] = session
        own, gap = None, None
        if continues:
            own = min(shared_blocks(last[session].ids, line.ids) * block, line.prompt_tokens)
            gap = line.time_s - last[session].time_s if line.delay_s is None else line.delay_s
            if gap > MOST_S:
                skipped.append((line.name, f"'timestamp' is more than {MOST_S:g} s after its session's last request"))
                continue
        at: Owner = (first + session, len(sessions[session]))
        text = () if line.text is None else (Message(line.text, line.prompt_tokens, "turn"),)
        sessions[session].append(Request(
            line.prompt_tokens, line.output_tokens, min(kept * block, line.prompt_tokens), owner, own,
            gap, True, line.time_s, messages=text))
        last[session] = line
        index.add(line.ids, at)
    return ([Session(name, MOONCAKE, tuple(requests)) for name, requests in zip(names, sessions, strict=True)], skipped,
            notes)
