"""Make a calibration file: serving points or a run in, parameters with range and errors out.

Serving points say what a start (the roofline's assumptions, or a file such as kernel tables give) leaves open
(`steptime.fit`), cross-validation says the held-out error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from spoc_lib.config import ModelSpec, load_gpu, load_model
from spoc_lib.engine.steptime import calibration_file, serving_points
from spoc_lib.engine.steptime.accuracy import OUTLIER_RULE, flag_outliers
from spoc_lib.engine.steptime.calibration_file import Calibration, ErrorPair, Errors, Range, Residual
from spoc_lib.engine.steptime.fit import fit_points, held_out
from spoc_lib.engine.steptime.fit_run import fit_run, read_run, run_errors
from spoc_lib.engine.steptime.model import StepTimeModel, step_time_model
from spoc_lib.engine.steptime.parameters import ROOFLINE, Parameters
from spoc_lib.engine.steptime.serving_points import ServingPoint

Progress = Callable[[str], None]


def calibrate(model_name: str, *, points_path: str | Path, start_path: str | Path | None = None, command: str = "",
              title: str = "", sources: Sequence[str] = (), cross_validate: bool = True,
              progress: Progress = lambda line: None) -> Calibration:
    """Fit the step time of a model to serving points.

    points_path: serving points (CSV); start_path: a calibration to start from instead of the roofline's assumptions,
    whose sources the new file names too; command, title, sources: provenance that goes into the file; progress: called
    with a line at each stage. InputError when a file is faulty.
    """
    model = load_model(model_name)
    start = calibration_file.load(start_path) if start_path else None
    parameters = start.parameters if start else ROOFLINE
    said = [*sources, *(start.sources if start else [])]
    points = serving_points.read_points(points_path)
    progress(f"fitting {len(points)} serving points")
    fit = fit_points(points, model, parameters)
    outliers = flag_outliers(fit.errors)
    said.append(f"{len(points)} serving points, {Path(points_path).name}")
    return Calibration(
        model=model.name, title=title or f"step time of {model.name}", command=command, sources=said,
        outlier_rule=OUTLIER_RULE, range=_range(points, model), parameters=_rounded(fit.parameters),
        errors=_errors(points, model, parameters, fit.parameters, fit.errors, outliers, cross_validate, progress),
        residuals=[_residual(*one) for one in zip(points, fit.errors, outliers, strict=True)])


def calibrate_run(model_name: str, requests: str | Path, metrics: str | Path, *, gpu_name: str, gpu_count: int,
                  batched_tokens: int = 8192, start_path: str | Path | None = None, command: str = "",
                  title: str = "", sources: Sequence[str] = (), progress: Progress = lambda line: None) -> Calibration:
    """Fit what a real run can tell (`steptime.fit_run`), from the calibration at `start_path` or the shipped one.

    requests, metrics: the run's tables; batched_tokens: the server's max_num_batched_tokens. The held-out error is
    that of each half of the run under the fit to the other half. InputError as in `read_run`.
    """
    model, gpu = load_model(model_name), load_gpu(gpu_name)
    start = calibration_file.load(start_path) if start_path else step_time_model(model, gpu, gpu_count).calibration
    parameters = start.parameters if start else ROOFLINE
    run = read_run(requests, metrics, model, batched_tokens)
    progress(f"fitting {len(run)} requests")
    fitted = fit_run(run, model, gpu, gpu_count, parameters)
    errors = run_errors(run, StepTimeModel(model, gpu, gpu_count, fitted))
    unseen = np.empty_like(errors)
    for half in (np.arange(len(run)) < len(run) // 2, np.arange(len(run)) >= len(run) // 2):
        other = fit_run(run, model, gpu, gpu_count, parameters, chosen=~half)
        unseen[half] = run_errors(run, StepTimeModel(model, gpu, gpu_count, other))[half]
    peak = float(run.decodes.max())
    prompts = [float(run.prompt.min()), float(run.prompt.max())]
    return Calibration(
        model=model.name, title=title or f"one run of {model.name} on {gpu_count} x {gpu.name}", command=command,
        sources=[*sources, f"{len(run)} completed requests of a run on {gpu_count} x {gpu.name}",
                 f"started from calibration {start.id if start else 'none (roofline)'}"],
        outlier_rule="none: Cauchy's loss",
        range=Range(gpus=[gpu.name], gpu_counts=[gpu_count], concurrency=[1.0, peak], prompt_tokens=prompts,
                    context_tokens=[prompts[0], float((run.prompt + run.output).max())],
                    batched_tokens=[batched_tokens] * 2, cached_prefix=bool((run.cached > 0).any()),
                    **_measured(model, [gpu_name])),
        errors=Errors(fitted=_pair(errors), all_points=_pair(errors), held_out_time=_pair(unseen)),
        parameters=_rounded(fitted))


def _errors(points: Sequence[ServingPoint], model: ModelSpec, start: Parameters, fitted: Parameters,
            errors: np.ndarray, outliers: np.ndarray, cross_validate: bool, progress: Progress) -> Errors:
    """Errors of the fit, and of fits that did not see a group; outliers of the whole fit left out of the means."""
    pairs = {"fitted": _pair(errors[~outliers]), "all_points": _pair(errors)}
    if cross_validate:
        for name, labels in serving_points.groups(points).items():
            progress(f"cross-validation: {name.replace('_', ' ')}")
            unseen = held_out(points, labels, model, start, fitted)
            if unseen is not None:
                pairs[name] = _pair(unseen[~outliers])
    return Errors(**pairs)


def _pair(errors: np.ndarray) -> ErrorPair:
    ttft, tpot = 100 * np.nanmean(np.abs(errors), axis=0)
    return ErrorPair(points=len(errors), tpot_percent=round(float(tpot), 2), ttft_percent=round(float(ttft), 2))


def _residual(point: ServingPoint, error: np.ndarray, outlier: bool) -> Residual:
    return Residual(
        gpu=point.gpu, gpu_count=point.gpu_count, prompt=point.prompt, output=point.output,
        concurrency=point.concurrency, tpot_percent=round(100 * float(error[1]), 1),
        ttft_percent=round(100 * float(error[0]), 1), outlier=bool(outlier))


def _rounded(parameters: Parameters) -> Parameters:
    """Five significant digits: more would pretend."""
    return Parameters(**{name: float(f"{value:.5g}") for name, value in parameters.model_dump().items()})


def _measured(model: ModelSpec, gpus: Sequence[str]) -> dict[str, list[str]]:
    """The precisions and kinds of attention that measurements of a model on these GPUs cover."""
    return {"precisions": sorted({f"{part} {load_gpu(gpu).precision(model, part)}" for gpu in gpus
                                  for part in model.parts}), "attention": model.attention_kinds}


def _range(points: Sequence[ServingPoint], model: ModelSpec) -> Range:
    prompts = [p.prompt for p in points]
    return Range(
        gpus=sorted({p.gpu for p in points}), gpu_counts=sorted({p.gpu_count for p in points}),
        concurrency=[min(p.concurrency for p in points), max(p.concurrency for p in points)],
        prompt_tokens=[int(serving_points.SHORTEST * min(prompts)), max(prompts)],
        context_tokens=[int(serving_points.SHORTEST * min(prompts)), max(p.prompt + p.output for p in points)],
        batched_tokens=[serving_points.MAX_NUM_BATCHED_TOKENS] * 2, cached_prefix=False,
        **_measured(model, sorted({p.gpu for p in points})))
