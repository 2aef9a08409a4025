"""Why a GPU is idle, or busy for nothing: late launches within and between steps, the GPU's own latency, copies from
and to the host, waiting for another GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from spoc_lib.nsight.decompose import Decomposition

_WORDS = {
    "launch": "gaps within a step whose next kernel was launched after the GPU had gone idle",
    "host": "the host between steps: the next kernel was launched after the GPU had gone idle",
    "device": "gaps before kernels that had been launched in time (graphs, streams, dependencies between kernels)",
    "outside": "time in which no step ran, neither here nor on the host (no request, or the scheduler between steps)",
    "unknown": "gaps whose launches the trace does not hold, so nobody can tell late launches from the GPU's latency",
    "copies": "copies between host and device that no kernel hides: busy, but not with computing",
    "waiting": "kernels of collectives that wait for another GPU: busy, but for nothing",
}
IDLE = ("launch", "host", "device", "outside", "unknown")


@dataclass(frozen=True)
class IdleReport:
    """table: one row a cause: seconds on one GPU, share of the window; those of `IDLE` sum to the idle time, `copies`
    and `waiting` are busy. Whether a launch came late is told by the launch itself, never by a gap's length."""

    table: pd.DataFrame
    sentence: str

    def to_dict(self) -> dict:
        """For JSON."""
        return {"causes": self.table.to_dict("records"), "sentence": self.sentence}


def explain_idle(decomposition: Decomposition) -> IdleReport:
    """Divide the time in which GPUs compute nothing among its causes, mean over GPUs."""
    gpus = len(decomposition.totals())
    by_place = decomposition.idle.groupby("place")[["idle_ns", "late_ns", "early_ns"]].sum()
    late, total = by_place.late_ns, by_place.sum()
    no_steps = decomposition.metadata["steps_from"] == "none"  # then a late launch is the host's, wherever it is
    seconds = {
        "launch": late["inside"],
        "host": late["between"] + (late["outside"] if no_steps else 0),
        "device": total.early_ns,
        "outside": 0 if no_steps else late["outside"],
        "unknown": total.idle_ns - total.late_ns - total.early_ns,
        "copies": decomposition.host_copies.exposed_ns.sum(),
        "waiting": decomposition.waiting.ranks.wait_ns.sum() if decomposition.waiting.paired else 0,
    }
    window = decomposition.window_s
    words = _WORDS | ({"host": "gaps whose next kernel was launched after the GPU had gone idle"} if no_steps else {})
    rows = [{"cause": cause, "seconds": float(ns) / gpus / 1e9, "share": float(ns) / gpus / 1e9 / window,
             "meaning": words[cause]} for cause, ns in seconds.items()]
    table = pd.DataFrame(rows)
    return IdleReport(table, _sentence(table))


def _sentence(table: pd.DataFrame) -> str:
    by = table.set_index("cause")
    idle, copies = float(by.share[list(IDLE)].sum()), float(by.share["copies"])
    busy = (f"for {copies:.0%} of the window a GPU only copies from or to the host, so the link to the host limits it, "
            f"not its computing" if copies > 0.05 else "")
    if idle < 0.01:
        return f"The GPUs are idle for {idle:.1%} of the window" + (
            f", but {busy}." if busy else ": they, not the host, are the limit.")
    top = by.loc[list(IDLE)].nlargest(2, "seconds")
    causes = "; then ".join(f"{row.meaning} ({row.share:.0%})" for n, row in enumerate(top.itertuples())
                            if n == 0 or row.share > 0.05)
    return f"The GPUs are idle for {idle:.0%} of the window, most of it {causes}." + (f" And {busy}." if busy else "")
