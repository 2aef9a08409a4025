"""Collectives across ranks: how long each rank waited for the last one, and how long the transfer itself took.

A collective's kernel spins until every rank of its group has arrived, so the rank that waits looks slow and the one
that is late looks fast. Pairing each collective across the ranks of its group tells them apart: until the last start it
is waiting, after it transfer. Which ranks form a group (tensor, data, expert parallelism have groups of their own) is
told by NCCL's communicator where the trace holds it, else by whose kernels of one name end together, time after time.
All GPUs of one report share a clock; those of several reports are set by the collectives' own ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import pandas as pd

from spoc_lib.nsight import nvtx
from spoc_lib.nsight.categories import RuleBook, rule_book
from spoc_lib.nsight.trace import Trace, open_trace

_LATE_SHARE = 0.05  # waiting below this share of the collectives' time is no finding
_SKEW = 0.35        # of the transfer, by which the ends of one collective lie apart at most
_REGULAR = 0.25     # a set of ranks that ends together this often, beside the most frequent one, is a group
_CLOCKS_APART_NS, _CLOCK_BIN_NS = 50_000_000, 20_000  # of machines that keep time by NTP; a bin of what is tried
_PAIR = "SendRecv"  # NCCL's kernel of send and receive, and of all-to-all, which is made of both


@dataclass(frozen=True)
class Collectives:
    """ranks: one row a (pid, device): collectives (paired), total_ns, wait_ns, transfer_ns (total = wait + transfer),
    last (how often it arrived last), caused_wait_ns (what the others waited for it). groups: the ranks (pid, device) of
    each process group that was found. Over all pairs: `wait_share`, `late` (pid, device) of the rank that causes most
    waiting, or None, `late_share` of its group's waiting that it causes.
    """

    ranks: pd.DataFrame
    paired: int
    unpaired: int
    groups: list[list[tuple[int, int]]]
    wait_share: float
    late: tuple[int, int] | None
    late_share: float
    sentence: str
    notes: list[str]

    def to_dict(self) -> dict:
        """For JSON."""
        return {"ranks": self.ranks.to_dict("records"), "paired": self.paired, "unpaired": self.unpaired,
                "groups": [[{"pid": pid, "device": device} for pid, device in group] for group in self.groups],
                "wait_share": self.wait_share, "late": self.late and {"pid": self.late[0], "device": self.late[1]},
                "late_share": self.late_share, "sentence": self.sentence, "notes": self.notes}


def collectives(path: str | Path | Sequence[str | Path], window_ns: tuple[int, int] | None = None, *,
                rules: RuleBook | None = None, accept_graph_mode: bool = False) -> Collectives:
    """Pair the collectives of a trace (in `window_ns`, on its clock; default: all)."""
    with open_trace(path, accept_graph_mode=accept_graph_mode) as trace:
        return pair(trace, rules or rule_book(), window_ns or trace.span_ns)


def pair(trace: Trace, rules: RuleBook, window: tuple[int, int]) -> Collectives:
    """The collectives of a loaded trace that start in the window."""
    is_comm = np.array([rules.match(name) == "comm" for name in trace.names], dtype=bool)
    calls = [nvtx.nccl_calls(report.source, report.shift_ns) for report in trace.reports]
    communicators: dict[str | None, int] = {None: 0}
    columns = [_of_rank(trace, index, is_comm, window, calls[rank.report], communicators)
               for index, rank in enumerate(trace.ranks)]
    events = _Events(*np.concatenate(columns, axis=1))
    if np.unique(events.rank).size < 2:
        return _none("fewer than two GPUs ran collectives in this window, so there is nothing to pair")
    events, notes = _on_one_clock(trace, events)
    found: list[_Paired] = []
    for key in np.unique(events.key).tolist():
        found += _pairs(events.only(events.key == key), _PAIR in trace.names[events.name[events.key == key][0]])
    return _judge(trace, found, events.start.size - sum(p.start.size for p in found), notes)


@dataclass(frozen=True)
class _Events:
    """Collectives of all ranks. rank: index into the trace's; key: name, communicator, and, where clocks do not
    compare, report; both: whether NCCL's calls show that a send-and-receive kernel does both at once."""

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    key: np.ndarray
    rank: np.ndarray
    both: np.ndarray

    def only(self, where: np.ndarray) -> _Events:
        return _Events(*(getattr(self, name)[where] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class _Paired:
    """Collectives of one group, arrays of shape (members, collectives). blames: whether who comes last holds the others
    up; between the stages of a pipeline that is only their order."""

    members: tuple[int, ...]
    start: np.ndarray
    end: np.ndarray
    blames: bool


def _of_rank(trace: Trace, index: int, is_comm: np.ndarray, window: tuple[int, int], calls: nvtx.NcclCalls,
             communicators: dict[str | None, int]) -> np.ndarray:
    rank = trace.ranks[index]
    activity = trace.activities[rank]
    where = np.flatnonzero(is_comm[activity.name] & (activity.start >= window[0]) & (activity.start < window[1])
                           & (activity.end > activity.start))
    comm, both = np.zeros(where.size, np.int64), np.zeros(where.size, np.int64)
    launched, thread = trace.launched(rank)
    if launched.size and calls:
        for n, (at, tid) in enumerate(zip(launched[where].tolist(), thread[where].tolist(), strict=True)):
            communicator, both[n] = calls.at(tid, at)
            comm[n] = communicators.setdefault(communicator, len(communicators))
    key = (activity.name[where].astype(np.int64) << 32) + (comm << 8) + (0 if trace.clock else rank.report)
    return np.stack([activity.start[where], activity.end[where], activity.name[where], key,
                     np.full(where.size, index), both])


def _on_one_clock(trace: Trace, events: _Events) -> tuple[_Events, list[str]]:
    """Events by end. Wall clocks of machines differ by more than a collective lasts, so the others' events are moved by
    what makes most of their collectives end with those of the first report."""
    report = np.array([rank.report for rank in trace.ranks])[events.rank]
    move, notes = np.zeros(events.start.size, np.int64), []
    for number in range(1, len(trace.reports) if trace.clock else 0):
        mine, first = np.flatnonzero(report == number), np.flatnonzero(report < number)
        apart: list[np.ndarray] = []
        for n in mine[:: max(1, mine.size // 200)]:
            others = first[events.key[first] == events.key[n]]
            off = events.end[others] + move[others] - events.end[n]
            apart.append(off[np.abs(off) < _CLOCKS_APART_NS])
        bins = Counter(b for off in apart for b in np.unique(off // _CLOCK_BIN_NS).tolist())
        best = max(bins, key=lambda b: (bins[b] + bins[b + 1], -abs(b)), default=None)
        if best is None or bins[best] + bins[best + 1] < 2 * _REGULAR * len(apart):
            notes.append(f"no collective of {trace.reports[number].source.path.name} ends with one of the reports "
                         f"before it: they share no process group")
            continue
        tried = np.concatenate(apart)
        move[mine] = int(np.median(tried[(tried // _CLOCK_BIN_NS == best) | (tried // _CLOCK_BIN_NS == best + 1)]))
        notes.append(f"by the ends of its collectives, the clock of {trace.reports[number].source.path.name} is "
                     f"{abs(int(move[mine][0])) / 1e6:.3f} ms off; waiting is told on the corrected clock")
    order = np.argsort(events.end + move, kind="stable")
    moved = _Events(events.start + move, events.end + move, events.name, events.key, events.rank, events.both)
    return moved.only(order), notes


@numba.njit(cache=True, nogil=True)
def _instances(end, length, rank, seen, skew, which):
    """which[i]: the collective that event i is part of; events in order of their ends. A collective has one event a
    rank at most, and its ends lie within `skew` of the shortest."""
    current, first, shortest = -1, 0, 0
    for i in range(end.size):
        shorter = min(shortest, length[i])
        if current < 0 or seen[rank[i]] == current or end[i] - first > skew * shorter:
            current, first, shortest = current + 1, end[i], length[i]
        else:
            shortest = shorter
        seen[rank[i]] = current
        which[i] = current
    return current + 1


def _pairs(events: _Events, pairwise: bool) -> list[_Paired]:
    """Collectives of one key, by group. Sets of ranks whose kernels end together now and then only are chance: they are
    divided into the groups that they hold."""
    which = np.empty(events.end.size, np.int64)
    ranks = int(events.rank.max()) + 1
    count = _instances(events.end, events.end - events.start, events.rank, np.full(ranks, -1, np.int64), _SKEW, which)
    order = np.lexsort((events.rank, which))
    edges = np.searchsorted(which[order], np.arange(count + 1))
    mark = np.random.default_rng(0).integers(0, 2**62, ranks)
    signature = np.zeros(count, np.int64)
    np.add.at(signature, which, mark[events.rank])
    _, first, inverse, times = np.unique(signature, return_index=True, return_inverse=True, return_counts=True)
    sets = [tuple(events.rank[order[edges[n]:edges[n + 1]]].tolist()) for n in first]
    groups = _groups({members: int(n) for members, n in zip(sets, times, strict=True) if len(members) > 1})
    found: dict[tuple[int, ...], list[np.ndarray]] = {}
    for number, members in enumerate(sets):
        instances = np.flatnonzero(inverse == number)
        rows = order[edges[instances][:, None] + np.arange(len(members))]
        for group in groups.get(members, []):
            found.setdefault(group, []).append(rows[:, [members.index(m) for m in group]].T)
    result = []
    for group, parts in found.items():
        at = np.concatenate(parts, axis=1)
        start, end = events.start[at], events.end[at]
        if not pairwise:  # what is always off at the end is a clock's error, or the chance of two groups in step
            start = start - np.round(np.median(end - end.mean(axis=0), axis=1)).astype(np.int64)[:, None]
        blames = not pairwise or bool(events.both[at].mean() > 0.5) or _one_is_late(start)
        result.append(_Paired(group, start, start + (end - events.start[at]), blames))
    return result


def _one_is_late(start: np.ndarray) -> bool:
    """Whether one of more than two ranks comes after all others, as in an all-to-all; where half of them do, they are a
    pipeline's senders, which end with their receivers."""
    if len(start) < 3:
        return False
    ordered = np.sort(start, axis=0)
    return bool(np.median(ordered[-1] - ordered[-2]) > np.median(ordered[-1] - ordered[0]) / 2)


def _groups(times: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
    """Into which groups each set of ranks is divided; times: how often each set ended together."""
    best: Counter = Counter()
    for members, n in times.items():
        for rank in members:
            best[rank] = max(best[rank], n)
    kept = [m for m, n in times.items() if n >= _REGULAR * max(best[rank] for rank in m)]

    def divided(members: tuple[int, ...]) -> list[tuple[int, ...]]:
        parts: list[tuple[int, ...]] = []
        for group in sorted(kept, key=lambda g: -times[g]):
            if set(group) < set(members) and not any(set(group) & set(part) for part in parts):
                parts.append(group)
        return parts

    whole = [m for m in kept if sum(map(len, divided(m))) < len(m)]
    return {m: [m] if m in whole else divided(m) for m in times}


def _judge(trace: Trace, found: list[_Paired], unpaired: int, notes: list[str]) -> Collectives:
    judged = [p for p in found if p.blames]
    notes = [*notes, *([f"{unpaired} collectives have no partner on another GPU and are left out"] if unpaired else [])]
    if ordered := sum(p.start.shape[1] for p in found if not p.blames):
        notes.append(f"{ordered} sends and receives are left out of the waiting: between the stages "
                     f"of a pipeline the receiver waits for work, not for a late GPU")
    groups = sorted({p.members for p in found})
    shown = [[(trace.pids[trace.ranks[m]], trace.ranks[m].device) for m in group] for group in groups]
    if not judged:
        why = ("only sends and receives between two GPUs ran, in which nobody is late" if found else
               "no collective ran on all GPUs of a group at the same time, so there is nothing to pair")
        return _none(why, unpaired, shown, notes)
    rows = {rank: np.zeros(5, np.int64) for rank in sorted({m for p in judged for m in p.members})}
    caused: dict[tuple[int, ...], np.ndarray] = {}
    for p in judged:
        total = p.end - p.start
        wait = np.clip(p.start.max(axis=0) - p.start, 0, total)
        last = p.start.argmax(axis=0)
        blame = np.bincount(last, weights=wait.sum(axis=0), minlength=len(p.members)).astype(np.int64)
        caused[p.members] = caused.get(p.members, 0) + np.stack([blame, wait.sum(axis=1), total.sum(axis=1)])
        for n, member in enumerate(p.members):
            rows[member] += [p.start.shape[1], total[n].sum(), wait[n].sum(), (last == n).sum(), blame[n]]
    table = pd.DataFrame({
        "pid": [trace.pids[trace.ranks[r]] for r in rows], "device": [trace.ranks[r].device for r in rows],
        **{name: [int(row[n]) for row in rows.values()] for n, name in
           enumerate(("collectives", "total_ns", "wait_ns", "last", "caused_wait_ns"))}})
    table.insert(5, "transfer_ns", table.total_ns - table.wait_ns)
    late, late_share = _late(trace, caused)
    paired = sum(p.start.shape[1] for p in judged)
    wait_share = float(table.wait_ns.sum() / table.total_ns.sum())
    return Collectives(table, paired, unpaired, shown, wait_share, late, late_share,
                       _sentence(table, wait_share, late, late_share, paired, len(groups)), notes)


def _late(trace: Trace, caused: dict[tuple[int, ...], np.ndarray]) -> tuple[tuple[int, int] | None, float]:
    """(the rank that its group waits for most, its share of that group's waiting); None where nobody stands out.
    caused: by group, rows of blame, waiting and time by member, ns."""
    members, (blame, wait, total) = max(caused.items(), key=lambda one: one[1][0].max())
    worst = int(blame.argmax())
    share = float(blame[worst] / max(1, wait.sum()))
    if wait.sum() < _LATE_SHARE * total.sum() or share <= 1 / len(members) + 0.2:
        return None, share
    rank = trace.ranks[members[worst]]
    return (trace.pids[rank], rank.device), share


def _sentence(table: pd.DataFrame, wait_share: float, late: tuple[int, int] | None, late_share: float, pairs: int,
              groups: int) -> str:
    of = f" of its group ({groups} groups)" if groups > 1 else ""
    waited = f"{wait_share:.0%} of the time in {pairs} collectives is waiting for the last GPU{of}"
    if late is None:
        return (f"The GPUs arrive together: {waited}." if wait_share < _LATE_SHARE else
                f"{waited[0].upper()}{waited[1:]}, and no single GPU is to blame.")
    row = table[(table.pid == late[0]) & (table.device == late[1])].iloc[0]
    return (f"{waited[0].upper()}{waited[1:]}; GPU {late[1]} of process {late[0]} arrives last in {int(row['last'])} "
            f"of {int(row['collectives'])} and causes {late_share:.0%} of the "
            f"waiting{' of its group' if groups > 1 else ''} ({row.caused_wait_ns / 1e6:.2f} ms): look at that GPU, "
            f"its clocks and its host process.")


def _none(reason: str, unpaired: int = 0, groups: Sequence[list[tuple[int, int]]] = (), notes: Sequence[str] = ()
          ) -> Collectives:
    columns = ["pid", "device", "collectives", "total_ns", "wait_ns", "transfer_ns", "last", "caused_wait_ns"]
    return Collectives(pd.DataFrame(columns=columns), 0, unpaired, list(groups), 0.0, None, 0.0,
                       f"{reason[0].upper()}{reason[1:]}.", list(notes))
