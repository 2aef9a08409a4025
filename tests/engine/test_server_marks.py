"""A real capture of the running server: nsys, where it is installed, finds the engine's steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version

import pytest

from spoc_lib.nsight import nvtx
from spoc_lib.nsight.nsysrep import find_importer
from spoc_lib.nsight.trace import open_source

TOKENS = 12


@pytest.mark.slow
def test_each_step_of_the_server_is_a_range(tmp_path):
    nsys = shutil.which("nsys")
    if nsys is None:
        pytest.skip("nsys is not installed (Debian: nsight-systems in non-free)")
    report, ready = tmp_path / "server", tmp_path / "ready.json"
    process = subprocess.Popen(
        [nsys, "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", f"--output={report}", sys.executable,
         "-m", "spoc_lib", "engine", "serve", "--cluster", "sim-4xh100", "--ready-file", str(ready)],
        stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        served = json.loads(ready.read_text())
        request = urllib.request.Request(
            served["base_url"] + "/v1/completions", headers={"Content-Type": "application/json"},
            data=json.dumps({"prompt": "import os", "max_tokens": TOKENS, "ignore_eos": True}).encode())
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            assert answer.status == 200
        os.kill(served["pid"], signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    captured = next((p for s in ("nsys-rep", "qdstrm") if (p := report.with_suffix(f".{s}")).exists()), None)
    assert captured is not None
    if captured.suffix == ".qdstrm" and find_importer() is None:
        pytest.skip("nsys left a .qdstrm and QdstrmImporter is not installed")
    with open_source(captured) as source:
        ranges = nvtx.read_ranges(source)
    if not ranges and tuple(map(int, version("nvtx").split(".")[:3])) >= (0, 2, 12):
        pytest.skip(f"nvtx {version('nvtx')} loses its ranges under this old nsys; 0.2.11 keeps them")
    steps = [step for one in ranges if nvtx.is_step(one.text) and (step := nvtx.parse_step(one.text))["tokens"]]
    assert [step["phase"] for step in steps] == ["prefill"] + ["decode"] * (TOKENS - 1)
