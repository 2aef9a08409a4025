"""A late rank and its GPU's clocks."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pandas as pd
import pytest

from spoc_lib.core.files import write_json
from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import write_table
from spoc_lib.nsight import decompose
from spoc_lib.nsight.late import why_late
from spoc_lib.pipeline.limit_trace import late_sentences

DEVICES = """
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, uuid TEXT);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL);
"""


@pytest.fixture
def late_trace(new_trace, kernel_names):
    """Two processes, each with device 0; process 200 runs on board 5 and is always late."""
    trace = new_trace()
    trace.database.executescript(DEVICES)
    for pid, board in ((100, 4), (200, 5)):
        trace.insert("TARGET_INFO_GPU", vmId=1, id=board, uuid=f"aaaa-{board}")
        trace.insert("TARGET_INFO_CUDA_DEVICE", gpuId=board, cudaId=0, pid=pid)
        for k in range(10):
            trace.kernel(kernel_names["comm"], k * 1000 + (400 if pid == 200 else 0), k * 1000 + 500, pid=pid)
    return decompose(trace.done())


def clocks(**mhz):
    rows = [{"source": "dcgm", "metric": "DCGM_FI_DEV_SM_CLOCK", "time_s": float(t), "value": float(value),
             "labels": json.dumps({"gpu": board.removeprefix("gpu"), "UUID": f"GPU-aaaa-{board.removeprefix('gpu')}"})}
            for board, value in mhz.items() for t in range(20)]
    return pd.DataFrame(rows)


def test_the_boards_are_told_by_uuid(late_trace):
    assert late_trace.metadata["uuids"] == {"100:0": "aaaa-4", "200:0": "aaaa-5"}
    assert late_trace.waiting.late == (200, 0)


def test_a_slow_clock_explains_the_late_rank(late_trace):
    said = why_late(late_trace, clocks(gpu4=1980, gpu5=1500), 0, 20)
    assert "GPU 0 of process 200" in said and "DCGM tells why" in said and "below the clock of its peers" in said


def test_a_clock_that_keeps_up_points_at_the_host(late_trace):
    assert "host process" in why_late(late_trace, clocks(gpu4=1980, gpu5=1980), 0, 20)


def test_missing_metrics_are_said(late_trace):
    assert "no DCGM metrics" in why_late(late_trace, clocks(gpu0=1980, gpu1=1500), 0, 20)


def test_a_run_explains_a_late_rank_from_what_it_recorded_around_the_capture(late_trace, tmp_path):
    """The stage's door: capture.json tells the window, metrics.parquet the clocks; without a capture, nothing."""
    stage = SimpleNamespace(folder=tmp_path, cluster=SimpleNamespace(simulated=False))
    assert late_sentences(stage, late_trace) == []
    folder = tmp_path / "capture"
    folder.mkdir()
    write_json(folder / "capture.json", {"window_s": [0.0, 20.0]})
    write_table(folder / "metrics.parquet", clocks(gpu4=1980, gpu5=1500), METRICS)
    (said,) = late_sentences(stage, late_trace)
    assert "GPU 0 of process 200" in said and "DCGM tells why" in said
    assert late_sentences(SimpleNamespace(folder=tmp_path, cluster=SimpleNamespace(simulated=True)), late_trace) == []


def test_without_a_uuid_the_boards_are_joined_by_index_and_that_is_said(new_trace, kernel_names):
    trace = new_trace()
    for device in range(2):
        for k in range(10):
            trace.kernel(kernel_names["comm"], k * 1000 + 400 * device, k * 1000 + 500, device=device)
    found = decompose(trace.done())
    assert found.waiting.late == (100, 1)
    assert "joined by index" in why_late(found, clocks(gpu0=1980, gpu1=1500), 0, 20)


def test_nobody_late_needs_no_explanation(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    assert "nothing to explain" in why_late(decompose(trace.done()), clocks(gpu0=1980), 0, 20)
