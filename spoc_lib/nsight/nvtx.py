"""What the host did: NVTX ranges, the texts among them that mark engine steps, and the calls that launched kernels."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.engine.batch import Batch
from spoc_lib.engine.kerneltrace import phase_of
from spoc_lib.nsight.sources import TraceSource
from spoc_lib.nsight.sqlitepages import NULL

NVTX = "NVTX_EVENTS"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_THREAD_BITS = 0xFFFFFF  # globalTid = hardware, machine, process, thread; the thread stands in the last 24 bits
_START_END, _DOMAIN = 60, 75  # eventType of a range that any thread may end, and of the row that names a domain
_STEP = re.compile(r"^spoc step=(\d+)\b")
#: What vLLM's worker annotates a step with while its profiler is on: requests and their tokens by kind …
_VLLM_STEP = re.compile(r"^execute_(?:context|new)_(\d+)\((\d+)\)_(?:generation|cached)_(\d+)\((\d+)\)$")
#: … or, with detailed_trace_annotation, also sums over requests: sq new tokens, sk context with them, products of both.
_VLLM_DETAILED = re.compile(r"^execute_(\d+)_context_(\d+)\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)"
                            r"_generation_(\d+)\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)$")


@dataclass(frozen=True)
class Range:
    """One NVTX range on the host's clock, ns. thread: the globalTid that a push/pop range belongs to, None for a
    start/end range, which is its whole process'. ended: False where the capture stopped before its end."""

    global_pid: int
    start: int
    end: int
    text: str
    thread: int | None = None
    domain: int = 0
    ended: bool = True


def _all_ranges(source: TraceSource, beginnings: Sequence[str]) -> list[Range]:
    """Also those without an end; ordered by start."""
    columns = source.columns(NVTX)
    if not {"start", "end"} <= set(columns) or not {"text", "textId"} & set(columns):
        return []
    wanted = [c for c in ("globalTid", "eventType", "domainId") if c in columns]
    found: list[tuple] = []
    if "textId" in columns and "StringIds" in source.tables():
        strings = dict(source.rows("StringIds", ("id", "value"), starts={"value": beginnings}))
        ids = list(strings)
        for at in range(0, len(ids), 500):
            found += [(strings[text], *rest) for text, *rest in
                      source.rows(NVTX, ("textId", "start", "end", *wanted), {"textId": ids[at:at + 500]})]
    if "text" in columns:
        found += source.rows(NVTX, ("text", "start", "end", *wanted), starts={"text": beginnings})
    ranges = []
    for text, start, end, *rest in found:
        more = dict(zip(wanted, rest, strict=True))
        tid, kind = more.get("globalTid") or 0, more.get("eventType")
        if text and (end is None or end >= start) and kind != _DOMAIN:
            ranges.append(Range(tid & ~_THREAD_BITS, start, start if end is None else end, text,
                                None if kind == _START_END or "globalTid" not in more else tid,
                                more.get("domainId") or 0, end is not None))
    return sorted(ranges, key=lambda r: (r.start, r.end))


def read_ranges(source: TraceSource, *, beginnings: Sequence[str] = ("",)) -> list[Range]:
    """Push/pop and start/end ranges whose text begins with one of `beginnings`, ordered by start. The text stands in
    the row or in StringIds."""
    return [r for r in _all_ranges(source, beginnings) if r.ended]


def step_ranges(source: TraceSource) -> list[Range]:
    """The ranges that mark engine steps."""
    return [r for r in read_ranges(source, beginnings=("spoc step=", "execute_")) if is_step(r.text)]


def is_step(text: str) -> bool:
    """Whether an NVTX range's text names an engine step."""
    return any(pattern.match(text) for pattern in (_STEP, _VLLM_STEP, _VLLM_DETAILED))


def parse_step(text: str) -> dict:
    """{step, phase, and the batch's fields that the text tells}. ValueError for any other text."""
    vllm = _VLLM_STEP.match(text)
    if vllm:
        prefills, prefill_tokens, decodes, decode_tokens = (int(g) for g in vllm.groups())
        return {"step": None, "phase": phase_of(prefills, decodes), "tokens": prefill_tokens + decode_tokens,
                "decodes": decodes, "prefills": prefills, "prefill_tokens": prefill_tokens,
                "logits": prefills + decodes}
    detailed = _VLLM_DETAILED.match(text)
    if detailed:
        return _detailed(*(int(g) for g in detailed.groups()))
    if not _STEP.match(text):
        raise ValueError(f"not a step: {text!r}")
    pairs = dict(part.split("=", 1) for part in text.split()[1:] if "=" in part)
    result: dict = {"step": int(pairs["step"])}
    for field in Batch._fields:
        if field in pairs:
            result[field] = float(pairs[field])
    result["phase"] = pairs.get("phase") or phase_of(int(result.get("prefills", 0)), int(result.get("decodes", 0)))
    return result


def _detailed(tokens: int, prefills: int, new: int, context: int, new_new: int, new_context: int, decodes: int,
              _decode_new: int, decode_context: int, *_squares: int) -> dict:
    """A batch from vLLM's sums. Pairs of a causal chunk: sum of new x (before + (new + 1) / 2), and its context holds
    the chunk itself, so that is sqsk - sqsq / 2 + sq / 2. What a sliding window leaves of them is not told."""
    return {"step": None, "phase": phase_of(prefills, decodes), "tokens": tokens, "decodes": decodes,
            "decode_context": decode_context, "prefills": prefills, "prefill_tokens": new,
            "prefill_pairs": new_context - new_new / 2 + new / 2, "prefill_context": context - new,
            "logits": prefills + decodes}


def ranges_named(source: TraceSource, text: str) -> list[Range]:
    """The ranges with this text, or, for NAME@DOMAIN, those called NAME in that domain; also those without an end."""
    exact = [r for r in _all_ranges(source, (text,)) if r.text == text]
    name, separator, domain = text.rpartition("@")
    if exact or not separator:
        return exact
    number = {}
    columns = source.columns(NVTX)
    if {"eventType", "domainId"} <= set(columns):
        have = [c for c in ("text", "textId") if c in columns]
        for at, *texts in source.rows(NVTX, ("domainId", *have), {"eventType": [_DOMAIN]}):
            told = dict(zip(have, texts, strict=True))
            called = told.get("text") or dict(source.rows("StringIds", ("id", "value"),
                                                          {"id": [told.get("textId")]})).get(told.get("textId"))
            number[called] = at
    return [r for r in _all_ranges(source, (name,)) if r.text == name and domain in number
            and r.domain == number[domain]]


@dataclass(frozen=True)
class NcclCalls:
    """NCCL's own ranges of one report, by thread: starts, ends, kinds (1 send, 2 receive, 0 other), communicators."""

    by_thread: dict[int, tuple[list[int], list[int], list[int], list[str | None]]]

    def __bool__(self) -> bool:
        return bool(self.by_thread)

    def at(self, thread: int, launched: int) -> tuple[str | None, bool]:
        """(communicator, whether the launch both sends and receives) of what was launched at that time: by the call it
        lies in, and by those that the same group of calls had queued before. (None, False) outside NCCL's calls."""
        starts, ends, kinds, communicators = self.by_thread.get(thread, ([], [], [], []))
        n = bisect.bisect_right(starts, launched) - 1
        if n < 0 or ends[n] < launched:
            return None, False
        communicator, seen = communicators[n], {kinds[n]}
        while n > 0 and kinds[n - 1] and not (seen >= {1, 2} and communicator):
            n -= 1
            communicator = communicator or communicators[n]
            seen.add(kinds[n])
        return communicator, seen >= {1, 2}


def nccl_calls(source: TraceSource, shift_ns: int = 0) -> NcclCalls:
    """NCCL's ranges, which stand in the trace where NVTX was traced; their payload (the communicator) only where the
    report was exported with --include-json true."""
    columns = source.columns(NVTX)
    if not {"start", "end", "globalTid", "textId"} <= set(columns) or "StringIds" not in source.tables():
        return NcclCalls({})
    strings = dict(source.rows("StringIds", ("id", "value"), starts={"value": ("nccl",)}))
    names = {i: text for i, text in strings.items() if re.fullmatch(r"nccl[A-Z]\w*", text)}
    found, ids = [], list(names)
    json_text = ("jsonText",) if "jsonText" in columns else ()
    for at in range(0, len(ids), 500):
        found += source.rows(NVTX, ("start", "end", "globalTid", "textId", *json_text), {"textId": ids[at:at + 500]})
    by_thread: dict[int, tuple[list, list, list, list]] = {}
    for start, end, thread, name, *payload in sorted((r for r in found if r[1] is not None), key=lambda r: r[:2]):
        told = re.search(r'ommunicator[^"]*"\s*:\s*"?(-?\w+)', payload[0]) if payload and payload[0] else None
        kind = {"ncclSend": 1, "ncclRecv": 2}.get(names[name], 0)
        for column, value in zip(by_thread.setdefault(thread, ([], [], [], [])), (
                start + shift_ns, end + shift_ns, kind, told.group(1) if told else None), strict=True):
            column.append(value)
    return NcclCalls(by_thread)


@dataclass(frozen=True)
class Launches:
    """API calls of one process, by correlation id. start: host ns; thread: the whole globalTid."""

    correlation: np.ndarray
    start: np.ndarray
    thread: np.ndarray

    def of(self, correlation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(start, thread) of each activity's launch; NULL where the trace holds none. All kernels of a graph share the
        correlation id of its launch."""
        at = np.clip(np.searchsorted(self.correlation, correlation), 0, self.correlation.size - 1)
        known = self.correlation[at] == correlation
        return np.where(known, self.start[at], NULL), np.where(known, self.thread[at], NULL)


def read_launches(source: TraceSource) -> dict[int, Launches]:
    """The API calls of each process (globalPid), for ids repeat across processes; empty without an API trace."""
    if not {"start", "globalTid", "correlationId"} <= set(source.columns(RUNTIME)):
        return {}
    chunks = list(source.integers(RUNTIME, ("start", "globalTid", "correlationId")))
    if not chunks:
        return {}
    start, thread, correlation = np.concatenate(chunks, axis=1)
    process, result = thread & ~_THREAD_BITS, {}
    for pid in pd.unique(process).tolist():
        order = np.flatnonzero((process == pid) & (correlation != NULL))
        if not (np.diff(correlation[order]) > 0).all():  # of two calls with one id, the first launched
            order = order[np.lexsort((start[order], correlation[order]))]
        result[int(pid)] = Launches(correlation[order], start[order], thread[order])
    return {pid: found for pid, found in result.items() if found.correlation.size}
