"""The server under test killed, hung, restarted, answering 500 or garbage, cutting its streams; its telemetry gone; a
client killed. Every request stays in the books, the rung says what happened, and no such rung counts as met."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time

import pandas as pd
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Proxy:
    """A server between client and engine that does as told for every POST: pass | 500 | garbage | cut | hang."""

    def __init__(self, port: int) -> None:
        self.to, self.mode = port, "pass"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.to)) as engine:
            threading.Thread(target=self._back, args=(engine, client), daemon=True).start()
            while data := _read(client):
                mode = self.mode if data.startswith(b"POST") else "pass"
                if mode == "500":
                    client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\n{}")
                elif mode == "garbage":
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 40\r\n\r\n"
                                   + b"data: \xff\x00{]]\n\n".ljust(40, b"\x80"))
                elif mode == "hang":
                    time.sleep(30)
                    return
                else:
                    engine.sendall(data)

    def _back(self, engine: socket.socket, client: socket.socket) -> None:
        while data := _read(engine):
            try:
                if self.mode == "cut" and b"data:" in data:
                    client.sendall(data[: len(data) // 2])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)
            except OSError:
                return


def _read(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


@pytest.fixture
def engine(place):
    """`engine()`: (process, port) of the embedded engine with the tiny model; `engine(port)`: on that port again."""
    place.tiny_model("engine", {"kind": "embedded", "served_model": "m"})
    started = []

    def serve(port: int = 0):
        ready = place.folder / "ready.json"
        ready.unlink(missing_ok=True)
        process = place.start("engine", "serve", "--cluster", "engine.yaml", "--port", str(port), "--ready-file",
                              str(ready))
        started.append(process)
        assert place.wait(ready.exists, 200)
        return process, int(json.loads(ready.read_text())["base_url"].rpartition(":")[2])

    yield serve
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def load(place, port: int, *more: str, seconds: float = 6):
    """`spoc load run` with eight users, not waited for."""
    return place.start("load", "run", "--base-url", f"http://127.0.0.1:{port}", "--model", "m", "--users", "8",
                       "--duration", str(seconds), "--personas", "tiny", "--gap-cap", "0.3", "--stop-timeout", "2",
                       "--out", "rung", "--json", "rung.json", *more)


def under_way(place) -> bool:
    """Requests are being sent."""
    return any(path.stat().st_size > 500 for path in place.folder.glob("rung/client-*/planned.jsonl"))


def settled(place, process) -> tuple[dict, pd.DataFrame]:
    """The summary and the requests of a rung, its books closed."""
    out, said = process.communicate(timeout=400)
    assert "Traceback" not in said, said
    rung = json.loads((place.folder / "rung.json").read_text())
    requests = pd.read_parquet(place.folder / "rung" / "requests.parquet")
    assert rung["planned"] == rung["completed"] + rung["failed"] + rung["censored"] == len(requests)
    assert requests["request"].is_unique
    place.whole(place.folder / "rung")
    return rung, requests


def test_the_server_is_killed_under_load(place, engine):
    server, port = engine()
    process = load(place, port)
    assert place.wait(lambda: under_way(place), 200)
    assert place.listening() == {"127.0.0.1"}, "engine, its GPU page and the client: on loopback all of them"
    time.sleep(1.5)
    server.kill()
    rung, requests = settled(place, process)
    assert rung["failed"] > 0 and rung["errors"]
    assert rung["ttft_s"]["p99"] == "inf", "failures stay in the percentiles"


@pytest.mark.chaos
def test_the_server_is_restarted_under_load(place, engine):
    server, port = engine()
    process = load(place, port, seconds=12)
    assert place.wait(lambda: under_way(place), 200)
    time.sleep(1.5)
    server.kill()
    server.communicate()
    engine(port)
    rung, requests = settled(place, process)
    assert rung["failed"] > 0 and rung["errors"]
    last_failure = requests.loc[requests["outcome"] == "failed", "send_s"].max()
    assert rung["ttft_s"]["p99"] == "inf" or rung["window"]["start_s"] > last_failure, "infinite, or not in the window"
    assert (requests["outcome"].eq("completed") & requests["send_s"].gt(last_failure)).any(), "it went on afterwards"


@pytest.mark.chaos
def test_the_server_hangs_for_good(place, engine):
    server, port = engine()
    process = load(place, port, "--idle-timeout", "1.5")
    assert place.wait(lambda: under_way(place), 200)
    time.sleep(1.5)
    server.send_signal(signal.SIGSTOP)
    rung, requests = settled(place, process)
    assert rung["failed"] > 0 and "timeout" in rung["errors"]
    assert rung["ttft_s"]["p99"] == "inf"


@pytest.mark.chaos
def test_500_garbage_and_cut_streams_in_turn(place, engine):
    _, port = engine()
    proxy = Proxy(port)
    process = load(place, proxy.port, seconds=9)
    assert place.wait(lambda: under_way(place), 200)
    time.sleep(1)
    for mode in ("500", "garbage", "cut"):
        proxy.mode = mode
        time.sleep(1.2)
        proxy.mode = "pass"
        time.sleep(0.7)
    rung, requests = settled(place, process)
    proxy.close()
    assert {"http_500", "bad_event", "cut"} <= set(rung["errors"]), rung["errors"]
    assert rung["failed"] == sum(rung["errors"].values()) and rung["completed"] > 0


@pytest.mark.chaos
def test_a_locust_process_is_killed(place, engine):
    _, port = engine()
    process = load(place, port, "--processes", "2")
    assert place.wait(lambda: under_way(place), 200)
    time.sleep(1.5)
    os.kill(place.find("spoc_lib.load.child"), signal.SIGKILL)
    rung, requests = settled(place, process)
    assert process.returncode == 1 and not rung["valid"]
    assert any("client" in sentence for sentence in rung["invalid"]), rung["invalid"]
    assert (requests["error_class"] == "client_lost").any()


def command(place) -> dict:
    """A process engine as a user would describe it: the embedded engine behind a command line."""
    inner = place.tiny_model("inner", {"kind": "embedded", "served_model": "m"})
    return {"kind": "process", "served_model": "m", "startup_timeout_s": 60,
            "command": [sys.executable, "-m", "spoc_lib", "engine", "serve", "--cluster", inner]}


def serving(place) -> int:
    """The engine's own process, not its guard."""
    found = [pid for pid, words in place.processes().items() if "engine serve" in words and "guard.py" not in words]
    return found[0]


@pytest.mark.chaos
def test_an_engine_killed_in_mid_sweep_fails_the_stage_with_its_cause_and_rungs_are_kept(place):
    cluster = place.tiny_model("own", command(place))
    first = place.outputs / "r" / "sweep" / "rungs" / "00" / "rung.json"
    process = place.start("run", cluster, "--profile", "tiny.yaml", "--run-id", "r", "--only", "03")
    assert place.wait(first.exists, 120)
    time.sleep(3)
    os.kill(serving(place), signal.SIGKILL)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 1 and "died" in said and "Traceback" not in said, said
    assert place.stage("r", "03") == "failed"
    place.no_orphans()
    place.whole()
    kept = first.stat().st_mtime_ns
    place.spoc("run", cluster, "--run-id", "r", "--resume", "--only", "03", timeout=400)
    assert first.stat().st_mtime_ns == kept and place.stage("r", "03") == "done"
    rungs = pd.read_parquet(place.outputs / "r" / "sweep" / "rungs.parquet")
    assert (rungs["planned"] == rungs["completed"] + rungs["failed"] + rungs["censored"]).all()


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["500", "garbage", "cut", "hang"])
def test_a_sweep_over_a_broken_server_never_says_that_users_were_held(place, engine, mode):
    _, port = engine()
    proxy = Proxy(port)
    cluster = place.tiny_model("far", {"kind": "remote", "base_url": f"http://127.0.0.1:{proxy.port}"})
    process = place.start("run", cluster, "--profile", "tiny.yaml", "--run-id", "r", "--only", "03")
    assert place.wait(lambda: (place.outputs / "r" / "sweep" / "rungs" / "00").exists(), 120)
    proxy.mode = mode
    out, said = process.communicate(timeout=500)
    proxy.close()
    assert "Traceback" not in said, said
    answer = place.outputs / "r" / "sweep" / "capacity.json"
    if answer.exists():
        found = json.loads(answer.read_text())
        assert not found["max_users"], found
        rungs = pd.read_parquet(place.outputs / "r" / "sweep" / "rungs.parquet")
        assert not (rungs["verdict"] == "met").any()
    else:
        assert process.returncode != 0 and said.strip(), "a stage without an answer says why"
    place.whole()


@pytest.mark.chaos
def test_prometheus_is_down_and_dcgm_too_and_the_run_says_so(place, engine):
    _, port = engine()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        closed = nobody.getsockname()[1]
        cluster = place.tiny_model(
            "far", {"kind": "remote", "base_url": f"http://127.0.0.1:{port}"},
            telemetry={"prometheus_url": f"http://127.0.0.1:{closed}", "dcgm_url": f"http://127.0.0.1:{closed}/metrics"})
        checked = place.spoc("check", cluster)
        assert "prometheus" in checked.stdout.lower() and "costs" in checked.stdout
        place.spoc("run", cluster, "--profile", "tiny.yaml", "--run-id", "r", "--only", "03", timeout=400)
    problems = " ".join(place.answer("r")["problems"])
    assert "failed" in problems and str(closed) in problems, problems
    place.whole()
