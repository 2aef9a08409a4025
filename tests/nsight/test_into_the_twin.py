"""A decomposed trace calibrates the twin: what the trace's GPU did differently is found again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from spoc_lib import cli, config
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.kerneltrace import write_trace
from spoc_lib.engine.steptime import calibration_file
from spoc_lib.engine.steptime.calibrate_steps import GROUPS, calibrate_steps, predict_steps
from spoc_lib.engine.steptime.parameters import scaled
from spoc_lib.nsight import decompose, measured_steps

#: How the traced machine differs from the shipped calibration.
SLOWER = {"expert_unpack_tb_per_s": 0.7, "decode_read_tb_per_s": 0.8, "allreduce_latency_us": 1.6, "gap_us": 1.5}


def batches(count=120):
    rng = np.random.default_rng(5)
    for _ in range(count):
        decodes, context = int(rng.integers(1, 120)), int(rng.integers(2_000, 60_000))
        chunk = int(rng.integers(256, 4096)) if rng.random() < 0.4 else 0
        before = int(rng.integers(0, 30_000)) if chunk else 0
        yield Batch(decodes + chunk, decodes, decodes * context, decodes * 128, int(chunk > 0), chunk,
                    chunk * (before + chunk / 2), chunk * 128.0, before, decodes + int(chunk > 0))


@pytest.fixture(scope="module")
def engine():
    return EmbeddedEngine.from_cluster(config.load_cluster("sim-4xh100"))


@pytest.fixture(scope="module")
def trace(engine, tmp_path_factory):
    model = engine.step_time.with_parameters(scaled(engine.step_time.parameters, SLOWER))
    other, at, rows = dataclasses.replace(engine, step_time=model), 1.0, []
    for batch in batches():
        rows.append({"time_s": at, "duration_s": model.seconds(batch), **batch._asdict()})
        at += rows[-1]["duration_s"]
    return write_trace(tmp_path_factory.mktemp("cal") / "slower.sqlite", other, pd.DataFrame(rows), 0, at)


def test_the_fitted_formula_is_the_models_own(engine):
    frame = pd.DataFrame([b._asdict() for b in batches(12)])
    predicted = predict_steps(frame, engine.model, engine.gpu, engine.gpu_count, engine.step_time.parameters)
    for n, batch in enumerate(batches(12)):
        parts = engine.step_time.components(batch)
        for name, got in zip(GROUPS, predicted[:, n], strict=True):
            assert got == pytest.approx(sum(parts[c] for c in GROUPS[name]), rel=1e-9, abs=1e-12), name


def test_what_differs_is_found_and_the_rest_is_left(engine, trace):
    steps = measured_steps(decompose(trace))
    found = calibrate_steps("gpt-oss-120b", steps, gpu_name="h100-sxm", gpu_count=4)
    before = engine.step_time.parameters
    for name in ("expert_unpack_tb_per_s", "allreduce_latency_us", "gap_us"):
        assert getattr(found.parameters, name) / getattr(before, name) == pytest.approx(SLOWER[name], rel=0.1), name
    # one GPU does not tell whether DRAM or the SMs hold up the read of keys and values: only its rate is found
    predicted = predict_steps(steps, engine.model, engine.gpu, 4, found.parameters)
    for (group, columns), got in zip(GROUPS.items(), predicted, strict=True):
        want = steps[list(columns)].sum(axis=1).to_numpy()
        assert np.abs(got / want - 1)[want > 0.005 * steps.seconds].max() < 0.02, group
    for name in ("expert_skew", "prefill_compute_efficiency", "sample_launch_us", "gemm_compute_efficiency"):
        assert getattr(found.parameters, name) / getattr(before, name) == pytest.approx(1, rel=0.1), name
    assert found.errors.held_out_time.tpot_percent < 1 and found.errors.held_out_time.ttft_percent < 1
    assert found.range.gpu_counts == [4] and found.id != engine.step_time.calibration.id


def test_too_few_steps_are_refused(trace):
    steps = measured_steps(decompose(trace)).head(5)
    with pytest.raises(InputError, match="5 whole steps"):
        calibrate_steps("gpt-oss-120b", steps, gpu_name="h100-sxm", gpu_count=4)


def test_the_command_writes_a_file_that_the_engine_takes(trace, tmp_path, monkeypatch, capsys):
    out = tmp_path / "mine.steptime.yaml"
    command = ["spoc", "engine", "calibrate", "--nsight", str(trace), "--out", str(out)]
    monkeypatch.setattr("sys.argv", [*command, "--gpu", "h100-sxm"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    stored = calibration_file.load(out)
    assert "simulated kernel trace slower.sqlite" in stored.sources[0] and stored.range.gpus == ["h100-sxm"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and "needs --nsight and --gpu together" in capsys.readouterr().err
