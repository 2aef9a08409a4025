"""Calibration finds parameters that made its data, writes a file that loads, and refuses what it cannot use."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.engine.steptime import calibration_file
from spoc_lib.engine.steptime.calibrate import calibrate
from spoc_lib.engine.steptime.fit import predict, relative_errors, secant_least_squares
from spoc_lib.engine.steptime.kernels import Shard, allreduce_seconds, expert_seconds, route_seconds
from spoc_lib.engine.steptime.model import step_time_model
from spoc_lib.engine.steptime.parameters import ROOFLINE, scaled
from spoc_lib.engine.steptime.serving_points import ServingPoint
from spoc_lib.engine.steptime.tables import fit_tables

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


def test_kernel_tables_alone_recover_their_parameters(tmp_path):
    truth = scaled(ROOFLINE, {"expert_unpack_tb_per_s": 0.8, "expert_launch_us": 1.4, "allreduce_latency_us": 1.5,
                              "allreduce_efficiency": 0.7})
    moe, reduce = [], []
    for name in ("h100-sxm", "h200-sxm"):
        for count in (2, 4, 8):
            shard = Shard(GPT_OSS, load_gpu(name), count, truth)
            tokens = np.geomspace(1, 8192, 14).round()
            seconds = expert_seconds(shard, tokens) + route_seconds(shard, tokens)
            moe += [{"system": name.replace("-", "_"), "distribution": "power_law_1.2", "moe_tp_size": count,
                     "num_tokens": n, "latency_ms": 1e3 * s} for n, s in zip(tokens, seconds, strict=True)]
            sizes = np.geomspace(128, 2**26, 12)
            reduce += [{"system": name.replace("-", "_"), "kernel_source": "custom_graph", "num_gpus": count,
                        "message_size": n, "latency_ms": 1e3 * s}
                       for n, s in zip(sizes, allreduce_seconds(shard, sizes), strict=True)]
    pd.DataFrame(moe).to_csv(tmp_path / "x_moe_ms.csv", index=False)
    pd.DataFrame(reduce).to_csv(tmp_path / "x_allreduce_ms.csv", index=False)
    fitted, quality = fit_tables(tmp_path, GPT_OSS, ROOFLINE)
    assert set(quality) == {"moe", "allreduce"} and quality["moe"]["median_percent"] < 1
    for name in ("expert_unpack_tb_per_s", "expert_launch_us", "allreduce_latency_us", "allreduce_efficiency"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.08)
    alone = calibrate("gpt-oss-120b", tables=tmp_path)
    assert alone.range is None and alone.errors is None
    card = step_time_model(GPT_OSS, load_gpu("h100-sxm"), 2, alone).passport()
    assert "no serving measurement" in card["warnings"][0]


def test_the_shipped_calibration_is_what_its_points_say(shared):
    from spoc_lib.engine.steptime.serving_points import read_points

    calibration = calibration_file.load(calibration_file.path_of("gpt-oss-120b"))
    points = read_points(shared("data/silicon/gptoss120b_vllm_serving.csv"))
    errors = 100 * relative_errors(points, predict(points, GPT_OSS, calibration.parameters))
    written = np.array([[r.ttft_percent, r.tpot_percent] for r in calibration.residuals])
    assert np.abs(errors - written).max() < 0.3
    assert calibration.errors.fitted.tpot_percent <= 3 and calibration.errors.fitted.ttft_percent <= 5
    assert "/" not in calibration.title and "calibrate" in calibration.command


def test_bad_sources_get_one_sentence(tmp_path):
    with pytest.raises(InputError, match="nothing to calibrate from"):
        calibrate("gpt-oss-120b")
    with pytest.raises(InputError, match="holds no kernel table"):
        calibrate("gpt-oss-120b", tables=tmp_path)
    (tmp_path / "x_moe_ms.csv").write_text("system,num_tokens\nh100_sxm,1\n")
    with pytest.raises(InputError, match="lacks the column"):
        calibrate("gpt-oss-120b", tables=tmp_path)
    few = tmp_path / "few.csv"
    few.write_text("system,isl,osl,tp_size,conc,ttft_ms_mean,tpot_ms\nh100_sxm,1024,64,2,4,60,5\n")
    done = subprocess.run([sys.executable, "-m", "spoc_lib", "engine", "calibrate", "--points", str(few), "--out",
                           str(tmp_path / "out.yaml")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "1 serving points are too few" in done.stderr
    assert not (tmp_path / "out.yaml").exists()
