"""One pass over each GPU's activities, and the tables that follow from it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.core import schemas
from spoc_lib.nsight.categories import CATEGORIES, COMM, INDEX, RuleBook
from spoc_lib.nsight.intervals import GAP_CLASSES, Ownership, own, sums
from spoc_lib.nsight.sources import cpu_threads
from spoc_lib.nsight.steps import HOST_COLUMNS, Steps
from spoc_lib.nsight.trace import HOST_COPIES, Rank, Trace

#: `unknown`: a step whose kernels do not show what it did; `none`: outside every step.
PHASES = ("prefill", "decode", "mixed", "unknown", "none")
#: Categories whose kernels a step are counted, for they tell the model's layers.
COUNTED = ("attn", "kv")
_NEXT_RANGE_NS = 1000  # between ranges that follow each other at once


@dataclass(frozen=True)
class Segments:
    """The window cut at step boundaries. index[i]: row of the rank's step table, -1 outside every step."""

    boundaries: np.ndarray
    index: np.ndarray
    table: pd.DataFrame

    @classmethod
    def cut(cls, window: tuple[int, int], steps: pd.DataFrame) -> Segments:
        """steps: columns start_ns, end_ns, phase, …; disjoint, ascending."""
        start = np.clip(steps.start_ns.to_numpy(), *window)
        end = np.clip(steps.end_ns.to_numpy(), *window)
        inside = np.flatnonzero(end > start)
        bounds = np.unique(np.concatenate((start[inside], end[inside], window)).astype(np.int64))
        where = np.searchsorted(start[inside], bounds[:-1], side="right") - 1
        within = (where >= 0) & (bounds[:-1] < end[inside][np.maximum(where, 0)] if inside.size else False)
        index = np.where(within, inside[np.maximum(where, 0)] if inside.size else -1, -1)
        return cls(bounds, index, steps)

    def whole_steps(self, window: tuple[int, int]) -> np.ndarray:
        """Segments that are a step which the window does not cut."""
        steps = np.flatnonzero(self.index >= 0)
        rows = self.table.iloc[self.index[steps]]
        return steps[((rows.start_ns >= window[0]) & (rows.end_ns <= window[1])).to_numpy(dtype=bool)]

    def off_host(self, tail_ns: np.ndarray) -> np.ndarray:
        """Of each segment's idle tail, ns in which no step ran on the host: between the end of its step's range and the
        begin of the next step's; 0 where the steps have no ranges, and outside steps."""
        off = np.zeros(self.index.size, dtype=np.int64)
        if self.table.empty or self.table[list(HOST_COLUMNS)].isna().any(axis=None):
            return off
        begin, end = (self.table[column].to_numpy(np.int64) for column in HOST_COLUMNS)
        inside = np.flatnonzero((self.index >= 0) & (self.index < len(begin) - 1))
        step, until = self.index[inside], self.boundaries[inside + 1]
        off[inside] = np.minimum(until, begin[step + 1]) - np.maximum(until - tail_ns[inside], end[step])
        off[off < _NEXT_RANGE_NS] = 0
        return off

    def phases(self) -> np.ndarray:
        """The phase of each segment."""
        names = np.array([*self.table.phase.tolist(), "none"], dtype=object)
        return names[self.index]


@dataclass(frozen=True)
class Breakdown:
    """What each rank's GPU did in the window. owners: every nanosecond's owner, by segment; sums: (count, ns) by
    name code; matched: the category of each name code, None where no rule knows it; copies: what of the `mem` that a
    rank owns are copies between host and device, ns by segment."""

    trace: Trace
    window: tuple[int, int]
    matched: list[str | None]
    owners: dict[Rank, Ownership]
    segments: dict[Rank, Segments]
    sums: dict[Rank, tuple[np.ndarray, np.ndarray]]
    copies: dict[Rank, np.ndarray]

    @property
    def pids(self) -> dict[Rank, int]:
        """The process of each rank as it is shown."""
        return self.trace.pids

    @classmethod
    def measure(cls, trace: Trace, window: tuple[int, int], rules: RuleBook, steps: Steps) -> Breakdown:
        """Sweep all ranks, as many at a time as there are cores."""
        matched = [rules.match(name) for name in trace.names]
        # copies between host and device claim an instant last of all, behind copies within the GPU
        owner = np.array([len(CATEGORIES) if category == "mem" and name.startswith(HOST_COPIES) else
                          INDEX[category or "other"] for name, category in zip(trace.names, matched, strict=True)],
                         dtype=np.int64)

        def one(rank: Rank) -> tuple[Ownership, np.ndarray, Segments, tuple[np.ndarray, np.ndarray]]:
            activity = trace.activities[rank]
            segments = Segments.cut(window, steps.of(rank))
            launched, _ = trace.launched(rank)
            owned = own(activity.start, activity.end, activity.name, owner, segments.boundaries, len(CATEGORIES) + 1,
                        COMM, launched if launched.size else None)
            copies = owned.busy_ns[:, -1].copy()
            for values in (owned.busy_ns, owned.counts):
                values[:, INDEX["mem"]] += values[:, -1]
            owned = owned._replace(busy_ns=owned.busy_ns[:, :-1], counts=owned.counts[:, :-1])
            return owned, copies, segments, sums(activity.start, activity.end, activity.name, len(trace.names), window)

        with ThreadPoolExecutor(cpu_threads()) as pool:
            parts = list(pool.map(one, trace.ranks))
        owners, copies, segments, totals = (dict(zip(trace.ranks, part, strict=True)) for part in
                                            zip(*parts, strict=True))
        return cls(trace, window, matched, owners, segments, totals, copies)

    def silent(self) -> list[str]:
        """GPUs that ran nothing in the window."""
        return [f"GPU {r.device} of process {self.pids[r]}" for r in self.trace.ranks
                if not self.owners[r].counts.sum()]

    def table(self) -> pd.DataFrame:
        """DECOMPOSITION rows: by phase and category, `idle` among them."""
        rows = []
        for rank in self.trace.ranks:
            ownership, segments = self.owners[rank], self.segments[rank]
            phases = segments.phases()
            lengths = np.diff(segments.boundaries)
            for phase in PHASES:
                where = phases == phase
                if not where.any():
                    continue
                window = int(lengths[where].sum())
                busy, count = ownership.busy_ns[where].sum(axis=0), ownership.counts[where].sum(axis=0)
                idle = int(ownership.gap_ns[where].sum() + ownership.tail_ns[where].sum())
                for index, category in enumerate(CATEGORIES):
                    if busy[index] or count[index]:
                        rows.append((self.pids[rank], rank.device, phase, category, window, int(busy[index]),
                                     int(busy[index]), int(count[index])))
                rows.append((self.pids[rank], rank.device, phase, "idle", window, idle, idle, 0))
        return pd.DataFrame(rows, columns=schemas.DECOMPOSITION.names)

    def steps(self) -> pd.DataFrame:
        """One row a (pid, device, step) that lies whole in the window: times in ns, busy time by category."""
        frames = []
        for rank in self.trace.ranks:
            ownership, segments = self.owners[rank], self.segments[rank]
            inside = segments.whole_steps(self.window)
            if not inside.size:
                continue
            step = segments.table.iloc[segments.index[inside]].reset_index(drop=True)
            frame = pd.DataFrame({
                "pid": self.pids[rank], "device": rank.device,
                **step.drop(columns=["end_ns", *HOST_COLUMNS]).to_dict("series"),
                "duration_ns": np.diff(segments.boundaries)[inside],
                "busy_ns": ownership.busy_ns[inside].sum(axis=1), "launch_gap_ns": ownership.gap_ns[inside],
                "host_gap_ns": ownership.tail_ns[inside], "kernels": ownership.counts[inside].sum(axis=1),
                "launch_bound_share": ownership.gap_ns[inside] / np.diff(segments.boundaries)[inside],
                **{f"{c}_ns": ownership.busy_ns[inside, i] for i, c in enumerate(CATEGORIES)},
                "copy_ns": self.copies[rank][inside],
                **{f"{c}_kernels": ownership.counts[inside, INDEX[c]] for c in COUNTED},
            })
            frames.append(frame)
        if not frames:
            return pd.DataFrame(columns=["pid", "device", "step", "phase", "start_ns", "duration_ns", "busy_ns",
                                         "launch_gap_ns", "host_gap_ns", "kernels", "launch_bound_share", "copy_ns",
                                         *(f"{c}_kernels" for c in COUNTED)])
        return pd.concat(frames, ignore_index=True)

    def kernels(self) -> pd.DataFrame:
        """One row a (pid, device, name), longest first; `known`: whether a rule knows the name."""
        frames = []
        for rank in self.trace.ranks:
            count, total = self.sums[rank]
            where = np.flatnonzero(count)
            frames.append(pd.DataFrame({
                "pid": self.pids[rank], "device": rank.device, "name": [self.trace.names[i] for i in where],
                "category": [self.matched[i] or "other" for i in where],
                "known": [self.matched[i] is not None for i in where],
                "kernels": count[where], "total_ns": total[where]}))
        table = pd.concat(frames, ignore_index=True)
        table["known"] = table.known.astype(bool)
        table["mean_ns"] = table.total_ns / table.kernels
        return table.sort_values("total_ns", ascending=False, ignore_index=True)

    def streams(self) -> pd.DataFrame:
        """One row a (pid, device, stream)."""
        rows: list[tuple] = []
        for rank in self.trace.ranks:
            activity = self.trace.activities[rank]
            streams, code = _codes(activity.stream)
            count, total = sums(activity.start, activity.end, code, streams.size, self.window)
            rows.extend((self.pids[rank], rank.device, int(s), int(c), int(t))
                        for s, c, t in zip(streams, count, total, strict=True) if c)
        return pd.DataFrame(rows, columns=["pid", "device", "stream", "kernels", "total_ns"])

    def gaps(self) -> pd.DataFrame:
        """One row a (pid, device, length class of idle intervals)."""
        rows = [(self.pids[rank], rank.device, label, int(n), int(ns)) for rank in self.trace.ranks
                for label, n, ns in zip(GAP_CLASSES, self.owners[rank].gaps, self.owners[rank].gap_sum_ns, strict=True)]
        return pd.DataFrame(rows, columns=["pid", "device", "length", "gaps", "total_ns"])

    def idle(self) -> pd.DataFrame:
        """One row a (pid, device, place): idle_ns, and of it late_ns (the launch that ended it came after the GPU had
        gone idle) and early_ns (it had been launched before). place: `inside` a step, between its kernels; `between`,
        before the next step; `outside` of steps, also where between two steps none ran on the host."""
        rows = []
        for rank in self.trace.ranks:
            owned, segments = self.owners[rank], self.segments[rank]
            within = segments.index >= 0
            late, early = owned.late_ns, owned.early_ns
            off = np.where(late[:, 1] > 0, segments.off_host(owned.tail_ns), 0)  # late: one interval, one launch
            for place, idle, of_late, of_early in (
                    ("inside", owned.gap_ns[within], late[within, 0], early[within, 0]),
                    ("between", (owned.tail_ns - off)[within], (late[:, 1] - off)[within], early[within, 1]),
                    ("outside", np.concatenate(((owned.gap_ns + owned.tail_ns)[~within], off[within])),
                     np.concatenate((late[~within].sum(axis=1), off[within])), early[~within])):
                rows.append((self.pids[rank], rank.device, place, int(idle.sum()), int(of_late.sum()),
                             int(of_early.sum())))
        return pd.DataFrame(rows, columns=["pid", "device", "place", "idle_ns", "late_ns", "early_ns"])

    def host_copies(self) -> pd.DataFrame:
        """One row a (pid, device): time of copies between host and device, and what of it no kernel hides; `pageable`:
        the part of all their time that is from or to memory that is not pinned."""
        rows = []
        is_copy = np.array([name.startswith(HOST_COPIES) for name in self.trace.names], dtype=bool)
        slow = np.array(["pageable" in name for name in self.trace.names], dtype=bool) & is_copy
        for rank in self.trace.ranks:
            total = self.sums[rank][1]
            rows.append((self.pids[rank], rank.device, int(total[is_copy].sum()), int(self.copies[rank].sum()),
                         int(total[slow].sum())))
        return pd.DataFrame(rows, columns=["pid", "device", "total_ns", "exposed_ns", "pageable_ns"])

    def collectives(self) -> pd.DataFrame:
        """One row a (pid, device): all time of collectives, what is exposed, and what compute hides."""
        rows = []
        for rank in self.trace.ranks:
            ownership = self.owners[rank]
            exposed, total = int(ownership.busy_ns[:, COMM].sum()), int(ownership.any_ns.sum())
            rows.append((self.pids[rank], rank.device, total, exposed, total - exposed))
        return pd.DataFrame(rows, columns=["pid", "device", "total_ns", "exposed_ns", "hidden_ns"])


def _codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(what each code stands for, codes); without sorting where the values are small, as stream ids are."""
    if values.size and values.min() >= 0 and values.max() < 1 << 16:
        return np.arange(int(values.max()) + 1), values
    return np.unique(values, return_inverse=True)
