"""Collectives across ranks: how long each rank waited for the last one, and how long the transfer itself took.

A collective's kernel spins until every rank has arrived, so the rank that waits looks slow and the one that is late
looks fast. Pairing the k-th collective of each rank tells them apart: until the last start it is waiting, after it
transfer. All GPUs of one trace share a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib.nsight.categories import RuleBook, rule_book
from spoc_lib.nsight.trace import Rank, Trace, load_trace, open_source

_LATE_SHARE = 0.05  # waiting below this share of the collectives' time is no finding
_MOST_SHIFT = 8     # collectives that a window may have cut off at one end of a rank


@dataclass(frozen=True)
class Collectives:
    """ranks: one row a (pid, device): collectives (paired), total_ns, wait_ns, transfer_ns (total = wait + transfer),
    last (how often it arrived last), caused_wait_ns (what the others waited for it). Over all pairs: `wait_share`,
    `late` (pid, device) of the rank that causes most waiting, or None, `late_share` of all waiting that it causes.
    """

    ranks: pd.DataFrame
    paired: int
    unpaired: int
    wait_share: float
    late: tuple[int, int] | None
    late_share: float
    sentence: str
    notes: list[str]

    def to_dict(self) -> dict:
        """For JSON."""
        return {"ranks": self.ranks.to_dict("records"), "paired": self.paired, "unpaired": self.unpaired,
                "wait_share": self.wait_share, "late": self.late and {"pid": self.late[0], "device": self.late[1]},
                "late_share": self.late_share, "sentence": self.sentence, "notes": self.notes}


def collectives(path: str | Path, window_ns: tuple[int, int] | None = None, *, rules: RuleBook | None = None,
                accept_graph_mode: bool = False) -> Collectives:
    """Pair the collectives of a trace (in `window_ns`, on its clock; default: all)."""
    with open_source(path) as source:
        trace = load_trace(source, accept_graph_mode=accept_graph_mode)
    return pair(trace, rules or rule_book(), window_ns or trace.span_ns)


def pair(trace: Trace, rules: RuleBook, window: tuple[int, int]) -> Collectives:
    """The collectives of a loaded trace that start in the window."""
    is_comm = np.array([rules.match(name) == "comm" for name in trace.names], dtype=bool)
    per_rank = {rank: _of_rank(trace, rank, is_comm, window) for rank in trace.ranks}
    per_rank = {rank: events for rank, events in per_rank.items() if events[0].size}
    if len(per_rank) < 2:
        return _none("fewer than two GPUs ran collectives in this window, so there is nothing to pair")
    ranks = sorted(per_rank)
    starts, ends, unpaired = [], [], 0
    for name in sorted({int(n) for events in per_rank.values() for n in np.unique(events[2])}):
        columns = [(e[0][e[2] == name], e[1][e[2] == name]) for e in (per_rank[r] for r in ranks)]
        start, end = _align(columns)
        unpaired += sum(c[0].size for c in columns) - start.size
        starts.append(start)
        ends.append(end)
    start, end = np.concatenate(starts, axis=1), np.concatenate(ends, axis=1)
    together = start.max(axis=0) < end.min(axis=0)  # a collective that some ranks run apart is no pair
    unpaired += int((~together).sum()) * len(ranks)
    return _judge(ranks, start[:, together], end[:, together], unpaired)


def _of_rank(trace: Trace, rank: Rank, is_comm: np.ndarray, window: tuple[int, int]
             ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    activity = trace.activities[rank]
    where = np.flatnonzero(is_comm[activity.name] & (activity.start >= window[0]) & (activity.start < window[1])
                           & (activity.end > activity.start))
    return activity.start[where], activity.end[where], activity.name[where]


def _align(columns: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(starts, ends), each of shape (ranks, pairs). Where counts differ, the window has cut some off at an end: each
    rank is shifted so that its ends meet those of the rank with fewest."""
    fewest = min(range(len(columns)), key=lambda r: columns[r][0].size)
    count = columns[fewest][0].size
    if count == 0:
        return np.empty((len(columns), 0), np.int64), np.empty((len(columns), 0), np.int64)
    starts, ends = [], []
    for start, end in columns:
        spare = start.size - count
        shift = 0
        if spare:
            tried = range(min(spare, _MOST_SHIFT) + 1)
            shift = min(tried, key=lambda s: float(np.abs(end[s:s + count] - columns[fewest][1]).mean()))
        starts.append(start[shift:shift + count])
        ends.append(end[shift:shift + count])
    return np.stack(starts), np.stack(ends)


def _judge(ranks: list[Rank], start: np.ndarray, end: np.ndarray, unpaired: int) -> Collectives:
    pairs = start.shape[1]
    if not pairs:
        return _none("no collective ran on all GPUs at the same time, so there is nothing to pair", unpaired)
    last_start = start.max(axis=0)
    wait = np.clip(last_start - start, 0, end - start)
    total = end - start
    last = start.argmax(axis=0)
    caused = np.bincount(last, weights=wait.sum(axis=0), minlength=len(ranks)).astype(np.int64)
    times_last = np.bincount(last, minlength=len(ranks))
    table = pd.DataFrame({
        "pid": [r.pid for r in ranks], "device": [r.device for r in ranks], "collectives": pairs,
        "total_ns": total.sum(axis=1), "wait_ns": wait.sum(axis=1), "transfer_ns": (total - wait).sum(axis=1),
        "last": times_last, "caused_wait_ns": caused})
    wait_share = float(wait.sum() / total.sum())
    worst = int(caused.argmax())
    late_share = float(caused[worst] / max(1, wait.sum()))
    even = 1 / len(ranks)
    late = None
    if wait_share >= _LATE_SHARE and late_share > even + 0.2:
        late = (ranks[worst].pid, ranks[worst].device)
    notes = [f"{unpaired} collectives have no partner on every other GPU and are left out"] if unpaired else []
    return Collectives(table, pairs, unpaired, wait_share, late, late_share,
                       _sentence(table, wait_share, late, late_share, pairs, worst), notes)


def _sentence(table: pd.DataFrame, wait_share: float, late: tuple[int, int] | None, late_share: float, pairs: int,
              worst: int) -> str:
    waited = f"{wait_share:.0%} of the time in {pairs} collectives is waiting for the last GPU"
    if wait_share < _LATE_SHARE:
        return f"The GPUs arrive together: {waited}."
    if late is None:
        return f"{waited[0].upper()}{waited[1:]}, and no single GPU is to blame."
    row = table.iloc[worst]
    return (f"{waited[0].upper()}{waited[1:]}; GPU {late[1]} of process {late[0]} arrives last in "
            f"{int(row['last'])} of them and causes {late_share:.0%} of the waiting "
            f"({row.caused_wait_ns / 1e6:.2f} ms): look at that GPU, its clocks and its host process.")


def _none(reason: str, unpaired: int = 0) -> Collectives:
    columns = ["pid", "device", "collectives", "total_ns", "wait_ns", "transfer_ns", "last", "caused_wait_ns"]
    return Collectives(pd.DataFrame(columns=columns), 0, unpaired, 0.0, None, 0.0,
                       f"{reason[0].upper()}{reason[1:]}.", [])
