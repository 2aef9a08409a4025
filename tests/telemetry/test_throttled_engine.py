"""A GPU of the embedded engine overheats while Locust-like clients stream: the recorder's table shows which one."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from spoc_lib.telemetry.recorder import Recorder
from spoc_lib.telemetry.straggler import find_stragglers

pytestmark = [pytest.mark.slow, pytest.mark.alone]
THROTTLED_AT_S = 2.0


@pytest.fixture
def engine(tmp_path):
    ready = tmp_path / "ready.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "spoc_lib", "engine", "serve", "--cluster", "sim-4xh100", "--port", "0", "--dcgm-port",
         "0", "--throttle", f"gpu=2,at={THROTTLED_AT_S},factor=0.7", "--ready-file", str(ready)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < until and process.poll() is None:
        time.sleep(0.1)
    yield json.loads(ready.read_text())
    process.terminate()
    process.wait(20)


def stream(base_url: str, until: float) -> None:
    parts = urlsplit(base_url)
    while time.monotonic() < until:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
        body = {"model": "gpt-oss-120b", "prompt": "x = 1\n" * 50, "max_tokens": 200, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()
        connection.close()


def test_the_hot_gpu_is_named_within_ten_seconds(engine, tmp_path):
    dcgm_url = engine["dcgm_url"] if engine["dcgm_url"].endswith("/metrics") else engine["dcgm_url"] + "/metrics"
    began = time.monotonic()
    with Recorder(engine["base_url"] + "/metrics", dcgm_url, tmp_path / "m.parquet") as recorder, \
            concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(stream, engine["base_url"], began + THROTTLED_AT_S + 10) for _ in range(2)]:
            done.result()
    report = find_stragglers(recorder.metrics, recorder.started_s, recorder.ended_s)
    (found,) = report.stragglers
    assert report.gpus == 4 and found.clock_deficit_ratio == pytest.approx(0.3, abs=0.05)
    assert found.reasons and found.detected_s - began <= THROTTLED_AT_S + 10
    clocks = recorder.metrics[recorder.metrics["metric"] == "DCGM_FI_DEV_SM_CLOCK"]
    indices = {labels["UUID"]: labels["gpu"] for labels in map(json.loads, clocks["labels"].unique())}
    assert indices[found.gpu] == "2"
