"""However a rung ends, its books balance: Ctrl-C, a killed client, a killed parent, a dead server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import orjson
import pytest

from spoc_lib.load import FixedTurns, LoadPlan, read_run, run
from spoc_lib.load.clientcheck import paced_server
from spoc_lib.load.runner import describe

pytestmark = pytest.mark.slow


def balanced(summary: dict) -> bool:
    return summary["planned"] == summary["completed"] + summary["failed"] + summary["censored"] > 0


def plan_for(url: str, **more) -> LoadPlan:
    given = dict(base_url=url, model="paced", users=6, duration_s=20.0, stop_timeout_s=2,
                 fixed=FixedTurns(output_tokens=120))
    return LoadPlan(**{**given, **more})


def client_pids(folder: Path) -> list[int]:
    """Client processes of a rung, found by their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"spoc_lib.load.child" in words and any(word.startswith(bytes(folder)) for word in words):
            found.append(int(entry.parent.name))
    return found


def wait_for_tokens(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(list(folder.glob(f"client-*/{name}.parquet.parts/*.parquet")) for name in ("partial", "chunks")):
            return
        time.sleep(0.1)
    raise AssertionError("no stream was seen")


@pytest.fixture(scope="module")
def paced():
    with paced_server(0.05, 0.05, log=False) as url:
        yield url


def test_a_killed_client_loses_a_second_of_chunks_and_no_request(paced, tmp_path):
    def kill() -> None:
        wait_for_tokens(tmp_path)
        time.sleep(2)
        for pid in client_pids(tmp_path):
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = run(plan_for(paced), tmp_path)
    killer.join()
    assert balanced(result.summary)
    assert (result.summary["lost_clients"], result.summary["valid"]) == (1, False)
    assert set(result.requests["error_class"]) == {"client_lost"}
    assert result.requests["chunks"].min() > 20  # streams of 20 tokens/s, open for over two seconds
    assert result.requests["ttft_s"].notna().all()
    assert len(result.chunks) == result.requests["chunks"].sum()


def start(url: str, folder: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "spoc_lib", "load", "run", "--base-url", url, "--users", "5",
                             "--duration", "30", "--personas", "tiny", "--out", str(folder), "--json", "-", *more],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("more", [(), ("--ramp", "20")])
def test_ctrl_c_closes_the_books(paced, tmp_path, more):
    process = start(paced, tmp_path, *more)
    wait_for_tokens(tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    summary = orjson.loads(out)
    assert balanced(summary) and summary["interrupted"] and process.returncode == 1
    assert b"Traceback" not in err and b"Warning" not in err
    assert not client_pids(tmp_path)
    read = read_run(tmp_path)  # null where the JSON has no figure: within the ramp there is no window
    assert describe(read.summary).startswith("5 users")


@pytest.mark.parametrize("signals", [
    [signal.SIGINT] * 3, pytest.param([signal.SIGTERM], marks=pytest.mark.chaos),
    pytest.param([signal.SIGTERM, signal.SIGINT], marks=pytest.mark.chaos)])
def test_impatience_and_a_scheduler_close_the_books_too(paced, tmp_path, signals):
    process = start(paced, tmp_path)
    wait_for_tokens(tmp_path)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1)
    out, err = process.communicate(timeout=30)
    assert b"Traceback" not in err and process.returncode == 1
    summary = orjson.loads(out)
    assert balanced(summary) and summary["interrupted"] and not client_pids(tmp_path)


def test_a_folder_whose_client_never_opened_its_books_can_be_read(tmp_path):
    (tmp_path / "client-0").mkdir()
    (tmp_path / "client-0" / "client.log").touch()
    (tmp_path / "plan.json").write_text(plan_for("http://127.0.0.1:1").model_dump_json())
    assert read_run(tmp_path).summary["planned"] == 0


def test_a_killed_parent_leaves_no_client_and_its_books_can_be_settled(paced, tmp_path):
    process = start(paced, tmp_path)
    wait_for_tokens(tmp_path)
    process.kill()
    process.communicate(timeout=10)
    deadline = time.monotonic() + 15
    while client_pids(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not client_pids(tmp_path)
    result = read_run(tmp_path)
    assert balanced(result.summary) and result.summary["interrupted"]
    assert balanced(read_run(tmp_path).summary)  # and read again


@pytest.mark.chaos
def test_a_full_disk_ends_the_rung_at_once_in_one_sentence(paced, tmp_path):
    """Not at the end of its duration: what is not written down does not count."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True,
                             text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here (root is needed): {mounted.stderr.strip()}")
    try:
        process = start(paced, tmp_path / "rung")
        wait_for_tokens(tmp_path / "rung")
        with open(tmp_path / "ballast", "wb", 0) as ballast, pytest.raises(OSError, match="No space left"):
            while True:
                ballast.write(bytes(4096))
        _, err = process.communicate(timeout=15)
        assert process.returncode == 1 and b"no space is left on the disk" in err
        assert len(err.strip().splitlines()) == 1 and not client_pids(tmp_path)
    finally:
        process.kill()
        process.wait()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_server_that_dies_is_counted_not_fatal(tmp_path):
    with paced_server(0.05, 0.02, log=False) as url:
        port = url.rsplit(":", 1)[1]

        def kill() -> None:
            asked, deadline = tmp_path / "client-0" / "planned.jsonl", time.monotonic() + 60
            while (not asked.exists() or asked.read_bytes().count(b"\n") < 6) and time.monotonic() < deadline:
                time.sleep(0.02)  # four users asked, two of them again: they were answered
            os.kill(server_pid(port), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        result = run(plan_for(url, duration_s=4.0, users=4, fixed=FixedTurns(output_tokens=20)), tmp_path)
        killer.join()
    summary = result.summary
    assert balanced(summary) and summary["completed"] > 0
    assert set(summary["errors"]) <= {"cut", "refused"} and summary["errors"]["refused"] >= 4
    assert summary["failed"] < 40  # users of a dead server pause ever longer: no flood


def server_pid(port: str) -> int:
    """The process that listens on `port`."""
    inode = next(line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                 if line.split()[1].endswith(f":{int(port):04X}") and line.split()[3] == "0A")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == f"socket:[{inode}]":
                return int(link.parts[2])
        except OSError:
            continue
    raise AssertionError("nobody listens")
