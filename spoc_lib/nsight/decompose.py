"""Where the time of each GPU went: exclusive categories plus idle, exact to the nanosecond.

For each (process, device): sum over categories of busy_ns + idle_ns = window_ns. An instant in which several kernels
run belongs to one category: compute before collectives before copies (`categories.CATEGORIES`), so that a
collective's busy time is its exposed time; what compute hides of it is reported beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib.core import schemas
from spoc_lib.core.errors import InputError
from spoc_lib.nsight.categories import CATEGORIES, COMM, RuleBook, rule_book
from spoc_lib.nsight.collectives import Collectives, pair
from spoc_lib.nsight.intervals import GAP_LIMITS_NS, Ownership, own, sums
from spoc_lib.nsight.sources import cpu_threads
from spoc_lib.nsight.steps import Steps, find_steps, range_window
from spoc_lib.nsight.trace import Rank, Trace, load_trace, open_source

PHASES = ("prefill", "decode", "mixed", "unknown", "none")
GAP_CLASSES = ("up to 10 us", "10 to 100 us", "0.1 to 1 ms", "1 to 10 ms", "above 10 ms")


@dataclass(frozen=True)
class Decomposition:
    """A decomposed trace.

    table: DECOMPOSITION rows, by phase (`none`: outside every step), `idle` among the categories.
    steps: one row a (pid, device, step); see `steps.STEP_COLUMNS`.
    kernels: one row a (pid, device, name): category, kernels, total_ns, mean_ns; in the window.
    streams: one row a (pid, device, stream): kernels, total_ns (a stream runs one at a time).
    gaps: one row a (pid, device, length class of idle intervals): count, total_ns.
    collectives: one row a (pid, device): total_ns of collectives, exposed_ns and hidden_ns.
    waiting: the collectives paired across GPUs: waiting, transfer, and who is late.
    """

    path: str
    window_ns: tuple[int, int]
    simulated: bool
    table: pd.DataFrame
    steps: pd.DataFrame
    kernels: pd.DataFrame
    streams: pd.DataFrame
    gaps: pd.DataFrame
    collectives: pd.DataFrame
    waiting: Collectives
    unknown_kernels: list[dict]
    notes: list[str] = field(default_factory=list)
    metadata: dict = field(default_factory=dict)

    @property
    def window_s(self) -> float:
        return (self.window_ns[1] - self.window_ns[0]) / 1e9

    @property
    def devices(self) -> list[dict]:
        """[{pid, device, window_s, busy_s: {category: s}, idle_s, …}]; the same in whole ns beside it, and how much
        of the collectives compute hides."""
        comm = self.collectives.set_index(["pid", "device"])
        result = []
        for key, row in self.totals().iterrows():
            busy = {c: int(row[c]) for c in CATEGORIES}
            result.append({
                "pid": int(key[0]), "device": int(key[1]), "window_s": self.window_s,
                "busy_s": {c: ns / 1e9 for c, ns in busy.items()}, "idle_s": int(row["idle"]) / 1e9,
                "comm_exposed_s": int(comm.exposed_ns[key]) / 1e9, "comm_hidden_s": int(comm.hidden_ns[key]) / 1e9,
                "window_ns": self.window_ns[1] - self.window_ns[0], "busy_ns": busy, "idle_ns": int(row["idle"]),
            })
        return result

    def totals(self) -> pd.DataFrame:
        """ns by (pid, device) x category, `idle` among them; each row sums to the window."""
        wide = self.table.pivot_table(index=["pid", "device"], columns="category", values="busy_ns", aggfunc="sum",
                                      fill_value=0, observed=True)
        return wide.reindex(columns=[*CATEGORIES, "idle"], fill_value=0).astype("int64")

    def shares(self) -> pd.DataFrame:
        """Share of the window by (pid, device) x category."""
        totals = self.totals()
        return totals.div(totals.sum(axis=1), axis=0)

    def busy_ratio(self) -> float:
        """Share of the window in which a GPU runs anything, mean over GPUs."""
        return float(1.0 - self.shares()["idle"].mean())

    def to_dict(self) -> dict:
        """What `spoc nsight decompose --json` writes."""
        return {
            "trace": self.path, "simulated": self.simulated, "window_ns": list(self.window_ns),
            "devices": self.devices, "unknown_kernels": self.unknown_kernels, "notes": self.notes,
            "phases": self.phase_summary(), "steps": self.step_summary(),
            "kernels": self.kernels.head(50).to_dict("records"), "streams": self.streams.to_dict("records"),
            "gaps": self.gaps.to_dict("records"), "collectives": self.waiting.to_dict(), "metadata": self.metadata,
        }

    def phase_summary(self) -> list[dict]:
        """[{phase, window_s, busy_s: {category: s}, idle_s}], summed over GPUs."""
        result = []
        for phase in PHASES:
            rows = self.table[self.table.phase == phase]
            if rows.empty:
                continue
            by = rows.groupby("category", observed=True).busy_ns.sum()
            window = int(rows.groupby(["pid", "device"]).window_ns.first().sum())
            result.append({"phase": phase, "window_s": window / 1e9, "idle_s": int(by.get("idle", 0)) / 1e9,
                           "busy_s": {c: int(by[c]) / 1e9 for c in CATEGORIES if by.get(c, 0)}})
        return result

    def step_summary(self) -> list[dict]:
        """[{phase, steps, mean_s, p95_s, gap_share, launch_bound_share}] over all GPUs' steps."""
        from spoc_lib.core.stats import percentile

        result = []
        for phase, rows in self.steps.groupby("phase", sort=False):
            total = rows.duration_ns.sum()
            result.append({
                "phase": phase, "steps": int(rows.step.nunique()), "mean_s": float(rows.duration_ns.mean()) / 1e9,
                "p95_s": percentile(rows.duration_ns.to_numpy(), 95) / 1e9,
                "gap_share": float((rows.host_gap_ns.sum() + rows.launch_gap_ns.sum()) / total) if total else None,
                "launch_bound_share": float(rows.launch_gap_ns.sum() / total) if total else None,
            })
        return result


def decompose(path: str | Path, window: tuple[float, float] | None = None, *, rules: RuleBook | None = None,
              nvtx_range: str | None = None, expect_gpus: int | None = None,
              accept_graph_mode: bool = False) -> Decomposition:
    """Decompose a trace (`.sqlite`, parquetdir, `.nsys-rep`); the file is only read.

    window: (start, end) in seconds on the trace's clock; nvtx_range: the extent of the NVTX ranges with this text;
    default: from the first to the last GPU activity, the same for all GPUs. expect_gpus: TP x PP; fewer GPUs with
    kernels are refused. InputError with one sentence for whatever cannot be decomposed.
    """
    with open_source(path) as source:
        trace = load_trace(source, accept_graph_mode=accept_graph_mode)
        _check_ranks(trace, expect_gpus)
        span = trace.span_ns
        chosen = span
        if nvtx_range is not None:
            chosen = range_window(trace, nvtx_range)
        elif window is not None:
            chosen = (round(window[0] * 1e9), round(window[1] * 1e9))
        _check_window(trace, chosen, span)
        return decompose_trace(trace, chosen, rules or rule_book(), find_steps(trace, rules or rule_book()))


def _check_ranks(trace: Trace, expected: int | None) -> None:
    if expected is not None and len(trace.ranks) < expected:
        seen = ", ".join(f"GPU {r.device} of process {r.pid}" for r in trace.ranks)
        raise InputError("missing-rank", f"{trace.source.path} holds kernels of {len(trace.ranks)} of {expected} GPUs "
                         f"({seen}): a rank was not captured; start the workers with "
                         f"VLLM_WORKER_MULTIPROC_METHOD=spawn and nsys with --trace-fork-before-exec=true")


def _check_window(trace: Trace, window: tuple[int, int], span: tuple[int, int]) -> None:
    covered = f"the trace covers {span[0] / 1e9:.6f} s to {span[1] / 1e9:.6f} s"
    if window[1] <= window[0]:
        raise InputError("empty-window", f"the window {window[0] / 1e9:g} s to {window[1] / 1e9:g} s is empty: "
                         f"{covered}")
    if window[0] >= span[1] or window[1] <= span[0]:
        raise InputError("empty-window", f"the window {window[0] / 1e9:g} s to {window[1] / 1e9:g} s holds no GPU "
                         f"activity: {covered}")


def decompose_trace(trace: Trace, window: tuple[int, int], rules: RuleBook, steps: Steps) -> Decomposition:
    """The decomposition of a loaded trace."""
    matched = [rules.match(name) for name in trace.names]
    owner = np.array([CATEGORIES.index(category or "other") for category in matched], dtype=np.int8)

    def one(rank: Rank) -> tuple[Ownership, _Segments, tuple[np.ndarray, np.ndarray]]:
        activity = trace.activities[rank]
        segments = _Segments.cut(window, steps.of(rank))
        result = own(activity.start, activity.end, activity.name, owner, segments.boundaries, len(CATEGORIES), COMM)
        return result, segments, sums(activity.start, activity.end, activity.name, len(trace.names), window)

    with ThreadPoolExecutor(cpu_threads()) as pool:
        results = dict(zip(trace.ranks, pool.map(one, trace.ranks), strict=True))
    pids = _display_pids(trace)
    kernels = _kernel_table(trace, results, pids, matched)
    notes = [*trace.notes, *steps.notes]
    silent = [f"GPU {r.device} of process {pids[r]}" for r in trace.ranks if not results[r][0].count.sum()]
    if silent:
        notes.append(f"{', '.join(silent)} ran nothing in this window")
    unknown = kernels[~kernels.known].groupby("name", sort=False)[["kernels", "total_ns"]].sum()
    total = max(1, int(kernels.total_ns.sum()))
    unknown = unknown.sort_values("total_ns", ascending=False)
    return Decomposition(
        path=str(trace.source.path), window_ns=window, simulated=trace.metadata.simulated,
        table=_table(trace, results, pids), steps=_step_table(trace, results, pids),
        kernels=kernels.drop(columns="known"), streams=_streams(trace, window, pids),
        gaps=_gap_table(trace, results, pids), collectives=_collective_table(trace, results, pids),
        waiting=pair(trace, rules, window),
        unknown_kernels=[{"name": name, "kernels": int(row.kernels), "total_s": int(row.total_ns) / 1e9,
                          "share": int(row.total_ns) / total} for name, row in unknown.iterrows()],
        notes=notes, metadata={
            "product": trace.metadata.product, "schema": trace.metadata.schema,
            "graph_mode": trace.metadata.graph_mode, "simulated_by": trace.metadata.simulated_by,
            "utc_epoch_ns": trace.metadata.utc_epoch_ns, "gpus": len(trace.ranks), "rules": rules.file.name,
            "steps_from": steps.source,
        })


@dataclass(frozen=True)
class _Segments:
    """The window cut at step boundaries. index[i]: row of the rank's step table, -1 outside every step."""

    boundaries: np.ndarray
    index: np.ndarray
    table: pd.DataFrame

    @classmethod
    def cut(cls, window: tuple[int, int], steps: pd.DataFrame) -> _Segments:
        """steps: columns start_ns, end_ns, phase, …; disjoint, ascending."""
        start = np.clip(steps.start_ns.to_numpy(), *window)
        end = np.clip(steps.end_ns.to_numpy(), *window)
        inside = np.flatnonzero(end > start)
        bounds = np.unique(np.concatenate((start[inside], end[inside], window)).astype(np.int64))
        where = np.searchsorted(start[inside], bounds[:-1], side="right") - 1
        within = (where >= 0) & (bounds[:-1] < end[inside][np.maximum(where, 0)] if inside.size else False)
        index = np.where(within, inside[np.maximum(where, 0)] if inside.size else -1, -1)
        return cls(bounds, index, steps)

    def phases(self) -> np.ndarray:
        names = np.array([*self.table.phase.tolist(), "none"], dtype=object)
        return names[self.index]


def _display_pids(trace: Trace) -> dict[Rank, int]:
    """The operating system's pid of each rank; the whole globalPid where two machines share a pid."""
    by_pid: dict[int, set[int]] = {}
    for rank in trace.ranks:
        by_pid.setdefault(rank.pid, set()).add(rank.global_pid)
    return {r: r.pid if len(by_pid[r.pid]) == 1 and (r.pid or not r.global_pid) else r.global_pid
            for r in trace.ranks}


def _table(trace: Trace, results: dict, pids: dict[Rank, int]) -> pd.DataFrame:
    rows = []
    for rank in trace.ranks:
        ownership, segments, _ = results[rank]
        phases = segments.phases()
        lengths = np.diff(segments.boundaries)
        for phase in PHASES:
            where = phases == phase
            if not where.any():
                continue
            window = int(lengths[where].sum())
            busy, count = ownership.busy_ns[where].sum(axis=0), ownership.count[where].sum(axis=0)
            idle = int(ownership.gap_ns[where].sum() + ownership.tail_ns[where].sum())
            for index, category in enumerate(CATEGORIES):
                if busy[index] or count[index]:
                    rows.append((pids[rank], rank.device, phase, category, window, int(busy[index]),
                                 int(busy[index]), int(count[index])))
            rows.append((pids[rank], rank.device, phase, "idle", window, idle, idle, 0))
    return pd.DataFrame(rows, columns=schemas.DECOMPOSITION.names)


def _step_table(trace: Trace, results: dict, pids: dict[Rank, int]) -> pd.DataFrame:
    frames = []
    for rank in trace.ranks:
        ownership, segments, _ = results[rank]
        inside = np.flatnonzero(segments.index >= 0)
        if not inside.size:
            continue
        step = segments.table.iloc[segments.index[inside]].reset_index(drop=True)
        frame = pd.DataFrame({
            "pid": pids[rank], "device": rank.device, **{c: step[c] for c in step.columns if c not in ("end_ns",)},
            "duration_ns": np.diff(segments.boundaries)[inside],
            "busy_ns": ownership.busy_ns[inside].sum(axis=1), "launch_gap_ns": ownership.gap_ns[inside],
            "host_gap_ns": ownership.tail_ns[inside], "kernels": ownership.count[inside].sum(axis=1),
            "launch_bound_share": ownership.gap_ns[inside] / np.diff(segments.boundaries)[inside],
            **{f"{c}_ns": ownership.busy_ns[inside, i] for i, c in enumerate(CATEGORIES)},
        })
        frames.append(frame)
    if not frames:
        return pd.DataFrame(columns=["pid", "device", "step", "phase", "start_ns", "duration_ns", "busy_ns",
                                     "launch_gap_ns", "host_gap_ns", "kernels", "launch_bound_share"])
    return pd.concat(frames, ignore_index=True)


def _kernel_table(trace: Trace, results: dict, pids: dict[Rank, int], matched: Sequence[str | None]) -> pd.DataFrame:
    frames = []
    for rank in trace.ranks:
        count, total = results[rank][2]
        where = np.flatnonzero(count)
        frames.append(pd.DataFrame({
            "pid": pids[rank], "device": rank.device, "name": [trace.names[i] for i in where],
            "category": [matched[i] or "other" for i in where], "known": [matched[i] is not None for i in where],
            "kernels": count[where], "total_ns": total[where]}))
    table = pd.concat(frames, ignore_index=True)
    table["known"] = table.known.astype(bool)
    table["mean_ns"] = table.total_ns / table.kernels
    return table.sort_values("total_ns", ascending=False, ignore_index=True)


def _streams(trace: Trace, window: tuple[int, int], pids: dict[Rank, int]) -> pd.DataFrame:
    rows = []
    for rank in trace.ranks:
        activity = trace.activities[rank]
        streams, code = _codes(activity.stream)
        count, total = sums(activity.start, activity.end, code, streams.size, window)
        rows.extend((pids[rank], rank.device, int(s), int(c), int(t))
                    for s, c, t in zip(streams, count, total, strict=True) if c)
    return pd.DataFrame(rows, columns=["pid", "device", "stream", "kernels", "total_ns"])


def _codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what each code stands for, codes); without sorting where the values are small, as stream ids are."""
    if values.size and 0 <= values.min() and values.max() < 1 << 16:
        return np.arange(int(values.max()) + 1), values
    return np.unique(values, return_inverse=True)


def _gap_table(trace: Trace, results: dict, pids: dict[Rank, int]) -> pd.DataFrame:
    assert len(GAP_CLASSES) == GAP_LIMITS_NS.size + 1
    rows = [(pids[rank], rank.device, label, int(n), int(ns)) for rank in trace.ranks
            for label, n, ns in zip(GAP_CLASSES, results[rank][0].gaps, results[rank][0].gap_sum_ns, strict=True)]
    return pd.DataFrame(rows, columns=["pid", "device", "length", "gaps", "total_ns"])


def _collective_table(trace: Trace, results: dict, pids: dict[Rank, int]) -> pd.DataFrame:
    rows = []
    for rank in trace.ranks:
        ownership = results[rank][0]
        exposed, total = int(ownership.busy_ns[:, COMM].sum()), int(ownership.any_ns.sum())
        rows.append((pids[rank], rank.device, total, exposed, total - exposed))
    return pd.DataFrame(rows, columns=["pid", "device", "total_ns", "exposed_ns", "hidden_ns"])
