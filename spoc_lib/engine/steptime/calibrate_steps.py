"""Step-time parameters from a kernel trace: engine steps with their batch, and seconds by kernel category.

A trace tells each category apart, which serving points cannot, so every parameter meets its own measurement: log
errors by step and category over their noise, plus log distances of the parameters over their tolerance (maximum a
posteriori). What a trace does not show (front end, client) keeps its starting value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib.config import GpuSpec, ModelSpec, load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.steptime import calibration_file
from spoc_lib.engine.steptime.calibration_file import Calibration, ErrorPair, Errors, Range
from spoc_lib.engine.steptime.fit import TOLERANCE, secant_least_squares
from spoc_lib.engine.steptime.model import StepTimeModel, step_time_model
from spoc_lib.engine.steptime.parameters import ROOFLINE, Parameters, scaled

#: What is compared: small kernels differ by less than the names that they are sorted by.
GROUPS = {"attn": ("attn",), "moe_gemm": ("moe_gemm",), "moe_route": ("moe_route",), "gemm": ("gemm",),
          "comm": ("comm",), "small": ("norm", "rope", "kv", "act"), "sample": ("sample",), "idle": ("idle",)}
#: Relative error expected of one category in one step.
NOISE = 0.05
#: A category below this share of a step tells nothing reliable.
LEAST_SHARE = 0.005
MOST_STEPS, LEAST_STEPS = 400, 8
_UNSEEN = ("frontend_us", "frontend_token_us", "client_turnaround_us", "earlier_release_gap_us")
#: Looser than for serving points, for a trace measures each kernel itself.
_TOLERANCE = {name: max(value, 0.3) for name, value in TOLERANCE.items() if name not in _UNSEEN} | {
    "attention_launch_us": 0.5, "attention_prefill_launch_us": 0.5, "decode_request_fixed_ns": 0.5,
    "route_launch_us": 0.5, "sample_launch_us": 1.0, "sample_request_us": 1.0}


def calibrate_steps(model_name: str, steps: pd.DataFrame, *, gpu_name: str, gpu_count: int,
                    start_path: str | Path | None = None, command: str = "", title: str = "",
                    sources: Sequence[str] = (), progress: Callable[[str], None] = lambda line: None) -> Calibration:
    """Fit the step time to `steps`, from the calibration at `start_path` or the shipped one.

    steps: one row an engine step: the fields of `Batch`, `seconds`, and seconds by category and `idle`, a mean over
    the GPUs. The held-out error is that of each half of the steps under the fit to the other half; a point is a step,
    TPOT that of steps that only decode, TTFT that of steps with a prompt chunk. InputError for too few steps.
    """
    model, gpu = load_model(model_name), load_gpu(gpu_name)
    step_time_model(model, gpu, gpu_count)  # refuses a GPU count that does not divide the heads
    steps = steps[(steps.tokens > 0) & (steps.seconds > 0)]
    if len(steps) < LEAST_STEPS:
        raise InputError("too-few-steps", f"the trace tells of {len(steps)} whole steps: at least {LEAST_STEPS} are "
                         f"needed, and steps of many sizes tell most")
    steps = steps.iloc[np.unique(np.linspace(0, len(steps) - 1, MOST_STEPS).astype(int))].reset_index(drop=True)
    start = calibration_file.load(start_path) if start_path else step_time_model(model, gpu, gpu_count).calibration
    parameters = start.parameters if start else ROOFLINE
    progress(f"fitting {len(steps)} steps")
    fitted = fit_steps(steps, model, gpu, gpu_count, parameters)
    errors = step_errors(steps, model, gpu, gpu_count, fitted)
    unseen = np.empty_like(errors)
    for half in (np.arange(len(steps)) % 2 == 0, np.arange(len(steps)) % 2 == 1):
        other = fit_steps(steps[~half], model, gpu, gpu_count, parameters)
        unseen[half] = step_errors(steps[half], model, gpu, gpu_count, other)
    before = step_errors(steps, model, gpu, gpu_count, parameters)
    return Calibration(
        model=model.name, title=title or f"a kernel trace of {model.name} on {gpu_count} x {gpu.name}",
        command=command, outlier_rule="none",
        sources=[*sources, f"{len(steps)} engine steps of a kernel trace on {gpu_count} x {gpu.name}; errors are of "
                 f"steps: mean {100 * np.abs(before).mean():.1f} % before the fit, {100 * np.abs(errors).mean():.1f} % "
                 f"after, {100 * np.abs(unseen).mean():.1f} % where the step was not fitted",
                 f"started from calibration {start.id if start else 'none (roofline)'}"],
        range=_range(steps, gpu, gpu_count), errors=_errors(steps, errors, unseen),
        parameters=Parameters(**{n: float(f"{v:.5g}") for n, v in fitted.model_dump().items()}))


def fit_steps(steps: pd.DataFrame, model: ModelSpec, gpu: GpuSpec, gpu_count: int, start: Parameters) -> Parameters:
    """Maximum a posteriori parameters around `start`."""
    names = [name for name in _TOLERANCE if getattr(start, name) > 0]
    tolerance = np.array([_TOLERANCE[name] for name in names])
    measured = np.stack([steps[list(columns)].sum(axis=1) for columns in GROUPS.values()])
    seen = measured > LEAST_SHARE * steps.seconds.to_numpy()

    def at(x: np.ndarray) -> Parameters:
        return scaled(start, dict(zip(names, np.exp(x), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        predicted = predict_steps(steps, model, gpu, gpu_count, at(x))
        logs = np.log(np.maximum(predicted[seen], 1e-9) / measured[seen]) / NOISE
        return np.concatenate([logs, x / tolerance])

    return at(secant_least_squares(residuals, np.zeros(len(names)), 60))


def predict_steps(steps: pd.DataFrame, model: ModelSpec, gpu: GpuSpec, gpu_count: int,
                  parameters: Parameters) -> np.ndarray:
    """(groups, steps): seconds of each group of `GROUPS` in each step, as the step model has them."""
    batches = Batch._make(steps[name].to_numpy(float) for name in Batch._fields)
    seconds = StepTimeModel(model, gpu, gpu_count, parameters).components_of(batches)
    return np.stack([np.sum([seconds[name] for name in columns], axis=0) for columns in GROUPS.values()])


def step_errors(steps: pd.DataFrame, model: ModelSpec, gpu: GpuSpec, gpu_count: int,
                parameters: Parameters) -> np.ndarray:
    """Relative errors of whole steps, model over measurement minus one."""
    return predict_steps(steps, model, gpu, gpu_count, parameters).sum(axis=0) / steps.seconds.to_numpy() - 1


def _errors(steps: pd.DataFrame, errors: np.ndarray, unseen: np.ndarray) -> Errors | None:
    """None where the trace holds one kind of step only: half an error would look like a whole one."""
    mixed = steps.prefills.to_numpy() > 0
    if mixed.all() or not mixed.any():
        return None

    def pair(e: np.ndarray) -> ErrorPair:
        return ErrorPair(points=len(e), tpot_percent=round(float(100 * np.abs(e[~mixed]).mean()), 2),
                         ttft_percent=round(float(100 * np.abs(e[mixed]).mean()), 2))

    return Errors(fitted=pair(errors), all_points=pair(errors), held_out_time=pair(unseen))


def _range(steps: pd.DataFrame, gpu: GpuSpec, gpu_count: int) -> Range:
    requests = steps.decodes + steps.prefills
    decoding = steps[steps.decodes > 0]
    context = (decoding.decode_context / decoding.decodes) if len(decoding) else steps.prefill_tokens
    span = [float(context.min()), float(context.max())]
    most = float(steps.tokens.max())
    return Range(gpus=[gpu.name], gpu_counts=[gpu_count], concurrency=[float(requests.min()), float(requests.max())],
                 prompt_tokens=span, context_tokens=span, batched_tokens=[most, most], cached_prefix=False)
