"""Whether a trace may be concluded from: the gates before the verdict."""

from __future__ import annotations

import pandas as pd

from spoc_lib.nsight.decompose import Decomposition

#: Kernels without a category may take this share of kernel time, and steps must cover this share of the window.
MOST_UNKNOWN, LEAST_IN_STEPS, LEAST_STEPS = 0.05, 0.9, 20


def gates(found: Decomposition, expect_gpus: int | None = None) -> pd.DataFrame:
    """One row a gate: gate, found, wanted (text), passed. expect_gpus: TP x PP, where known."""
    totals = found.totals()
    window_ns = found.window_ns[1] - found.window_ns[0]
    off_ns = int((totals.sum(axis=1) - window_ns).abs().max())
    missing = [note for note in found.notes if "not captured" in note]
    unknown = sum(one["share"] for one in found.unknown_kernels)
    mode = found.metadata["graph_mode"]
    rows = [
        ("GPUs with kernels", str(len(totals)), str(expect_gpus) if expect_gpus else "all ranks of the collectives",
         not missing and (expect_gpus is None or len(totals) == expect_gpus)),
        ("CUDA graphs", f"traced by {mode.lower()}" if mode else "the trace does not tell", "node by node",
         (mode or "").lower() != "graph"),
        ("categories + idle - window", f"{off_ns} ns", "0 ns", off_ns == 0),
        ("kernel time without a category", f"{unknown:.1%}", f"at most {MOST_UNKNOWN:.0%}", unknown <= MOST_UNKNOWN),
        _steps(found),
        _coverage(found),
    ]
    return pd.DataFrame(rows, columns=["gate", "found", "wanted", "passed"])


def _steps(found: Decomposition) -> tuple[str, str, str, bool]:
    count = int(found.steps.step.nunique()) if len(found.steps) else 0
    source = found.metadata["steps_from"]
    return "engine steps", f"{count} (from {source})" if count else "none", f"at least {LEAST_STEPS}", \
        count >= LEAST_STEPS


def _coverage(found: Decomposition) -> tuple[str, str, str, bool]:
    outside = found.table[found.table.phase == "none"].busy_ns.sum()
    share = 1 - float(outside / max(1, found.table.busy_ns.sum()))
    return "window inside steps", f"{share:.1%}", f"at least {LEAST_IN_STEPS:.0%}", share >= LEAST_IN_STEPS


def gate_sentence(table: pd.DataFrame) -> str:
    """Whether the verdict below may be trusted."""
    failed = table[~table.passed]
    if failed.empty:
        return f"All {len(table)} gates passed: the verdict below stands on a whole trace."
    told = "; ".join(f"{row.gate}: {row.found}, wanted {row.wanted}" for row in failed.itertuples())
    return f"{len(failed)} of {len(table)} gates failed ({told}): read the verdict below with that in mind."
