"""The client processes as their parent sees them: started together, watched, told to stop, always reaped."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from spoc_lib.core.errors import InputError, SpocError

#: A child that says nothing for so long while it prepares is stuck.
SILENCE_S = 120.0


def need_ports(first: int, count: int) -> None:
    """InputError when one of these ports of 127.0.0.1 is taken: Locust would do without its page, and say nothing."""
    for port in range(first, first + count):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError) as error:
            raise InputError("port-taken", f"Locust's web page cannot have port {port} of 127.0.0.1 ({error}): choose "
                             "another as 'ui_port' (--ui)") from error


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Another Ctrl-C, or a scheduler's SIGTERM that is taken for one, does nothing meanwhile: closing the books is
    bounded, and must not be cut short. In other threads than the main one no signal arrives."""
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    numbers = [number for number in signals if signal.getsignal(number) is signal.default_int_handler]
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)


class Client:
    """One child process. `last` holds its latest line of each kind, by event name."""

    def __init__(self, command: list[str], folder: Path, number: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.number, self.folder = number, folder
        self.last: dict[str, dict[str, Any]] = {}
        self._log = open(folder / "client.log", "wb")  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, start_new_session=True)
        assert self.process.stdin is not None and self.process.stdout is not None  # both are pipes
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._partial = b""

    def read(self) -> list[dict[str, Any]]:
        """The whole lines that have come; at the end of the stream the rest."""
        try:
            data = self.output.read()
        except BlockingIOError:
            return []
        *lines, self._partial = (self._partial + (data or b"")).split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"{"):
                event = orjson.loads(line)
                self.last[event["event"]] = event
                events.append(event)
        return events

    def go(self, start_s: float) -> None:
        """Name the start of the rung; a child that died meanwhile is found by `poll`."""
        with contextlib.suppress(BrokenPipeError):
            self.input.write(orjson.dumps({"start_s": start_s}) + b"\n")
            self.input.flush()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the client and its children."""
        with contextlib.suppress(BrokenPipeError):
            self.input.close()  # ends a child that still waits for its start
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Close its pipes and its log."""
        self.output.close()
        with contextlib.suppress(BrokenPipeError):
            self.input.close()
        self._log.close()

    def log_tail(self) -> str:
        """Why the child ended: what it said itself, else the last line of its log."""
        if "failed" in self.last:
            return str(self.last["failed"]["message"])
        lines = (self.folder / "client.log").read_text("utf-8", "replace").strip().splitlines()
        return lines[-1][:300] if lines else "it left no message"


class Clients:
    """All client processes of a rung on this machine; with `master`, one that stands for workers elsewhere."""

    def __init__(self, plan_path: Path, folder: Path, folders: list[Path], master: bool) -> None:
        if master:
            self.all = [Client(["spoc_lib.load.master", str(plan_path), str(folder)], folder, 0)]
        else:
            self.all = [Client(["spoc_lib.load.child", str(plan_path), str(own), str(number)], own, number)
                        for number, own in enumerate(folders)]

    def events(self, deadline_s: float, wait_s: float = 0.25) -> Iterator[dict[str, Any] | None]:
        """Events of any child as they come, None at least every `wait_s`; ends when all have ended or at the
        deadline (monotonic)."""
        with selectors.DefaultSelector() as selector:
            for client in self.all:
                if not client.output.closed:
                    selector.register(client.output, selectors.EVENT_READ, client)
            while time.monotonic() < deadline_s:
                ended = [client.process.poll() is not None for client in self.all]
                for key, _ in selector.select(0 if all(ended) else wait_s):
                    for event in key.data.read():
                        yield {**event, "client": key.data.number}
                    if key.data.process.poll() is not None:
                        selector.unregister(key.fileobj)
                if all(ended):
                    return
                yield None

    def prepared(self) -> None:
        """Wait until every child has prepared; SpocError when one refuses, dies or falls silent first."""
        heard = time.monotonic()
        for event in self.events(float("inf")):
            if event is not None:
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE_S:
                raise SpocError("client-stuck", f"a load client prepared for {SILENCE_S:g} s without a sign of life")
            if all("prepared" in client.last for client in self.all):
                return
            if any(client.process.poll() is not None for client in self.all):
                break
        for client in self.all:
            client.read()
            if "refused" in client.last:
                raise self._refusal(client.last["refused"])
        dead = next(client for client in self.all if client.process.poll() is not None)
        raise SpocError("client-died", f"a load client ended before it started: {dead.log_tail()}")

    @staticmethod
    def _refusal(event: dict[str, Any]) -> SpocError:
        error = SpocError(event["code"], event["message"])
        error.exit_status = event["status"]
        return error

    def stop(self, grace_s: float) -> None:
        """Ask all to stop, wait `grace_s`, then kill; afterwards none is left."""
        for client in self.all:
            if client.process.poll() is None:
                client.stop()
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(client.process.poll() is None for client in self.all):
            for client in self.all:
                client.read()
            time.sleep(0.02)
        for client in self.all:
            client.stop(signal.SIGKILL)
            client.process.wait()
            client.read()

    def close(self) -> None:
        """Nothing stays behind, whatever happened."""
        self.stop(0.0)
        for client in self.all:
            client.close()
