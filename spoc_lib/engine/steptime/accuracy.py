"""The twin held to published serving measurements: TTFT and TPOT error of every point.

Each point goes through the twin as it was measured (`serving_points`). An **outlier** is a point whose log error in
TPOT or TTFT lies more than four robust standard deviations (1.4826 × median absolute deviation over the file) from
the median, and also more than 12 % (TPOT) or 25 % (TTFT): the means are given with and without such points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spoc_lib.config import load_gpu, load_model
from spoc_lib.engine.steptime import calibration_file, serving_points
from spoc_lib.engine.steptime.calibration_file import Calibration
from spoc_lib.engine.steptime.model import step_time_model
from spoc_lib.engine.steptime.serving_loop import measure, served_by
from spoc_lib.engine.steptime.serving_points import ServingPoint

OUTLIER_SIGMAS = 4.0
#: Least relative error of an outlier, TTFT and TPOT.
OUTLIER_LEAST = np.array([0.25, 0.12])
OUTLIER_RULE = ("more than 4 robust standard deviations (1.4826 x median absolute deviation) from the median log "
                "error, and more than 12 % (TPOT) or 25 % (TTFT) off it")


def flag_outliers(errors: np.ndarray) -> np.ndarray:
    """bool (points,): outliers by the rule above. `errors`: (points, 2) relative errors, TTFT and TPOT."""
    logs = np.log1p(errors)
    off = np.abs(logs - np.median(logs, axis=0))
    spread = 1.4826 * np.median(off, axis=0)
    return (off > np.maximum(OUTLIER_SIGMAS * spread, np.log1p(OUTLIER_LEAST))).any(axis=1)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors of the twin: `points`, `predicted` (points, 2) TTFT and TPOT in seconds, relative `errors`,
    `outliers` flags, and the passport of the first point's step time."""

    points: Sequence[ServingPoint]
    predicted: np.ndarray
    errors: np.ndarray
    outliers: np.ndarray
    passport: dict

    def to_dict(self) -> dict:
        """Mean and median absolute percentage errors, with and without outliers, and a row a point."""
        absolute = 100 * np.abs(self.errors)
        kept = absolute[~self.outliers]
        return {
            "points": len(self.points),
            "outliers": int(self.outliers.sum()),
            "outlier_rule": OUTLIER_RULE,
            **_summary(absolute, ""),
            **_summary(kept, "_without_outliers"),
            "rows": [self._row(i) for i in range(len(self.points))],
            "passport": self.passport,
        }

    def _row(self, i: int) -> dict:
        point = self.points[i]
        return {
            "gpu": point.gpu, "gpu_count": point.gpu_count, "prompt": point.prompt, "output": point.output,
            "concurrency": point.concurrency, "release": point.release,
            "ttft_measured_ms": 1e3 * point.ttft_s, "ttft_ms": 1e3 * self.predicted[i, 0],
            "ttft_error_percent": 100 * self.errors[i, 0],
            "tpot_measured_ms": 1e3 * point.tpot_s, "tpot_ms": 1e3 * self.predicted[i, 1],
            "tpot_error_percent": 100 * self.errors[i, 1],
            "outlier": bool(self.outliers[i]),
        }

    def text(self) -> str:
        """A line a point, then the means."""
        lines = ["gpu          GPUs  prompt/output  conc    TTFT ms  (measured)  error    TPOT ms  (measured)  error"]
        for row in self.to_dict()["rows"]:
            lines.append(
                f"{row['gpu']:12s} {row['gpu_count']:4d}  {row['prompt']:6d}/{row['output']:<6d} "
                f"{row['concurrency']:5d}  {row['ttft_ms']:9.1f}  {row['ttft_measured_ms']:10.1f} "
                f"{row['ttft_error_percent']:+6.1f}%  {row['tpot_ms']:9.3f}  {row['tpot_measured_ms']:10.3f} "
                f"{row['tpot_error_percent']:+6.1f}%{'  outlier' if row['outlier'] else ''}")
        result = self.to_dict()
        for suffix, what in (("", "all points"), ("_without_outliers", f"without {result['outliers']} outliers")):
            lines.append(
                f"{what}: mean absolute error TPOT {result['tpot_mape' + suffix]:.2f} %, TTFT "
                f"{result['ttft_mape' + suffix]:.2f} %; median {result['tpot_median' + suffix]:.2f} %, "
                f"{result['ttft_median' + suffix]:.2f} %")
        lines.append(f"outlier: {OUTLIER_RULE}")
        lines.append(f"simulated; step time {self.passport['step_time']}, calibration "
                     f"{self.passport['calibration_id']}")
        return "\n".join(lines)


def _summary(absolute: np.ndarray, suffix: str) -> dict[str, float]:
    columns = {"ttft": absolute[:, 0], "tpot": absolute[:, 1]}
    return ({f"{name}_mape{suffix}": float(values.mean()) for name, values in columns.items()}
            | {f"{name}_median{suffix}": float(np.median(values)) for name, values in columns.items()})


def accuracy(path: str | Path, model_name: str = "gpt-oss-120b", calibration_path: str | Path | None = None,
             exact: bool = False) -> Accuracy:
    """Errors over the serving points in the CSV at `path`.

    calibration_path: another calibration than the shipped one; exact: every point on the plain core, minutes
    instead of seconds, the same numbers. InputError for a bad file, system or calibration.
    """
    points = serving_points.read_points(path)
    model = load_model(model_name)
    calibration: Calibration | None = calibration_file.load(calibration_path) if calibration_path else None
    models = [step_time_model(model, load_gpu(point.gpu), point.gpu_count, calibration) for point in points]
    predicted = np.array([measure(point, model, load_gpu(point.gpu), served_by(point, step_time), exact)
                          for point, step_time in zip(points, models, strict=True)])
    errors = predicted / np.array([[point.ttft_s, point.tpot_s] for point in points]) - 1
    return Accuracy(points, predicted, errors, flag_outliers(errors), models[0].passport())
