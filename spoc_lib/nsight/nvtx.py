"""NVTX ranges of a trace: read by text, and the texts that mark engine steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.kerneltrace import phase_of
from spoc_lib.nsight.sources import TraceSource

NVTX = "NVTX_EVENTS"
_THREAD_BITS = 0xFFFFFF  # globalTid = hardware, machine, process, thread; the thread stands in the last 24 bits
_STEP = re.compile(r"^spoc step=(\d+)\b")
#: What vLLM's worker annotates a step with while its profiler is on: requests and their tokens by kind …
_VLLM_STEP = re.compile(r"^execute_(?:context|new)_(\d+)\((\d+)\)_(?:generation|cached)_(\d+)\((\d+)\)$")
#: … or, with detailed_trace_annotation, also sums over requests: sq new tokens, sk context with them, products of both.
_VLLM_DETAILED = re.compile(r"^execute_(\d+)_context_(\d+)\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)"
                            r"_generation_(\d+)\(sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+)\)$")


@dataclass(frozen=True)
class Range:
    """One NVTX range on the host's clock, ns."""

    global_pid: int
    start: int
    end: int
    text: str


def read_ranges(source: TraceSource, *, beginnings: Sequence[str] = ("",)) -> list[Range]:
    """Push/pop and start/end ranges whose text begins with one of `beginnings`, ordered by start. The text stands in
    the row or in StringIds."""
    columns = source.columns(NVTX)
    if not {"start", "end"} <= set(columns) or not {"text", "textId"} & set(columns):
        return []
    tid = ("globalTid",) if "globalTid" in columns else ()
    found: list[tuple] = []
    if "textId" in columns and "StringIds" in source.tables():
        strings = dict(source.rows("StringIds", ("id", "value"), starts={"value": beginnings}))
        ids = list(strings)
        for at in range(0, len(ids), 500):
            found += [(strings[text], start, end, *thread) for text, start, end, *thread in
                      source.rows(NVTX, ("textId", "start", "end", *tid), {"textId": ids[at:at + 500]})]
    if "text" in columns:
        found += source.rows(NVTX, ("text", "start", "end", *tid), starts={"text": beginnings})
    ranges = [Range((thread[0] or 0) & ~_THREAD_BITS if thread else 0, start, end, text)
              for text, start, end, *thread in found if text and end is not None and end >= start]
    return sorted(ranges, key=lambda r: (r.start, r.end))


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


def extent(source: TraceSource, text: str) -> tuple[int, int]:
    """First start and last end of the ranges with this text, ns. InputError when there is none."""
    ranges = [r for r in read_ranges(source, beginnings=(text,)) if r.text == text]
    if not ranges:
        raise InputError("no-range", f"{source.path} holds no NVTX range named '{text}'")
    return ranges[0].start, max(r.end for r in ranges)


def launches(source: TraceSource, global_pid: int) -> tuple[np.ndarray, np.ndarray]:
    """(correlation ids, host start ns) of the API calls of one process, sorted by id; empty without API trace.

    Ids repeat across processes, hence one process at a time.
    """
    table = "CUPTI_ACTIVITY_KIND_RUNTIME"
    if not {"start", "globalTid", "correlationId"} <= set(source.columns(table)):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    ids, starts = [], []
    for start, thread, correlation in source.integers(table, ("start", "globalTid", "correlationId")):
        mine = (thread & ~_THREAD_BITS) == global_pid
        ids.append(correlation[mine])
        starts.append(start[mine])
    if not ids:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    correlation, start = np.concatenate(ids), np.concatenate(starts)
    order = np.argsort(correlation, kind="stable")
    return correlation[order], start[order]
