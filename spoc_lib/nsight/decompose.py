"""Where the time of each GPU went: exclusive categories plus idle, exact to the nanosecond.

For each (process, device): sum over categories of busy_ns + idle_ns = window_ns. An instant in which several kernels
run belongs to one category: compute before collectives before copies (`categories.CATEGORIES`), so that a
collective's busy time is its exposed time; what compute hides of it is reported beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pandas as pd

from spoc_lib.core.errors import InputError
from spoc_lib.core.stats import percentile
from spoc_lib.nsight.breakdown import PHASES, Breakdown
from spoc_lib.nsight.categories import CATEGORIES, RuleBook, rule_book
from spoc_lib.nsight.collectives import Collectives, pair
from spoc_lib.nsight.steps import Steps, find_steps, range_window
from spoc_lib.nsight.trace import Trace, open_trace

#: vLLM's own all-reduce carries the size of its group as a template argument.
_GROUP_SIZE = re.compile(r"cross_device_reduce_\dstage<[^<>]*,\s*(?:\(int\))?(\d+)>")


@dataclass(frozen=True)
class Decomposition:
    """A decomposed trace.

    table: DECOMPOSITION rows, by phase (`none`: outside every step), `idle` among the categories.
    steps: one row a (pid, device, step) that lies whole in the window: step, phase, start_ns, the batch's fields (null
        where the trace does not tell them), duration_ns (to the next step's start) = busy_ns + launch_gap_ns (between
        its kernels) + host_gap_ns (before the next step), kernels, launch_bound_share, and `<category>_ns`.
    kernels: one row a (pid, device, name): category, kernels, total_ns, mean_ns; in the window.
    streams: one row a (pid, device, stream): kernels, total_ns (a stream runs one at a time).
    gaps: one row a (pid, device, length class of idle intervals): count, total_ns.
    collectives: one row a (pid, device): total_ns of collectives, exposed_ns and hidden_ns.
    idle: one row a (pid, device, place): idle_ns, and of it late_ns and early_ns (`Breakdown.idle`).
    host_copies: one row a (pid, device): total_ns, exposed_ns and pageable_ns of copies between host and device.
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
    idle: pd.DataFrame
    host_copies: pd.DataFrame
    waiting: Collectives
    unknown_kernels: list[dict]
    notes: list[str] = field(default_factory=list)
    metadata: dict = field(default_factory=dict)

    @property
    def window_s(self) -> float:
        """Length of the window, s."""
        return (self.window_ns[1] - self.window_ns[0]) / 1e9

    @property
    def devices(self) -> list[dict]:
        """[{pid, device, window_s, busy_s: {category: s}, idle_s, …}]; the same in whole ns beside it, and how much
        of the collectives compute hides."""
        comm, copies = (frame.set_index(["pid", "device"]) for frame in (self.collectives, self.host_copies))
        result = []
        for key, row in self.totals().iterrows():
            busy = {c: int(row[c]) for c in CATEGORIES}
            result.append({
                "pid": int(key[0]), "device": int(key[1]), "window_s": self.window_s,
                "busy_s": {c: ns / 1e9 for c, ns in busy.items()}, "idle_s": int(row["idle"]) / 1e9,
                "host_copies_s": int(copies.exposed_ns[key]) / 1e9,
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


def decompose(path: str | Path | Sequence[str | Path], window: tuple[float, float] | None = None, *,
              rules: RuleBook | None = None, nvtx_range: str | None = None, expect_gpus: int | None = None,
              accept_graph_mode: bool = False) -> Decomposition:
    """Decompose a trace (`.sqlite`, parquetdir, `.nsys-rep`, or a folder or list of several that ran together); the
    files are only read.

    window: (start, end) in seconds on the trace's clock; nvtx_range: from the first to the last kernel that was
    launched in NVTX ranges with this text; default: from the first to the last GPU activity, the same for all GPUs.
    expect_gpus: TP x PP; another number of GPUs with kernels is refused. InputError with one sentence for whatever
    cannot be decomposed.
    """
    with open_trace(path, accept_graph_mode=accept_graph_mode) as trace:
        trace.require_gpus(expect_gpus)
        span = trace.span_ns
        chosen = span
        if nvtx_range is not None:
            chosen, notes = range_window(trace, nvtx_range)
            trace.notes.extend(notes)
        elif window is not None:
            if not all(map(math.isfinite, window)):
                raise InputError("bad-window", f"the window {window[0]:g} s to {window[1]:g} s is not finite: give "
                                 f"seconds on the trace's clock")
            chosen = (round(window[0] * 1e9), round(window[1] * 1e9))
        _check_window(trace, chosen, span)
        return decompose_trace(trace, chosen, rules or rule_book(), find_steps(trace, rules or rule_book()))


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
    parts = Breakdown.measure(trace, window, rules, steps)
    kernels = parts.kernels()
    notes = [*trace.notes, *steps.notes, *_missing_ranks(trace, kernels)]
    if trace.metadata.simulated:
        notes.append("simulated: times come from the step-time model, and all GPUs do the same, so that none waits for "
                     "another")
    if silent := parts.silent():
        notes.append(f"{', '.join(silent)} ran nothing in this window")
    return Decomposition(
        path=trace.path, window_ns=window, simulated=trace.metadata.simulated, table=parts.table(),
        steps=parts.steps(), kernels=kernels.drop(columns="known"), streams=parts.streams(), gaps=parts.gaps(),
        collectives=parts.collectives(), idle=parts.idle(), host_copies=parts.host_copies(),
        waiting=pair(trace, rules, window), unknown_kernels=_unknown(kernels),
        notes=notes, metadata={
            "product": trace.metadata.product, "schema": trace.metadata.schema,
            "graph_mode": trace.metadata.graph_mode, "simulated_by": trace.metadata.simulated_by,
            "utc_epoch_ns": trace.metadata.utc_epoch_ns,
            "boards": _boards(trace), "gpus": len(trace.ranks), "rules": rules.file.name,
            "steps_from": steps.source, "uuids": {f"{parts.pids[r]}:{r.device}": u for r, u in trace.uuids.items()},
        } | ({"reports": [{"file": r.source.path.name, "host": r.metadata.host, "shift_ns": r.shift_ns}
                          for r in trace.reports]} if len(trace.reports) > 1 else {}))


def _boards(trace: Trace) -> list[dict]:
    """The GPUs that the trace says its ranks ran on, alike ones once; empty where it does not say."""
    alike = dict.fromkeys(replace(board, uuid=None, mapped=True) for board in trace.boards.values())
    return [{k: v for k, v in asdict(board).items() if k not in ("uuid", "mapped")} for board in alike]


def _missing_ranks(trace: Trace, kernels: pd.DataFrame) -> list[str]:
    """What the collectives tell of GPUs that are not in the trace: a GPU does not reduce alone."""
    names = kernels.name[(kernels.category == "comm") & (kernels.total_ns > 0)].unique()
    told = max((int(found.group(1)) for name in names if (found := _GROUP_SIZE.search(name))), default=0)
    if told > len(trace.ranks):
        return [f"a collective over {told} GPUs runs here, but the trace holds {len(trace.ranks)}: ranks were not "
                f"captured"]
    if len(names) and len(trace.ranks) == 1:
        return ["one GPU runs collectives here, so others exist that were not captured"]
    return []


def _unknown(kernels: pd.DataFrame) -> list[dict]:
    """Kernels that no rule knows, by their share of all kernel time, over all GPUs."""
    total = max(1, int(kernels.total_ns.sum()))
    unknown = kernels[~kernels.known].groupby("name", sort=False)[["kernels", "total_ns"]].sum()
    return [{"name": name, "kernels": int(row.kernels), "total_s": int(row.total_ns) / 1e9,
             "share": int(row.total_ns) / total}
            for name, row in unknown.sort_values("total_ns", ascending=False).iterrows()]
