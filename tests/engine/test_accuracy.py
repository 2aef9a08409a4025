"""The twin held to measured serving points, and the benchmark's two players held to each other."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.engine.steptime.accuracy import accuracy, flag_outliers
from spoc_lib.engine.steptime.model import step_time_model
from spoc_lib.engine.steptime.serving_loop import measure
from spoc_lib.engine.steptime.serving_points import ServingPoint, read_points

HEADER = "system,backend_version,isl,osl,tp_size,conc,ttft_ms_mean,tpot_ms\n"
GPT_OSS = load_model("gpt-oss-120b")


def csv(tmp_path, *rows: str, header: str = HEADER):
    path = tmp_path / "points.csv"
    path.write_text(header + "".join(f"{row}\n" for row in rows))
    return path


@pytest.mark.parametrize(("gpu", "count", "prompt", "output", "concurrency"), [
    ("h100-sxm", 2, 1024, 64, 4),
    ("h200-sxm", 1, 8192, 48, 24),
    ("h100-sxm", 8, 100, 200, 16),  # contexts shorter than the sliding window
    ("h200-sxm", 2, 20_000, 32, 6),  # prompts of several chunks
])
def test_sums_alone_give_what_the_core_gives(gpu, count, prompt, output, concurrency):
    point = ServingPoint(gpu, count, prompt, output, concurrency, 1.0, 1.0, "0.18.0")
    step_time = step_time_model(GPT_OSS, load_gpu(gpu), count)
    fast = measure(point, GPT_OSS, load_gpu(gpu), step_time)
    exact = measure(point, GPT_OSS, load_gpu(gpu), step_time, exact=True)
    assert fast == pytest.approx(exact, rel=1e-9)


def test_a_pool_too_small_for_all_goes_through_the_core_and_queues():
    point = ServingPoint("h100-sxm", 1, 8192, 64, 32, 1.0, 1.0, "0.18.0")
    gpu = load_gpu("h100-sxm")
    crowded = measure(point, GPT_OSS, gpu, step_time_model(GPT_OSS, gpu, 1))
    roomy = measure(point, GPT_OSS, load_gpu("h200-sxm"), step_time_model(GPT_OSS, load_gpu("h200-sxm"), 1))
    assert crowded[0] > 1.5 * roomy[0]


def test_lengths_are_uniform_between_eight_tenths_and_the_whole():
    point = ServingPoint("h100-sxm", 2, 1024, 8192, 64, 1.0, 1.0)
    prompts, outputs = point.lengths()
    assert len(prompts) == len(outputs) == 640
    assert prompts.min() >= 819 and prompts.max() <= 1024
    assert outputs.mean() == pytest.approx(0.9 * 8192, rel=0.02)
    same = ServingPoint("h200-sxm", 8, 1024, 8192, 64, 2.0, 2.0)
    assert np.array_equal(same.lengths()[0], prompts)


def test_releases_before_0_18_and_unstated_ones_are_earlier():
    releases = {"0.18.0": False, "0.19.1": False, "1.0": False, "0.11.0": True, "": True}
    for release, earlier in releases.items():
        assert ServingPoint("h100-sxm", 2, 1024, 1024, 4, 1.0, 1.0, release).earlier_release is earlier


def test_the_outlier_rule_needs_both_spread_and_size():
    errors = np.tile([[0.02, 0.01]], (20, 1)) * np.linspace(-1, 1, 20)[:, None]
    assert not flag_outliers(errors).any()
    errors[3] = [0.0, -0.35]
    errors[7] = [0.5, 0.0]
    errors[9] = [0.2, 0.10]  # far off in spreads, yet small
    assert list(np.flatnonzero(flag_outliers(errors))) == [3, 7]


@pytest.mark.slow
def test_the_twin_meets_the_shared_points(shared):
    result = accuracy(shared("data/silicon/gptoss120b_vllm_serving.csv")).to_dict()
    assert result["points"] == 75 and len(result["rows"]) == 75
    assert result["outliers"] <= 6
    assert result["tpot_mape_without_outliers"] <= 3.0
    assert result["ttft_mape_without_outliers"] <= 5.0
    assert result["tpot_mape"] <= 4.4 and result["ttft_mape"] <= 8.6  # a plain roofline's, fitted


def test_the_command_takes_any_tp_and_writes_json(tmp_path, here):
    path = csv(tmp_path, "h100_sxm,0.18.0,1024,128,4,8,60,5", "h200_sxm,,1024,64,1,4,80,6",
               "h200_sxm,,300,20,8,1,30,4")
    done = here("engine", "accuracy", str(path), "--json", "-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"points", "tpot_mape", "ttft_mape", "tpot_mape_without_outliers", "ttft_mape_without_outliers",
            "tpot_median", "ttft_median"} <= set(result)
    assert [row["gpu_count"] for row in result["rows"]] == [4, 1, 8]
    assert result["passport"]["simulated"] is True


@pytest.mark.parametrize(("row", "header", "sentence"), [
    ("b300_sxm,0.18.0,1024,1024,2,4,60,5", HEADER, "row 2: unknown system 'b300_sxm'"),
    ("h100_sxm,0.18.0,1024,1024,2,4,60", HEADER.replace(",tpot_ms", ""), "lack the column 'tpot_ms'"),
    ("h100_sxm,0.18.0,1024,1024,2,many,60,5", HEADER, "column 'conc': 'many' is not a positive whole number"),
    ("h100_sxm,0.18.0,1024,1024,2,4,-60,5", HEADER, "column 'ttft_ms_mean': '-60' is not a positive number"),
    ("h100_sxm,0.18.0,1024,1,2,4,60,5", HEADER, "TPOT needs at least 2 output tokens"),
])
def test_a_faulty_file_gets_one_sentence(tmp_path, row, header, sentence):
    with pytest.raises(InputError, match=".") as caught:
        read_points(csv(tmp_path, row, header=header))
    assert sentence in caught.value.message


def test_faults_exit_2_without_a_traceback(tmp_path, here):
    for path in (tmp_path / "absent.csv", csv(tmp_path, "x100,0.18,1024,64,3,4,60,5")):
        done = here("engine", "accuracy", str(path))
        assert done.returncode == 2
        assert done.stderr.startswith("spoc: ") and done.stderr.count("\n") == 1
    done = here("engine", "accuracy", str(csv(tmp_path, "h100_sxm,0.18.0,1024,64,3,4,60,5")))
    assert done.returncode == 2 and "3 GPUs" in done.stderr
