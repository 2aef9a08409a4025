"""Kernel tables give back the parameters that made them, as a file to start a calibration from."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.engine.steptime import calibration_file
from spoc_lib.engine.steptime.kernels import Shard, allreduce_seconds, expert_seconds, route_seconds
from spoc_lib.engine.steptime.model import step_time_model
from spoc_lib.engine.steptime.parameters import ROOFLINE, scaled
from tools import kernel_tables

GPT_OSS = load_model("gpt-oss-120b")


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
    fitted, quality = kernel_tables.fit_tables(tmp_path, GPT_OSS, ROOFLINE)
    assert set(quality) == {"moe", "allreduce"} and quality["moe"]["median_percent"] < 1
    for name in ("expert_unpack_tb_per_s", "expert_launch_us", "allreduce_latency_us", "allreduce_efficiency"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.08)
    alone = kernel_tables.calibration(tmp_path, "gpt-oss-120b")
    assert alone.range is None and alone.errors is None
    card = step_time_model(GPT_OSS, load_gpu("h100-sxm"), 2, alone).passport()
    assert "no serving measurement" in card["warnings"][0]
    path = tmp_path / "start.yaml"
    subprocess.run([sys.executable, kernel_tables.__file__, str(tmp_path), "--out", str(path)], check=True,
                   capture_output=True, timeout=120)
    assert calibration_file.load(path).parameters.model_dump() == pytest.approx(alone.parameters.model_dump())


def test_a_folder_without_tables_and_a_table_without_its_columns_get_one_sentence(tmp_path):
    with pytest.raises(InputError, match="holds no kernel table"):
        kernel_tables.calibration(tmp_path, "gpt-oss-120b")
    (tmp_path / "x_moe_ms.csv").write_text("system,num_tokens\nh100_sxm,1\n")
    with pytest.raises(InputError, match="lacks the column"):
        kernel_tables.calibration(tmp_path, "gpt-oss-120b")
