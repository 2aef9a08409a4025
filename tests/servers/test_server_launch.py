"""Launches with real processes: ready, refused, killed, orphaned, remote."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.servers import LaunchFailure, launch
from spoc_lib.servers.gpu_processes import GpuMemoryHeld, gpu_memory_holders, prove_gpu_free, session_members
from spoc_lib.servers.process import GuardedProcess, free_port, port_is_free, prove_port_free, quarantined


def cluster(folder: Path, **changes) -> Cluster:
    """The tiny model as an embedded engine; `changes` of its engine."""
    spec = {
        "name": "here", "title": "launch tests", "hardware": {"gpu": "h100-sxm", "count": 1},
        "engine": {"kind": "embedded", "served_model": "m", "startup_timeout_s": 60} | changes, "model": "tiny-moe",
        "personas": "tiny", "ladder": {"users": [1]}, "slos": [{"metric": "ttft", "limit_s": 1.0}],
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec))
    return load_cluster(str(path))


def engine_command(folder: Path) -> list[str]:
    """An engine that a user would start by a command of their own."""
    cluster(folder)
    inner = folder / "inner.yaml"
    (folder / "spec.yaml").rename(inner)
    return [sys.executable, "-m", "spoc_lib", "engine", "serve", "--cluster", str(inner)]


#: An engine that wants a key of everybody who asks more than its health, as vLLM does with VLLM_API_KEY set.
LOCKED = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer " + os.environ["VLLM_API_KEY"]
        self.send_response(200 if self.path == "/health" or known else 401)
        self.send_header("Content-Length", "22")
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}'[:22])
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def gone(pid: int, within_s: float = 15.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_embedded_engine_comes_up_with_flags_and_leaves_evidence_and_a_free_port(tmp_path):
    with launch(cluster(tmp_path), {"max_num_seqs": 7}, tmp_path / "run") as server:
        port = int(server.base_url.rpartition(":")[2])
        assert server.alive and server.simulated and server.version == "0.32.0"
        assert (server.model, server.max_model_len, server.flags["max_num_seqs"]) == ("m", 4096, 7)
        assert server.passport["simulated"] is True
        assert not port_is_free(port)
        assert server.drain(1.0)
        pid = server.process.pid
    assert gone(pid) and port_is_free(port)
    evidence = json.loads((tmp_path / "run" / "launch.json").read_text())
    assert "--max-num-seqs 7" in evidence["command"] and evidence["startup_s"] > 0
    assert (tmp_path / "run" / "server.log").read_text()


def test_process_engine_gets_a_port_of_its_own(tmp_path):
    spec = cluster(tmp_path, kind="process", command=engine_command(tmp_path), environment={"SPOC_UNUSED": "hidden"})
    with launch(spec, {"max_num_seqs": 9}, tmp_path / "run") as server:
        assert server.dcgm_url is None
        assert server.model == "m"
    text = (tmp_path / "run" / "launch.json").read_text()
    assert "SPOC_UNUSED" in text and "hidden" not in text


def test_bad_flags_are_quoted_from_the_log(tmp_path):
    with pytest.raises(LaunchFailure) as caught, launch(cluster(tmp_path), {"nonsense": 3}, tmp_path / "run"):
        pass
    assert caught.value.failure_class == "bad-flags"
    assert "unknown flag 'nonsense'" in caught.value.line


def test_unknown_command(tmp_path):
    spec = cluster(tmp_path, kind="process", command=["no-such-engine"])
    with pytest.raises(LaunchFailure, match="'no-such-engine' is not there") as caught, launch(spec, {}, tmp_path):
        pass
    assert caught.value.failure_class == "command-not-found"


def test_a_busy_port_that_was_asked_for_is_refused_and_not_retried(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchFailure) as caught, launch(cluster(tmp_path), {}, tmp_path / "run", port=port):
            pass
    assert caught.value.failure_class == "port-busy"


def test_a_port_lost_in_the_race_is_replaced(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr("spoc_lib.servers.lifecycle.free_port", lambda: next(ports))
        spec = cluster(tmp_path, kind="process", command=engine_command(tmp_path))
        with launch(spec, {}, tmp_path / "run") as server:
            assert not server.base_url.endswith(f":{taken.getsockname()[1]}")
    assert "Address already in use" in (tmp_path / "run" / "server.attempt1.log").read_text()


def test_startup_timeout_says_what_was_waited_for(tmp_path):
    spec = cluster(tmp_path, kind="process", startup_timeout_s=1.0,
                   command=[sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(60)"])
    began = time.monotonic()
    with pytest.raises(LaunchFailure, match="not ready within 1 s") as caught, launch(spec, {}, tmp_path / "run"):
        pass
    assert caught.value.failure_class == "startup-timeout" and caught.value.line == "loading"
    assert time.monotonic() - began < 20


def test_an_engine_killed_in_mid_run_is_told_with_its_cause(tmp_path):
    with pytest.raises(LaunchFailure, match="died") as caught, launch(cluster(tmp_path), {}, tmp_path) as server:
        server.check()
        os.kill(server.process.pid, signal.SIGKILL)
        assert gone(server.process.pid)
        for _ in range(200):
            if not server.alive:
                break
            time.sleep(0.02)
        raise ConnectionError("what a client sees")
    assert caught.value.failure_class == "crash" and "SIGKILL" in caught.value.message
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_an_error_of_the_block_is_not_hidden_and_the_engine_goes(tmp_path):
    with pytest.raises(ZeroDivisionError), launch(cluster(tmp_path), {}, tmp_path / "run") as server:
        pid = server.process.pid
        raise ZeroDivisionError
    assert gone(pid)


PARENT = """
import sys, time
from pathlib import Path
from spoc_lib.config import load_cluster
from spoc_lib.servers import launch
with launch(load_cluster(sys.argv[1]), {}, Path(sys.argv[2])) as server:
    print(server.process.pid, server.base_url.rpartition(":")[2], flush=True)
    time.sleep(60)
"""


def test_no_orphan_when_the_parent_is_killed(tmp_path):
    cluster(tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "spec.yaml"), str(tmp_path / "run")],
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid, port = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.wait(20)
    parent.stdout.close()
    assert gone(pid)
    prove_port_free(port)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_whole_tree_goes_even_if_it_ignores_sigterm_and_left_the_group(tmp_path):
    log = tmp_path / "log"
    process = GuardedProcess([sys.executable, "-c", STUBBORN], log, grace_s=0.3)
    for _ in range(200):
        if log.exists() and log.read_text().strip():
            break
        time.sleep(0.02)
    child = int(log.read_text())
    began = time.monotonic()
    process.stop()
    assert time.monotonic() - began < 10
    assert gone(process.pid) and gone(child)
    assert process.exit_status == 128 + signal.SIGKILL


def test_a_forked_child_that_holds_the_lifeline_does_not_delay_the_end(tmp_path):
    process = GuardedProcess([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    began = time.monotonic()
    process.stop()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert time.monotonic() - began < 15 and gone(process.pid)


def test_cleanup_commands_run_whatever_happened(tmp_path):
    mark = tmp_path / "mark"
    process = GuardedProcess([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log",
                             cleanup=[["touch", str(mark)], ["no-such-command"]])
    for _ in range(500):
        if not process.alive:
            break
        time.sleep(0.02)
    process.stop()
    assert process.exit_status == 3 and mark.exists()


def test_gpu_memory_must_be_free_after_the_end(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"  # a machine with GPUs, as far as the question goes
    tool.write_text(f"#!/bin/sh\necho {os.getpid()}\necho 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_memory_holders() == {os.getpid(), 1}
    prove_gpu_free({2})
    with pytest.raises(GpuMemoryHeld, match=str(os.getpid())):
        prove_gpu_free({os.getpid()}, within_s=0.0)
    assert os.getpid() in session_members(os.getsid(0))


def test_a_port_that_stays_taken_is_quarantined():
    from spoc_lib.servers import TeardownFailure

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TeardownFailure, match=str(port)):
            prove_port_free(port, within_s=0.2)
    assert port in quarantined
    quarantined.discard(port)


def test_remote_is_checked_never_started_and_its_flags_are_fixed(tmp_path):
    with launch(cluster(tmp_path), {}, tmp_path / "there") as server:
        remote = cluster(tmp_path, kind="remote", base_url=server.base_url + "/v1")
        with launch(remote, {}, tmp_path / "run") as seen:
            assert (seen.model, seen.log_path, seen.alive) == ("m", None, True)
        with pytest.raises(InputError, match="max_num_seqs cannot be set"), launch(
                remote, {"max_num_seqs": 3}, tmp_path / "run"):
            pass
        other = cluster(tmp_path, kind="remote", base_url=server.base_url, served_model="another")
        with pytest.raises(InputError, match="serves m, not another"), launch(other, {}, tmp_path / "run"):
            pass
    with pytest.raises(InputError, match="is not ready: no answer from"), launch(remote, {}, tmp_path / "run"):
        pass


def test_an_engine_that_wants_a_key_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "sk-of-the-engine")
    spec = cluster(tmp_path, kind="process", command=[sys.executable, "-c", LOCKED])
    started = time.monotonic()
    with pytest.raises(InputError, match=r"models answers 401 \(name the variable .* in api_key_env\)"), \
            launch(spec, {}, tmp_path / "run"):
        pass
    assert time.monotonic() - started < 30 and spec.engine.startup_timeout_s == 60
