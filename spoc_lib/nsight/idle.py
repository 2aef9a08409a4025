"""Why a GPU is idle, or busy for nothing: launches, the host between steps, nothing to do, waiting for another GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from spoc_lib.nsight.decompose import Decomposition

_WORDS = {
    "launch": "gaps between the kernels of a step (launches)",
    "host": "the host between steps (scheduling, sampling's results, detokenising)",
    "outside": "time outside every step (nothing to do, or work that no step range covers)",
    "waiting": "kernels of collectives that wait for another GPU: busy, but for nothing",
}
#: An idle stretch longer than this is no scheduling: the engine had no request to run.
_NOTHING_TO_DO_NS = 10_000_000


@dataclass(frozen=True)
class IdleReport:
    """table: one row a cause (launch, host, outside, waiting): seconds on one GPU, share of the window.

    Without steps, all idle time is `outside`, and the lengths of the gaps (`Decomposition.gaps`) tell most.
    """

    table: pd.DataFrame
    sentence: str

    def to_dict(self) -> dict:
        """For JSON."""
        return {"causes": self.table.to_dict("records"), "sentence": self.sentence}


def explain_idle(decomposition: Decomposition) -> IdleReport:
    """Divide the time in which GPUs compute nothing among its causes, mean over GPUs."""
    gpus = len(decomposition.totals())
    idle = decomposition.table[decomposition.table.category == "idle"]
    outside = idle[idle.phase == "none"].busy_ns.sum()
    steps = decomposition.steps
    seconds = {
        "launch": steps.launch_gap_ns.sum() if len(steps) else 0,
        "host": steps.host_gap_ns.sum() if len(steps) else 0,
        "outside": outside,
        "waiting": decomposition.waiting.ranks.wait_ns.sum() if decomposition.waiting.paired else 0,
    }
    window = decomposition.window_s
    rows = [{"cause": cause, "seconds": float(ns) / gpus / 1e9, "share": float(ns) / gpus / 1e9 / window,
             "meaning": _WORDS[cause]} for cause, ns in seconds.items()]
    table = pd.DataFrame(rows)
    return IdleReport(table, _sentence(decomposition, table, idle.busy_ns.sum() / gpus / 1e9))


def _sentence(decomposition: Decomposition, table: pd.DataFrame, idle_s: float) -> str:
    share = idle_s / decomposition.window_s
    if share < 0.01:
        return f"The GPUs are idle for {share:.1%} of the window: they, not the host, are the limit."
    top = table[table.cause != "waiting"].nlargest(1, "seconds").iloc[0]
    longest = decomposition.gaps.groupby("length", sort=False).total_ns.sum()
    quiet = longest.get("above 10 ms", 0) / max(1, longest.sum())
    tail = (f"; {quiet:.0%} of it are stretches above {_NOTHING_TO_DO_NS / 1e6:g} ms, in which there was nothing to do"
            if quiet > 0.2 else "")
    if decomposition.steps.empty:
        by = longest.idxmax()
        return (f"The GPUs are idle for {share:.0%} of the window, most of it in gaps of {by}{tail}; without steps the "
                f"trace does not tell launches from the host.")
    return f"The GPUs are idle for {share:.0%} of the window, most of it {top.meaning} ({top.share:.0%}){tail}."
