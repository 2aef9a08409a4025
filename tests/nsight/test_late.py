"""A late rank and its GPU's clocks."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from spoc_lib.nsight import decompose
from spoc_lib.nsight.late import why_late

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
