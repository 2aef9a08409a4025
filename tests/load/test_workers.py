"""Workers that join a master, as from other machines: shares, one start, compared clocks, merged books."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from spoc_lib.core.errors import SpocError
from spoc_lib.load import FixedTurns, LoadPlan, run
from spoc_lib.load.clientcheck import paced_server
from spoc_lib.load.wire import ClockEstimate, packed, unpacked

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def plan_for(url: str, port: int, **more) -> LoadPlan:
    given = dict(base_url=url, model="paced", users=7, duration_s=4.0, processes=3, stop_timeout_s=3,
                 master=f"127.0.0.1:{port}", fixed=FixedTurns(output_tokens=20, think_time_s=0.2))
    return LoadPlan(**{**given, **more})


@pytest.fixture
def workers():
    """`workers(count, port)`: that many workers as processes; none survives the test."""
    started: list[subprocess.Popen] = []

    def start(count: int, port: int) -> list[subprocess.Popen]:
        for _ in range(count):
            started.append(subprocess.Popen([sys.executable, "-m", "spoc_lib.load.worker", "127.0.0.1", str(port)],
                                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_three_workers_are_one_rung(tmp_path, workers):
    port = free_port()
    with paced_server(0.05, 0.02, log=False) as url:
        joined = workers(3, port)
        result = run(plan_for(url, port), tmp_path)
    summary, requests = result.summary, result.requests
    assert summary["valid"], summary["invalid"]
    assert sorted(requests["user"].unique()) == list(range(7)) and requests["request"].is_unique
    assert summary["planned"] == summary["completed"] + summary["failed"] + summary["censored"] == len(requests)
    assert (result.chunks.groupby("request")["tokens"].sum() == 20).all()
    assert len(summary["workers"]) == 3
    assert all(abs(worker["clock_offset_s"]) < 0.05 for worker in summary["workers"])  # one host, one clock
    assert all(process.wait(15) == 0 for process in joined)


def test_a_lost_worker_is_reported_and_its_requests_censored(tmp_path, workers):
    port = free_port()
    with paced_server(0.05, 0.05, log=False) as url:
        joined = workers(2, port)

        def kill() -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:  # until the master has heard of requests of both
                heard = [path for path in tmp_path.glob("client-*/planned.jsonl") if path.stat().st_size]
                if len(heard) == 2:
                    break
                time.sleep(0.05)
            os.kill(joined[0].pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        result = run(plan_for(url, port, processes=2, users=4, duration_s=6.0, fixed=FixedTurns(output_tokens=40)),
                     tmp_path)
        killer.join()
    summary = result.summary
    assert summary["planned"] == summary["completed"] + summary["failed"] + summary["censored"]
    assert summary["lost_clients"] == 1 and not summary["valid"]
    lost = result.requests[result.requests["error_class"] == "client_lost"]
    assert len(lost) == 2 and lost["user"].nunique() == 2
    assert summary["completed"] > 4  # the other worker went on


def test_a_worker_whose_clock_is_hours_ahead_tells_times_of_ours(tmp_path):
    """A time namespace stands for a machine that was started earlier: its monotonic clock is its own."""
    ahead = ["unshare", "--time", "--monotonic", "5000", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*ahead, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no time namespaces here: 'unshare --time' is not allowed")
    port = free_port()
    joined = [subprocess.Popen([*before, sys.executable, "-m", "spoc_lib.load.worker", "127.0.0.1", str(port)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for before in (ahead, [])]
    try:
        with paced_server(0.05, 0.02, log=False) as url:
            began = time.monotonic()
            result = run(plan_for(url, port, processes=2, users=4, duration_s=2.0), tmp_path)
            ended = time.monotonic()
    finally:
        for process in joined:
            process.kill()
            process.wait()
    offsets = sorted(worker["clock_offset_s"] for worker in result.summary["workers"])
    assert offsets == pytest.approx([0, 5000], abs=0.05) and result.summary["valid"], result.summary["invalid"]
    for table, columns in ((result.requests, ["intended_send_s", "send_s", "first_token_s", "end_s"]),
                           (result.chunks, ["time_s"]), (result.metrics, ["time_s"])):
        assert table[columns].to_numpy().min() > began and table[columns].to_numpy().max() < ended
    assert (result.requests["ttft_s"] > 0.04).all() and (result.requests["ttft_s"] < 1).all()


def test_missing_workers_are_one_sentence(tmp_path):
    with paced_server(0.05, 0.02, log=False) as url, pytest.raises(SpocError) as caught:
        run(plan_for(url, free_port(), join_timeout_s=1.0), tmp_path)
    assert "0 of 3 workers joined" in str(caught.value) and caught.value.exit_status == 2


def test_clocks_and_tables_travel():
    import pyarrow as pa

    estimate = ClockEstimate()
    estimate.add(10.0, 110.6, 11.0)  # a slow echo
    estimate.add(20.0, 120.01, 20.02)  # a fast one: their clock is 100 s ahead
    assert estimate.offset_s == pytest.approx(100.0) and estimate.error_s == pytest.approx(0.01)
    table = pa.table({"request": [1], "send_s": [105.0], "ttft_s": [0.5], "end_s": pa.array([None], pa.float64())})
    back = unpacked(packed({"requests": table, "chunks": table[:0]}), 100.0)
    assert list(back) == ["requests"]
    assert back["requests"].to_pylist() == [{"request": 1, "send_s": 5.0, "ttft_s": 0.5, "end_s": None}]
