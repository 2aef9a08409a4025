"""An engine as a guarded process group: started with a log, stopped as a whole, its port proved free."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from spoc_lib.core.errors import SpocError
from spoc_lib.servers.gpu_processes import prove_gpu_free, session_members

GUARD = Path(__file__).with_name("guard.py")
GRACE_S = 10.0
START_S = 10.0
PORT_FREE_S = 10.0
#: Ports of engines whose teardown could not be proved; they are not used again in this process.
quarantined: set[int] = set()


class TeardownFailure(SpocError):
    """After the engine was stopped, its port or a process of it is still there."""


class GuardedProcess:
    """`command` under the guard (see `guard`), its output appended to `log_path`.

    environment: added to this process's own; cleanup: commands that run after the end (remove a container);
    directory: where it runs (None: here).
    """

    def __init__(self, command: Sequence[str], log_path: Path, *, environment: Mapping[str, str] | None = None,
                 cleanup: Sequence[Sequence[str]] = (), grace_s: float = GRACE_S,
                 directory: Path | None = None) -> None:
        self._grace_s = grace_s
        reading, writing = os.pipe()
        try:
            with open(log_path, "ab") as log:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(writing), str(grace_s),
                     json.dumps(cleanup), *command],
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, pass_fds=(writing,),
                    start_new_session=True, env={**os.environ, **(environment or {})}, cwd=directory)
            os.close(writing)
            writing = -1
            self.pid = self._engine_pid(reading)
        finally:
            os.close(reading)
            if writing >= 0:
                os.close(writing)

    @staticmethod
    def _engine_pid(reading: int) -> int | None:
        readable, _, _ = select.select([reading], [], [], START_S)
        line = os.read(reading, 32) if readable else b""
        return int(line) if line else None

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._guard.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The engine's exit status (128 + N: signal N), None while it lives."""
        return self._guard.poll()

    def stop(self) -> None:
        """End the whole group and wait for it; TeardownFailure when a process survives, GpuMemoryHeld when one of
        them keeps GPU memory."""
        members = session_members(self.pid) if self.pid is not None else set()
        if self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
        self._guard.terminate()  # a forked child of this process may hold the lifeline open
        try:
            self._guard.wait(self._grace_s + 40)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        if self.pid is not None and _group_alive(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            time.sleep(0.2)
            if _group_alive(self.pid):
                raise TeardownFailure("teardown", f"processes of the engine (group {self.pid}) survive SIGKILL: "
                                      "end them by hand before the next launch")
        prove_gpu_free(members)


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Somebody may take it before the engine does: a launch then tries another."""
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        if port not in quarantined:
            return port


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nothing listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def prove_port_free(port: int, within_s: float = PORT_FREE_S) -> None:
    """Return when `port` is free; TeardownFailure, and the port quarantined, when it stays taken."""
    deadline = time.monotonic() + within_s
    while not port_is_free(port):
        if time.monotonic() > deadline:
            quarantined.add(port)
            raise TeardownFailure("teardown", f"port {port} is still taken after the engine ended: some process of it "
                                  "may live; it is not used again in this run")
        time.sleep(0.05)
