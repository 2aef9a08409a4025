"""Engine steps on each GPU: from NVTX ranges through the launches, else from the kernels' own pattern.

A step runs from the start of its first kernel to the start of the next step's first kernel (the last one to the end
of its last kernel), so idle time before the next step belongs to the step that was too late to follow.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.nsight import nvtx
from spoc_lib.nsight.categories import RuleBook
from spoc_lib.nsight.nvtx import Range
from spoc_lib.nsight.trace import Activity, Rank, Trace

#: When the step ran on the host: its NVTX range, null where steps come from the kernels' pattern.
HOST_COLUMNS = ("host_start_ns", "host_end_ns")
#: step: the engine's own number, or a count; the batch's fields are null where the trace does not tell them.
STEP_COLUMNS = ("step", "phase", "start_ns", "end_ns", *HOST_COLUMNS, *Batch._fields)
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
    ranges = _step_ranges(trace)
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


def _step_ranges(trace: Trace) -> dict[tuple[int, int], list[Range]]:
    """The ranges that mark engine steps by (report, process), on the trace's clock."""
    found: dict[tuple[int, int], list[Range]] = {}
    for number, report in enumerate(trace.reports):
        for one in nvtx.step_ranges(report.source):
            moved = replace(one, start=one.start + report.shift_ns, end=one.end + report.shift_ns)
            found.setdefault((number, one.global_pid), []).append(moved)
    return found


def _from_ranges(trace: Trace, by_process: dict[tuple[int, int], list[Range]]) -> Steps:
    notes, result = [], {}
    for rank in trace.ranks:
        own, (launched, _) = by_process.get((rank.report, rank.global_pid)), trace.launched(rank)
        if not own or not launched.size:
            own = own or max(by_process.values(), key=len)
            launched = trace.activities[rank].start
            notes = ["step ranges were laid over the kernels by time, for the trace ties no launch to them"]
        steps = _cut(trace.activities[rank], own, launched)
        if not steps.empty:
            result[rank] = steps
    numbered = nvtx.parse_step(next(iter(by_process.values()))[0].text)["step"] is not None
    return Steps(result if numbered else _numbered(result), "nvtx", notes)


def _numbered(found: dict[Rank, pd.DataFrame]) -> dict[Rank, pd.DataFrame]:
    """Steps that carry no number of the engine's, numbered alike on all ranks: a rank's window may have opened some
    steps after another's, so each is laid along the first rank's steps where it fits best in time."""
    if not found:
        return found
    first = min(found.values(), key=lambda steps: steps.start_ns.iloc[0])
    begin = first.start_ns.to_numpy()
    for rank, steps in found.items():
        own = steps.start_ns.to_numpy()
        near = int(np.searchsorted(begin, own[0]))
        tried = {shift: min(own.size, begin.size - shift)
                 for shift in range(max(0, near - 2), min(near + 3, begin.size))}
        shift = min(tried, key=lambda s: float(np.abs(own[:tried[s]] - begin[s:s + tried[s]]).mean()), default=0)
        found[rank] = steps.assign(step=np.arange(own.size) + shift)
    return found


def range_window(trace: Trace, text: str) -> tuple[tuple[int, int], list[str]]:
    """(the window of the NVTX ranges named `text` on the GPUs, what a reader must know of it).

    A kernel belongs to a range when its launch lies in it: on the range's own thread, or, for a start/end range, on any
    of its process. The window reaches from the first such kernel to the end of the last. Where no launch is known or
    none lies in the ranges, it is their time on the host. InputError for a name that is not there or never ended.
    """
    found = [(number, one) for number, report in enumerate(trace.reports)
             for one in nvtx.ranges_named(report.source, text)]
    if not found:
        raise InputError("no-range", f"{trace.path} holds no NVTX range named '{text}'{_alike(trace, text)}")
    ended = [(n, replace(r, start=r.start + trace.reports[n].shift_ns, end=r.end + trace.reports[n].shift_ns))
             for n, r in found if r.ended]
    if not ended:
        raise InputError("no-range", f"the NVTX range '{text}' never ended in {trace.path}: the capture stopped "
                         f"before; give its time with --window "
                         f"{found[0][1].start / 1e9:.6f}:{trace.span_ns[1] / 1e9:.6f}")
    notes = [] if len(ended) == len(found) else [f"{len(found) - len(ended)} of {len(found)} ranges '{text}' never "
                                                 f"ended and are left out"]
    edges = []
    for rank in trace.ranks:
        launched, thread = trace.launched(rank)
        if launched.size:
            inside = np.zeros(launched.size, dtype=bool)
            for number, one in ended:
                if (number, one.global_pid) == (rank.report, rank.global_pid):
                    inside |= (launched >= one.start) & (launched <= one.end) & (
                        True if one.thread is None else thread == one.thread)
            if inside.any():
                activity = trace.activities[rank]
                edges.append((int(activity.start[inside].min()), int(activity.end[inside].max())))
    if edges:
        if len(ended) > 1:
            notes.append(f"{len(ended)} ranges are named '{text}': the window reaches from the first kernel launched "
                         f"in one to the end of the last, with what ran between them")
        return (min(e[0] for e in edges), max(e[1] for e in edges)), notes
    why = "no kernel was launched in it" if any(r.launches for r in trace.reports) else "the trace holds no launches"
    notes.append(f"the window is the time of '{text}' on the host, not its kernels': {why}")
    return (min(r.start for _, r in ended), max(r.end for _, r in ended)), notes


def _alike(trace: Trace, text: str) -> str:
    """The names nearest to one that is not there."""
    names = dict.fromkeys(r.text for report in trace.reports for r in nvtx.read_ranges(report.source))
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.5) or [
        name for name in names if text.lower() in name.lower()][:3]
    if near:
        return f"; near it: {', '.join(repr(name) for name in near)}"
    few = ", ".join(repr(name) for name in list(names)[:3])
    return f"; there are {len(names)} other names ({few}{' …' if len(names) > 3 else ''})" if names else \
        "; it holds no ranges at all (capture with -t cuda,nvtx)"


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
    frame["host_start_ns"], frame["host_end_ns"] = begin[which], finish[which]
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
