"""Length-only traces: kv-cache-tester JSON, its Parquet tables, Mooncake JSONL.

They hold lengths, times and block hashes but no text. What is kept: lengths, output budgets, gaps, and which prompt
shares which prefix with which; the text is synthesised when the session is played.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from spoc_lib.workload.traces.sessions import Owner, PrefixIndex, Reject, Request, Session, shared_blocks

KV_CACHE_TESTER = "kv-cache-tester"
MOONCAKE = "mooncake"
#: Tokens a hash in Mooncake's traces.
MOONCAKE_BLOCK_TOKENS = 512
#: Columns that make a table one of kv-cache-tester's requests.
TABLE_COLUMNS = frozenset({"cid", "k", "inp", "out", "lcp"})


def number(record: dict, field: str, *, least: float = 0, whole: bool = False, default: Any = ...) -> Any:
    """A number of a record; Reject names the field when it is absent, not a number, or below `least`."""
    value = record.get(field)
    if value is None:
        if default is not ...:
            return default
        raise Reject(f"'{field}' is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise Reject(f"'{field}' is not a number: {value!r:.40}")
    if value < least:
        raise Reject(f"'{field}' is {value:g}, below {least:g}: a negative time or length cannot be played")
    if whole and value != int(value):
        raise Reject(f"'{field}' is not a whole number: {value!r:.40}")
    return int(value) if whole else float(value)


def is_kv_cache_tester(record: Any) -> bool:
    return isinstance(record, dict) and isinstance(record.get("requests"), list) and (
        "block_size" in record or "hash_id_scope" in record or "tool_tokens" in record)


def is_mooncake(record: Any) -> bool:
    return isinstance(record, dict) and "input_length" in record and "output_length" in record


def kv_cache_tester(record: dict, name: str, first: int, global_index: PrefixIndex) -> tuple[list[Session], list]:
    """A session and its sub-agents' sessions, with the records left out as (record, reason).

    `first`: position that the first session gets in the import; `global_index`: blocks of traces whose hashes mean the
    same in all files (`hash_id_scope: global`).
    """
    block = number(record, "block_size", least=1, whole=True)
    index = global_index if record.get("hash_id_scope") == "global" else PrefixIndex()
    root = tuple(number(record, field, whole=True, default=0) for field in ("tool_tokens", "system_tokens"))
    name = str(record.get("id") or name)
    sessions, skipped, nested = [], [], []
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


def _kv_requests(records: list, name: str, at: int, block: int, index: PrefixIndex, skipped: list, nested: list,
                 ) -> list[Request]:
    requests: list[Request] = []
    before: tuple[list[int], float, float] | None = None
    for k, record in enumerate(records):
        if isinstance(record, dict) and isinstance(record.get("requests"), list):
            nested.append(record)
            continue
        try:
            if not isinstance(record, dict):
                raise Reject("it is not an object")
            ids = _block_ids(record)
            prompt = number(record, "in", least=1, whole=True)
            time_s = number(record, "t")
            service = number(record, "api_time", default=None)
            gap = number(record, "think_time", default=None)
        except Reject as reason:
            skipped.append((f"{name} request {k}", str(reason)))
            continue
        if gap is None and before is not None and before[2] is not None:
            gap = max(0.0, time_s - before[1] - before[2])
        own = 0 if before is None else shared_blocks(before[0], ids)
        if before is not None and own >= len(before[0]) - 1:  # only appends, but for the last, partial block
            kept, owner = own, (at, len(requests) - 1)
        else:
            kept, owner = index.longest(ids)
            own = max(own, kept) if owner and owner[0] == at else own
        requests.append(Request(
            prompt, max(1, number(record, "out", whole=True, default=1)), min(kept * block, prompt),
            owner if kept else None, None if before is None else min(own * block, prompt), gap,
            _is_human(record.get("input_types")), time_s, service,
        ))
        index.add(ids, (at, len(requests) - 1), own)
        before = (ids, time_s, service)
    return requests


def _block_ids(record: dict) -> list[int]:
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not ids:
        raise Reject("'hash_ids' is missing or empty")
    if not all(type(block) is int for block in ids):
        raise Reject("'hash_ids' holds something other than whole numbers")
    return ids


def _is_human(types: Any) -> bool:
    return not (isinstance(types, list) and any("tool_result" in str(kind) for kind in types))


def table(frame: pd.DataFrame, first: int) -> tuple[list[Session], list]:
    """Sessions from kv-cache-tester's table of requests: one row a request, with the length of the common prefix.

    Columns: cid, k, inp, out, lcp, and where present agent, depth, t, api, think, itypes, nblk. Blocks have 64 tokens.
    """
    block = 64
    agents = frame["agent"].fillna("main") if "agent" in frame else pd.Series("main", index=frame.index)
    sessions: list[Session] = []
    skipped = [(f"row {at}", "'cid' is missing") for at in frame.index[frame["cid"].isna()]]
    for (cid, agent), rows in frame.groupby([frame["cid"], agents], sort=False):
        rows = rows.sort_values("k", key=lambda k: pd.to_numeric(k, errors="coerce"))
        name = str(cid) if agent == "main" else f"{cid}/{str(agent).removeprefix('main/')}"
        requests = []
        for row in rows.to_dict("records"):
            record = {key: None if isinstance(value, float) and math.isnan(value) else value
                      for key, value in row.items()}
            try:
                requests.append(_table_request(record, first + len(sessions), len(requests), block))
            except Reject as reason:
                skipped.append((f"{name} request {row.get('k')}", str(reason)))
        if requests:
            sessions.append(Session(name, KV_CACHE_TESTER, tuple(requests),
                                    parent=None if agent == "main" else str(cid)))
    return sessions, skipped


def _table_request(record: dict, at: int, k: int, block: int) -> Request:
    prompt = number(record, "inp", least=1, whole=True)
    kept = min(number(record, "lcp", whole=True) * block, prompt)
    return Request(
        prompt, max(1, number(record, "out", whole=True)), kept if k else 0, (at, k - 1) if k and kept else None,
        kept if k else None, number(record, "think", default=None),
        "tool_result" not in str(record.get("itypes", "")), number(record, "t", default=None),
        number(record, "api", default=None),
    )


def mooncake(records: Iterable[tuple[str, Any]], first: int) -> tuple[list[Session], list]:
    """Sessions from Mooncake's requests, which name no session (where there is a `session_id`, it decides).

    A request continues the session whose last prompt it repeats whole (but for its last, partial block); a prefix of a
    single block is common ground, not a session. Gaps include the unknown service time.
    """
    index = PrefixIndex()
    sessions: list[list[Request]] = []
    last_ids: list[list[int]] = []
    last_time: list[float] = []
    names: list[str] = []
    by_name: dict[str, int] = {}
    skipped = []
    for name, record in records:
        try:
            ids = _block_ids(record)
            prompt = number(record, "input_length", least=1, whole=True)
            output = max(1, number(record, "output_length", whole=True))
            time_s = number(record, "timestamp", default=0.0) / 1000
        except Reject as reason:
            skipped.append((name, str(reason)))
            continue
        kept, owner = index.longest(ids)
        session = owner[0] - first if owner else -1
        named = record.get("session_id")
        if named is not None:
            session = by_name.setdefault(str(named), len(sessions))
            continues = session < len(sessions)
        else:
            continues = session >= 0 and 1 < len(last_ids[session]) <= len(ids) and kept > 1 and (
                kept >= len(last_ids[session]) - 1)
        kept_tokens = min(kept * MOONCAKE_BLOCK_TOKENS, prompt)
        if continues:
            gap = number(record, "delay", default=None)
            gap = time_s - last_time[session] if gap is None else gap / 1000
        else:
            session = len(sessions)
            sessions.append([])
            last_ids.append([])
            last_time.append(0.0)
            names.append(name if named is None else str(named))
            gap = None
        at: Owner = (first + session, len(sessions[session]))
        own = min(shared_blocks(last_ids[session], ids) * MOONCAKE_BLOCK_TOKENS, prompt) if continues else None
        sessions[session].append(Request(prompt, output, kept_tokens, owner, own,
                                         None if gap is None else max(0.0, gap), True, time_s))
        last_ids[session], last_time[session] = ids, time_s
        index.add(ids, at)
    return [Session(name, MOONCAKE, tuple(requests)) for name, requests in zip(names, sessions, strict=True)], skipped
