"""Steps as measured: input of the step-time model's calibration, and what the capture itself cost."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from spoc_lib.config import ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.core.stats import percentile
from spoc_lib.engine.batch import Batch
from spoc_lib.nsight.categories import CATEGORIES
from spoc_lib.nsight.decompose import Decomposition
from spoc_lib.nsight.roofline import with_windows


def measured_steps(decomposition: Decomposition, model: ModelSpec | None = None) -> pd.DataFrame:
    """One row an engine step whose batch the trace tells: the fields of `Batch`, `seconds` from its start to the next
    step's, and seconds by category and idle as `StepTime.components` names them; means over GPUs. What a sliding window
    leaves is reckoned from the model where the trace does not tell it (`with_windows`).

    The last step is left out: nothing follows that would end it. InputError where no batch is told.
    """
    steps = with_windows(decomposition.steps, model) if model else decomposition.steps
    if steps.empty or steps[list(Batch._fields)].isna().any(axis=None):
        raise InputError("no-batch", f"{decomposition.path} does not tell what its steps computed, so it calibrates "
                         f"nothing: NVTX ranges with the batch are needed, which vLLM writes with "
                         f"detailed_trace_annotation in its profiler's config ('spoc nsight plan' tells how)")
    steps = steps[steps.step != steps.step[steps.start_ns.idxmax()]]
    times = {"seconds": "duration_ns", **{c: f"{c}_ns" for c in CATEGORIES}}
    grouped = steps.assign(idle_ns=steps.launch_gap_ns + steps.host_gap_ns).groupby("step")
    result = grouped[list(Batch._fields)].first()
    for name, column in {**times, "idle": "idle_ns"}.items():
        result[name] = grouped[column].mean() / 1e9
    return result.reset_index()


@dataclass(frozen=True)
class Overhead:
    """Median step with and without the capture, seconds; ratio - 1 is what tracing costs."""

    traced_s: float
    untraced_s: float
    ratio: float
    sentence: str


def capture_overhead(decomposition: Decomposition, untraced_step_s: float, phase: str = "decode") -> Overhead:
    """Hold the median traced step of `phase` beside the same engine's step without the profiler (its median
    inter-token latency at the same load). InputError where the trace shows no such step."""
    steps = decomposition.steps[decomposition.steps.phase == phase]
    if steps.empty:
        raise InputError("no-steps", f"{decomposition.path} shows no {phase} step, so the capture's cost is unknown")
    traced = percentile(steps.duration_ns.to_numpy(), 50) / 1e9
    ratio = traced / untraced_step_s
    judged = ("the capture does not disturb what it shows" if ratio < 1.05 else
              "times between kernels are inflated, shares of busy time hold" if ratio < 1.25 else
              "the trace shows the profiler as much as the engine: capture fewer steps, and nothing but cuda and nvtx")
    return Overhead(traced, untraced_step_s, ratio,
                    f"A {phase} step takes {traced * 1e3:.2f} ms under the profiler and {untraced_step_s * 1e3:.2f} ms "
                    f"without it ({ratio - 1:+.0%}): {judged}.")
