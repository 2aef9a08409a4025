"""A calibration from a run's own tables: the twin plays the server whose kernels are slower than the start says."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from spoc_lib.config import load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.core.schemas import METRICS, REQUESTS
from spoc_lib.core.tables import write_table
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.steptime import calibration_file
from spoc_lib.engine.steptime.fit_run import read_run, run_errors
from spoc_lib.engine.steptime.parameters import scaled
from spoc_lib.engine.virtual import play
from spoc_lib.workload import build_script
from spoc_lib.workload.personas import load_personas


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Tables of a run on 4 H100s whose experts are 20 % slower and whose host gap is 3 times as long."""
    engine = EmbeddedEngine.from_cluster(load_cluster("sim-4xh100"))
    start = engine.step_time
    truth = start.with_parameters(scaled(start.parameters, {
        "expert_unpack_tb_per_s": 0.8, "expert_compute_efficiency": 0.8, "gap_us": 3.0}))
    engine = replace(engine, step_time=truth)
    run = play(build_script(load_personas("spoc"), 3), 12, engine=engine, duration_s=200)
    folder = tmp_path_factory.mktemp("run")
    write_table(folder / "requests.parquet", run.requests, REQUESTS)
    write_table(folder / "metrics.parquet", run.metrics, METRICS)
    return folder, engine, start, truth, run


def test_the_sums_over_a_request_match_the_twin_that_made_it(server):
    folder, engine, start, truth, _ = server
    run = read_run(folder / "requests.parquet", folder / "metrics.parquet", engine.model, 8192)
    errors = np.abs(run_errors(run, truth))
    assert np.nanmedian(errors, axis=0).max() < 0.01
    assert np.nanmedian(np.abs(run_errors(run, start)), axis=0).min() > 0.03


def test_the_command_finds_the_slower_kernels(server):
    folder, _, start, truth, _ = server
    done = subprocess.run(
        [sys.executable, "-m", "spoc_lib", "engine", "calibrate", "--requests", str(folder / "requests.parquet"),
         "--metrics", str(folder / "metrics.parquet"), "--gpu", "h100-sxm", "--gpus", "4", "--out",
         str(folder / "own.steptime.yaml")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = calibration_file.load(folder / "own.steptime.yaml")
    assert found.errors.held_out_time.tpot_percent < 2.5
    assert found.range.cached_prefix and found.range.gpu_counts == [4]
    for name in ("expert_compute_efficiency", "gap_us"):
        wrong, right = (abs(np.log(getattr(model.parameters, name) / getattr(truth.parameters, name)))
                        for model in (start, found))
        assert right < 0.5 * wrong


def test_other_peoples_traffic_is_refused(server):
    folder, engine, _, _, run = server
    few = run.requests.sort_values("send_s").iloc[::3]
    write_table(folder / "some.parquet", few, REQUESTS)
    with pytest.raises(InputError, match="others used it"):
        read_run(folder / "some.parquet", folder / "metrics.parquet", engine.model, 8192)
    with pytest.raises(InputError, match="at least 20"):
        write_table(folder / "few.parquet", run.requests.iloc[:5], REQUESTS)
        read_run(folder / "few.parquet", folder / "metrics.parquet", engine.model, 8192)
