"""What is seen while a rung runs: the progress line of a terminal, and Locust's own page."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import sys
import time
import urllib.request

import orjson
import pytest

from spoc_lib.load.clientcheck import paced_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url():
    with paced_server(0.05, 0.01, log=False) as base_url:
        yield base_url


def words(url: str, folder, *more: str) -> list[str]:
    return [sys.executable, "-m", "spoc_lib", "load", "run", "--base-url", url, "--users", "3", "--personas", "tiny",
            "--gap-cap", "0.1", "--out", str(folder), *more]


def test_a_terminal_shows_a_bar_with_live_p95s_and_a_pipe_shows_none(url, tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(words(url, tmp_path, "--duration", "3"), stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is gone when its last writer is
        while piece := os.read(ours, 4096):
            shown += piece
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    lines = [line for line in shown.decode().split("\r") if line.startswith("[")]
    assert process.returncode == 0 and 2 <= len(lines) <= 8  # once a second, not once a token
    assert "live 3" in lines[-1] and "TTFT p95" in lines[-1] and " ms" in lines[-1]
    assert shown.endswith(b" \r")  # wiped: what follows is the report
    assert b"TTFT p95" not in out
    silent = subprocess.run(words(url, tmp_path, "--duration", "1"), capture_output=True, text=True, check=True)
    assert silent.stderr == ""


@pytest.mark.chaos
def test_locusts_page_counts_whole_answers_by_persona(url, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = subprocess.run(words(url, tmp_path, "--ui", str(port)), capture_output=True, text=True, check=False)
        assert taken.returncode == 2 and f"port {port} of 127.0.0.1" in taken.stderr
    process = subprocess.Popen(words(url, tmp_path, "--duration", "6", "--ui", str(port)), stdout=subprocess.DEVNULL)
    rows: list[dict] = []
    while process.poll() is None and not any(row["num_requests"] > 5 for row in rows):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/stats/requests",
                                                                 timeout=5) as page:
            rows = orjson.loads(page.read())["stats"]
        time.sleep(0.1)
    assert process.wait(60) == 0
    personas = {row["name"] for row in rows if row["method"] == "answer"}
    assert personas and personas <= {"T0", "T1"} and all(row["num_failures"] == 0 for row in rows)
    assert min(row["avg_response_time"] for row in rows if row["num_requests"]) > 60  # the whole answer, not its head
