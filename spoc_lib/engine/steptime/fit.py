"""Parameters from serving points: the second half of a calibration.

The kernel tables (or the roofline's assumptions) are the starting point, and each parameter is tied to it as tightly
as it deserves: attention and its bandwidth are the kernels that serve, experts and collectives are close relatives of
them, host and front-end times were never measured. The fit is maximum a posteriori: log errors of TPOT and TTFT over
their noise, with Cauchy's loss so that a point that the others contradict loses its pull, plus log distances of the
parameters over their tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spoc_lib.config import ModelSpec, load_gpu
from spoc_lib.core.errors import InputError
from spoc_lib.engine.steptime.model import StepTimeModel
from spoc_lib.engine.steptime.parameters import Parameters, scaled
from spoc_lib.engine.steptime.serving_loop import measure, served_by
from spoc_lib.engine.steptime.serving_points import ServingPoint

#: Relative error expected of one point, TTFT and TPOT: the measurements' own spread (about 3.5 % and 1 %) and
#: what sums over a whole benchmark leave out.
NOISE = np.array([0.04, 0.0225])
#: Errors beyond this many noises pull less and less (Cauchy's loss).
CAUCHY_SCALE = 2.0

#: Step of finite differences, in logarithms. Not smaller: which step an arrival just catches jumps with the
#: parameters, and the fit should see past that.
DIFFERENCE = 1e-2

#: Tolerance of each fitted parameter: one standard deviation of the logarithm around its starting value.
TOLERANCE = {
    "gemm_read_efficiency": 0.15, "gemm_compute_efficiency": 0.2, "gemm_launch_us": 0.3,
    "expert_read_efficiency": 0.02, "expert_unpack_tb_per_s": 0.3, "expert_compute_efficiency": 0.5,
    "expert_launch_us": 0.3, "expert_padding_rows": 0.7, "expert_tile_rows": 0.3, "expert_skew": 0.3,
    "route_passes": 0.6,
    "decode_read_efficiency": 0.03, "decode_read_tb_per_s": 0.03, "decode_request_ns": 0.2, "prefill_token_ns": 0.2,
    "prefill_compute_efficiency": 0.1, "window_compute_efficiency": 0.1,
    "allreduce_latency_us": 0.3, "allreduce_rank_us": 0.5, "allreduce_efficiency": 0.3,
    "small_kernel_us": 0.4, "stream_tb_per_s": 0.5,
    "gap_us": 0.7, "gap_request_us": 1.0, "gap_prefill_us": 1.0, "earlier_release_gap_us": 1.0,
    "frontend_us": 0.2, "frontend_token_us": 0.5, "client_turnaround_us": 1.0,
}


@dataclass(frozen=True, slots=True)
class ServingFit:
    """`parameters` and the signed relative errors of the points that made them: (points, 2), TTFT and TPOT."""

    parameters: Parameters
    errors: np.ndarray


def predict(points: Sequence[ServingPoint], model: ModelSpec, parameters: Parameters) -> np.ndarray:
    """(points, 2): mean TTFT and mean TPOT of each point in seconds."""
    models: dict[tuple, StepTimeModel] = {}
    predicted = np.empty((len(points), 2))
    for i, point in enumerate(points):
        key = (point.gpu, point.gpu_count, point.earlier_release)
        if key not in models:
            models[key] = served_by(point, StepTimeModel(model, load_gpu(point.gpu), point.gpu_count, parameters))
        predicted[i] = measure(point, model, models[key].gpu, models[key])
    return predicted


def relative_errors(points: Sequence[ServingPoint], predicted: np.ndarray) -> np.ndarray:
    """(points, 2): model over measurement minus one, TTFT and TPOT."""
    return predicted / np.array([[point.ttft_s, point.tpot_s] for point in points]) - 1


def fit_points(points: Sequence[ServingPoint], model: ModelSpec, start: Parameters,
               warm: Parameters | None = None, steps: int = 120) -> ServingFit:
    """Maximum a posteriori parameters around `start`; the search begins at `warm` where it is given.

    InputError when fewer than 4 points are there: they say too little about any parameter.
    """
    if len(points) < 4:
        raise InputError("too-few-points", f"{len(points)} serving points are too few to fit: give at least 4")
    fitted = [name for name in TOLERANCE if getattr(start, name) > 0]
    tolerance = np.array([TOLERANCE[name] for name in fitted])
    begin = np.zeros(len(fitted)) if warm is None else np.log(
        [getattr(warm, name) / getattr(start, name) for name in fitted])

    def at(x: np.ndarray) -> Parameters:
        return scaled(start, dict(zip(fitted, np.exp(x), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        error = np.log1p(relative_errors(points, predict(points, model, at(x)))) / NOISE
        robust = np.sign(error) * CAUCHY_SCALE * np.sqrt(np.log1p((error / CAUCHY_SCALE) ** 2))
        return np.concatenate([robust.ravel(), x / tolerance])

    parameters = at(secant_least_squares(residuals, begin, steps))
    return ServingFit(parameters, relative_errors(points, predict(points, model, parameters)))


def secant_least_squares(residuals: Callable[[np.ndarray], np.ndarray], x: np.ndarray, steps: int) -> np.ndarray:
    """Minimise the sum of squared `residuals` by damped Gauss-Newton steps whose Jacobian is kept up to date by
    secants (Broyden) and differenced anew only when they stop helping: a benchmark is dear, its response smooth."""
    value, jacobian, age, damping = residuals(x), None, 0, 1e-3
    for _ in range(steps):
        if jacobian is None:
            jacobian = np.stack([(value - residuals(x - h)) / DIFFERENCE for h in DIFFERENCE * np.eye(len(x))], axis=1)
            age, damping = 0, 1e-3
        normal = jacobian.T @ jacobian
        move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), jacobian.T @ value)
        moved = residuals(x + move)
        gain = 1 - (moved @ moved) / (value @ value)
        if gain > 0:
            jacobian = jacobian + np.outer(moved - value - jacobian @ move, move) / (move @ move)
            x, value, damping, age = x + move, moved, damping / 4, age + 1
            if gain < 1e-4:
                if age == 1:
                    break
                jacobian = None
        else:
            damping *= 8
            if age:
                jacobian = None
            elif damping > 1e4:
                break
    return x


def held_out(points: Sequence[ServingPoint], labels: Sequence, model: ModelSpec, start: Parameters,
             warm: Parameters) -> np.ndarray | None:
    """(points, 2) errors of each point under a fit that saw no point of its label; None with a single label."""
    if len(set(labels)) < 2:
        return None
    errors = np.empty((len(points), 2))
    for label in sorted(set(labels), key=str):
        inside = np.array([one == label for one in labels])
        rest = [point for point, out in zip(points, inside, strict=True) if not out]
        own = [point for point, out in zip(points, inside, strict=True) if out]
        if len(rest) < 4:
            return None
        fit = fit_points(rest, model, start, warm=warm, steps=80)
        errors[inside] = relative_errors(own, predict(own, model, fit.parameters))
    return errors
