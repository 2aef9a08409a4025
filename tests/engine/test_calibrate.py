"""Calibration finds parameters that made its data, writes a file that loads, and refuses what it cannot use."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.engine.steptime import calibration_file
from spoc_lib.engine.steptime.calibrate import calibrate
from spoc_lib.engine.steptime.fit import predict, relative_errors, secant_least_squares
from spoc_lib.engine.steptime.model import step_time_model
from spoc_lib.engine.steptime.parameters import ROOFLINE, scaled
from spoc_lib.engine.steptime.serving_points import ServingPoint

GPT_OSS = load_model("gpt-oss-120b")
TRUTH = scaled(ROOFLINE, {"expert_compute_efficiency": 0.6, "gap_us": 3.0, "expert_skew": 1.5, "frontend_us": 1.3})
POINTS = [ServingPoint(gpu, count, prompt, 128, concurrency, 1.0, 1.0, "0.18.0")
          for gpu, count in (("h100-sxm", 2), ("h100-sxm", 8), ("h200-sxm", 1))
          for prompt in (1024, 8192) for concurrency in (4, 16, 48)]


def made_points(path) -> None:
    """A serving CSV that the twin itself made under `TRUTH`."""
    measured = predict(POINTS, GPT_OSS, TRUTH)
    pd.DataFrame([{
        "system": p.gpu.replace("-", "_"), "backend_version": p.release, "isl": p.prompt, "osl": p.output,
        "tp_size": p.gpu_count, "conc": p.concurrency, "ttft_ms_mean": 1e3 * ttft, "tpot_ms": 1e3 * tpot,
    } for p, (ttft, tpot) in zip(POINTS, measured, strict=True)]).to_csv(path, index=False)


@pytest.mark.slow
def test_the_fit_recovers_what_made_the_points_and_the_file_round_trips(tmp_path):
    made_points(tmp_path / "points.csv")
    result = calibrate("gpt-oss-120b", points_path=tmp_path / "points.csv", command="spoc engine calibrate",
                       cross_validate=False)
    assert result.errors.fitted.tpot_percent < 1.0 and result.errors.fitted.ttft_percent < 1.5
    assert result.range.gpu_counts == [1, 2, 8] and result.range.cached_prefix is False
    assert not any(residual.outlier for residual in result.residuals)
    path = calibration_file.save(tmp_path / "mine.steptime.yaml", result)
    loaded = calibration_file.load(path)
    assert loaded == result and loaded.id == result.id
    step_time = step_time_model(GPT_OSS, load_gpu("h100-sxm"), 2, loaded)
    assert step_time.passport()["calibration_id"] == loaded.id


def test_secant_least_squares_solves_a_curved_problem_with_few_evaluations():
    calls = []

    def residuals(x):
        calls.append(1)
        return np.array([np.exp(x[0]) - 2, x[0] * x[1] - 1, x[1] ** 2 - 2])

    x = secant_least_squares(residuals, np.array([0.3, 1.0]), 30)
    start, end = (residuals(np.array(v)) for v in ([0.3, 1.0], x))
    assert end @ end < 0.02 * (start @ start)
    assert len(calls) < 40


def test_the_shipped_calibration_is_what_its_points_say(shared):
    from spoc_lib.engine.steptime.serving_points import read_points

    calibration = calibration_file.load(calibration_file.path_of("gpt-oss-120b"))
    points = read_points(shared("data/silicon/gptoss120b_vllm_serving.csv"))
    errors = 100 * relative_errors(points, predict(points, GPT_OSS, calibration.parameters))
    written = np.array([[r.ttft_percent, r.tpot_percent] for r in calibration.residuals])
    assert np.abs(errors - written).max() < 0.3
    assert calibration.errors.fitted.tpot_percent <= 3 and calibration.errors.fitted.ttft_percent <= 5
    assert "/" not in calibration.title and "calibrate" in calibration.command


def test_bad_sources_get_one_sentence(tmp_path, here):
    nothing = here("engine", "calibrate", "--out", tmp_path / "out.yaml")
    assert nothing.returncode == 2 and "nothing to calibrate from" in nothing.stderr
    few = tmp_path / "few.csv"
    few.write_text("system,isl,osl,tp_size,conc,ttft_ms_mean,tpot_ms\nh100_sxm,1024,64,2,4,60,5\n")
    done = here("engine", "calibrate", "--points", few, "--out", tmp_path / "out.yaml")
    assert done.returncode == 2 and "1 serving points are too few" in done.stderr
    assert not (tmp_path / "out.yaml").exists()
