"""Engine steps on each GPU: from NVTX ranges through the launches, else from the kernels' own pattern.

A step runs from the start of its first kernel to the start of the next step's first kernel (the last one to the end
of its last kernel), so idle time before the next step belongs to the step that was too late to follow.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from spoc_lib.engine.batch import Batch
from spoc_lib.nsight import nvtx
from spoc_lib.nsight.categories import RuleBook
from spoc_lib.nsight.nvtx import Range
from spoc_lib.nsight.trace import Activity, Rank, Trace

#: step: the engine's own number, or a count; the batch's fields are null where the trace does not tell them.
STEP_COLUMNS = ("step", "phase", "start_ns", "end_ns", *Batch._fields)
_HINTS = ("decode_step", "decode", "prefill", "either")  # PhaseHints, one bit each
_FEWEST_STEPS = 3  # fewer repeats of a pattern are no pattern


@dataclass(frozen=True)
class Steps:
    """Steps of each rank. source: nvtx | kernels | none."""

    by_rank: dict[Rank, pd.DataFrame]
    source: str
    notes: list[str] = field(default_factory=list)

    def of(self, rank: Rank) -> pd.DataFrame:
        """The steps of one rank; empty where none were found."""
        found = self.by_rank.get(rank)
        return found if found is not None else pd.DataFrame(columns=list(STEP_COLUMNS))


def find_steps(trace: Trace, rules: RuleBook) -> Steps:
    """The steps of every rank."""
    ranges = nvtx.step_ranges(trace.source)
    if ranges:
        return _from_ranges(trace, ranges)
    found = {rank: steps for rank in trace.ranks
             if (steps := _from_kernels(trace, trace.activities[rank], rules)) is not None}
    if found:
        unknown = int(sum((steps.phase == "unknown").sum() for steps in found.values()))
        return Steps(found, "kernels", [
            "steps were recognised by their sampling kernels, phases by the attention kernels' names"
            + (f"; {unknown} steps run attention kernels that serve prompts and single tokens alike, so their phase is "
               f"unknown" if unknown else "") + ": NVTX ranges would tell more"])
    return Steps({}, "none", ["no steps recognised: neither NVTX step ranges nor a repeating kernel pattern"])


def range_window(trace: Trace, text: str) -> tuple[int, int]:
    """The extent of the NVTX ranges named `text`."""
    return nvtx.extent(trace.source, text)


def _from_ranges(trace: Trace, ranges: list[Range]) -> Steps:
    by_pid: dict[int, list[Range]] = {}
    for item in ranges:
        by_pid.setdefault(item.global_pid, []).append(item)
    notes, result = [], {}
    for rank in trace.ranks:
        own = by_pid.get(rank.global_pid)
        activity = trace.activities[rank]
        ids, starts = nvtx.launches(trace.source, rank.global_pid) if own else (np.empty(0), np.empty(0))
        if own and ids.size and activity.correlation.size:
            at = np.clip(np.searchsorted(ids, activity.correlation), 0, ids.size - 1)
            launched = np.where(ids[at] == activity.correlation, starts[at], -1)
        else:
            own = own or max(by_pid.values(), key=len)
            launched = activity.start
            notes = ["step ranges were laid over the kernels by time, for the trace ties no launch to them"]
        steps = _cut(activity, own, launched)
        if not steps.empty:
            result[rank] = steps
    return Steps(result, "nvtx", notes)


def _cut(activity: Activity, ranges: list[Range], launched: np.ndarray) -> pd.DataFrame:
    """The rank's steps: each range's kernels are those launched in it; `launched` on the ranges' clock."""
    begin = np.array([r.start for r in ranges])
    finish = np.array([r.end for r in ranges])
    step = np.searchsorted(begin, launched, side="right") - 1
    step = np.where((step >= 0) & (launched <= finish[np.maximum(step, 0)]), step, -1)
    inside = np.flatnonzero(step >= 0)
    which, first = np.unique(step[inside], return_index=True)  # activities are sorted by start
    start = np.maximum.accumulate(activity.start[inside[first]]) if which.size else np.empty(0, np.int64)
    if not which.size:
        return pd.DataFrame(columns=list(STEP_COLUMNS))
    last = int(activity.end[inside][step[inside] == which[-1]].max())
    rows = [nvtx.parse_step(ranges[i].text) for i in which]
    frame = pd.DataFrame(rows).reindex(columns=list(STEP_COLUMNS))
    frame["step"] = [row["step"] if row["step"] is not None else int(i) for i, row in zip(which, rows, strict=True)]
    frame["start_ns"] = start
    frame["end_ns"] = np.append(start[1:], max(last, int(start[-1])))
    return frame[frame.end_ns > frame.start_ns].reset_index(drop=True)


def _from_kernels(trace: Trace, activity: Activity, rules: RuleBook) -> pd.DataFrame | None:
    """Steps between sampling kernels; None when the pattern does not repeat. Half steps at both ends are left out."""
    categories = [rules.match(name) for name in trace.names]
    closes = _closes(trace, activity, rules, categories)
    begins = closes[:-1] + 1
    begins = begins[begins < len(activity)]
    if begins.size < _FEWEST_STEPS:
        return None
    hint = np.array([sum(1 << _HINTS.index(told) for told in rules.phase_hints(name)) if category == "attn" else 0
                     for name, category in zip(trace.names, categories, strict=True)], dtype=np.uint8)
    shown = np.bitwise_or.reduceat(hint[activity.name[:closes[-1] + 1]], begins)
    start = activity.start[begins]
    end = np.append(start[1:], activity.end[closes[-1]])
    frame = pd.DataFrame({"step": np.arange(begins.size), "phase": [_phase(int(bits)) for bits in shown],
                          "start_ns": start, "end_ns": end})
    return frame[frame.end_ns > frame.start_ns].reindex(columns=list(STEP_COLUMNS)).reset_index(drop=True)


def _closes(trace: Trace, activity: Activity, rules: RuleBook, categories: list[str | None]) -> np.ndarray:
    """Positions of the kernels that end a step: the last sampling kernel before attention resumes.

    A layer of experts may choose them by a sampler's kernel (argmax). Then the kernels of all layers but the last are
    followed by attention at once, and only the last layer's are followed by a matmul and the sampler itself: where some
    runs of such kernels hold matmuls and others hold none, the former end steps.
    """
    def of(*wanted: str) -> np.ndarray:
        return np.array([category in wanted for category in categories], dtype=bool)[activity.name]

    ends = np.array([rules.ends_step(name) for name in trace.names], dtype=bool)[activity.name] & of("sample")
    marks = np.flatnonzero(ends)
    if not marks.size:
        return marks
    attention, matmuls = np.cumsum(of("attn")), np.cumsum(of("gemm", "moe_gemm"))
    separate = attention if attention[-1] else matmuls  # a trace without attention that the rules know
    last = np.append(separate[marks[1:]] > separate[marks[:-1]], True)
    closes = marks[last]
    opens = marks[np.append(True, last[:-1])]
    whole = matmuls[closes] > matmuls[opens]
    return closes[whole] if whole.any() and not whole.all() else closes


def _phase(bits: int) -> str:
    """The phase of a step whose kernels told `bits` of PhaseHints."""
    told = {field for bit, field in enumerate(_HINTS) if bits >> bit & 1}
    decodes = bool(told & {"decode_step", "decode"})
    if "prefill" in told and decodes:
        return "mixed"
    if "decode_step" in told or (decodes and "either" not in told):
        return "decode"
    return "prefill" if told == {"prefill"} else "unknown"
