"""One lifecycle for every kind of engine: started, proved ready, warmed up, torn down, proved gone.

A launch leaves its evidence in a folder: `launch.json` (command, flags, version, times), `server.log`, and for an
embedded engine the cluster file that it ran with.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spoc_lib.config import Cluster
from spoc_lib.config.access import Access
from spoc_lib.config.cluster import metrics_page
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.servers import failures
from spoc_lib.servers.commands import LaunchCommand, merged_flags, prepare, required
from spoc_lib.servers.failures import LaunchFailure
from spoc_lib.servers.process import GuardedProcess, free_port, port_is_free, prove_port_free
from spoc_lib.servers.readiness import Endpoint, Identity, NoAccessError, NotReadyError

PORT_ATTEMPTS = 3
POLL_S, DRAIN_POLL_S = 0.1, 0.1
WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8


@dataclass(frozen=True)
class Server:
    """A ready engine under test. metrics_url and dcgm_url are whole page addresses.

    flags: all in force by name, as far as they were set; startup_s: from start to the first completion.
    """

    base_url: str
    metrics_url: str
    dcgm_url: str | None
    model: str
    max_model_len: int | None
    version: str
    simulated: bool
    flags: dict[str, Any]
    log_path: Path | None
    startup_s: float
    passport: dict[str, Any] | None
    process: GuardedProcess | None = None
    access: Access = Access()

    def endpoint(self) -> Endpoint:
        """Requests to this server, with all that its cluster says of them."""
        return Endpoint(self.base_url, self.access)

    @property
    def alive(self) -> bool:
        """Whether the process lives (a remote engine: assumed)."""
        return self.process is None or self.process.alive

    def check(self) -> None:
        """LaunchFailure with the reason from the log when the engine has died."""
        if not self.alive:
            raise _died(self)

    def drain(self, within_s: float = 30.0) -> bool:
        """Wait until no request runs or waits; False when some still do. Between rungs."""
        deadline = time.monotonic() + within_s
        while self.requests_inside() > 0:
            if time.monotonic() > deadline:
                return False
            time.sleep(DRAIN_POLL_S)
        return True

    def requests_inside(self) -> int:
        """Requests running or waiting, from /metrics; NotReadyError when the page cannot be read."""
        _, page = self.endpoint().ask("GET", "/metrics")
        return sum(int(float(line.rpartition(b" ")[2])) for line in page.splitlines()
                   if line.startswith((b"vllm:num_requests_running", b"vllm:num_requests_waiting{")))


@contextmanager
def launch(cluster: Cluster, flags: Mapping[str, Any], folder: Path, *, port: int = 0) -> Iterator[Server]:
    """The cluster's engine with `flags`, ready for load while the block runs.

    port: 0 = any free one (lost to somebody else meanwhile: another is tried). Raises LaunchFailure when the engine
    does not become ready, or when it died during the block (also instead of what the block raised because of it);
    InputError when a remote engine is asked for other flags; TeardownFailure when something of it survives.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if cluster.engine.kind == "remote":
        yield _remote(cluster, flags, folder)
        return
    process, server, used_port = _start(cluster, flags, folder, port)
    try:
        yield server
    except Exception as error:
        if not process.alive:
            raise _died(server) from error
        raise
    else:
        server.check()
    finally:
        process.stop()
        prove_port_free(used_port)


def _start(cluster: Cluster, flags: Mapping[str, Any], folder: Path, port: int) -> tuple[GuardedProcess, Server, int]:
    """Start and wait for readiness, again on another port when a free one was lost to somebody else."""
    for attempt in range(1, PORT_ATTEMPTS + 1):
        try:
            return _attempt(cluster, flags, folder, port)
        except LaunchFailure as failure:
            if failure.failure_class != failures.PORT_BUSY or port or attempt == PORT_ATTEMPTS:
                raise
            os.replace(folder / "server.log", folder / f"server.attempt{attempt}.log")
    raise AssertionError("the loop returns or raises")


def _attempt(cluster: Cluster, flags: Mapping[str, Any], folder: Path, port: int
             ) -> tuple[GuardedProcess, Server, int]:
    embedded = cluster.engine.kind == "embedded"
    chosen = port or (0 if embedded else free_port())  # an embedded engine binds a free port itself and tells it
    if port and not port_is_free(port):
        raise LaunchFailure(failures.PORT_BUSY, f"port {port} is taken: choose another, or 0 for any free one")
    command = prepare(cluster, flags, chosen, folder)
    if command.program is None:
        raise LaunchFailure(failures.COMMAND_NOT_FOUND, f"cluster '{cluster.name}': the command "
                            f"'{command.arguments[0]}' is not there: install it or correct engine.command")
    log = folder / "server.log"
    for stale in (log, folder / "ready.json"):
        stale.unlink(missing_ok=True)
    started_wall, started = time.time(), time.monotonic()
    process = GuardedProcess(command.arguments, log, environment=command.environment, cleanup=command.cleanup,
                             directory=command.directory)
    try:
        base_url, dcgm_url, identity = _wait(cluster, process, folder, log, chosen, started)
    except BaseException as error:
        process.stop()
        lost = isinstance(error, LaunchFailure) and error.failure_class == failures.PORT_BUSY
        if chosen and not lost:  # a lost port is somebody else's
            prove_port_free(chosen)
        raise
    server = Server(base_url, metrics_page(cluster, base_url)[0], cluster.telemetry.dcgm_url or dcgm_url,
                    identity.model, identity.max_model_len, identity.version, identity.simulated,
                    merged_flags(cluster, flags), log, time.monotonic() - started, identity.passport, process,
                    cluster.engine)
    if not embedded:
        warm_up(server)
    _leave_evidence(folder, cluster, command, server, started_wall)
    return process, server, int(base_url.rpartition(":")[2])


def _wait(cluster: Cluster, process: GuardedProcess, folder: Path, log: Path, port: int, started: float
          ) -> tuple[str, str | None, Identity]:
    """Poll until a real completion came back; LaunchFailure when the engine dies or the time is over."""
    timeout_s = cluster.engine.startup_timeout_s
    base_url = f"http://127.0.0.1:{port}" if cluster.engine.kind != "embedded" else None
    dcgm_url: str | None = None
    waiting_for = "it to listen"
    while True:
        if not process.alive:
            raise _failure(log, process.exit_status, served=False)
        try:
            if base_url is None and (folder / "ready.json").exists():
                ready = read_json(folder / "ready.json")
                base_url, dcgm_url = ready["base_url"], f"{ready['dcgm_url']}/metrics"
            if base_url is not None:
                endpoint = Endpoint(base_url, cluster.engine)
                endpoint.healthy()
                identity = endpoint.identify()
                endpoint.complete(identity.model, timeout_s=max(1.0, started + timeout_s - time.monotonic()))
                return base_url, dcgm_url, identity
        except NoAccessError as refused:
            raise InputError("no-access", f"cluster '{cluster.name}': {refused.message}") from refused
        except NotReadyError as not_yet:
            waiting_for = not_yet.message
        if time.monotonic() - started > timeout_s:
            lines = failures.read_log(log)
            line = failures.quoted(lines[-1]) if lines else ""
            raise LaunchFailure(failures.STARTUP_TIMEOUT, f"the engine was not ready within {timeout_s:g} s "
                                f"({waiting_for}): raise startup_timeout_s or read the log; its last line: “{line}” "
                                f"(log: {log})", line)
        time.sleep(POLL_S)


def _failure(log: Path, exit_status: int | None, *, served: bool) -> LaunchFailure:
    diagnosis = failures.diagnose(log, exit_status, served=served)
    what = "died" if served else "did not start"
    return LaunchFailure(diagnosis.failure_class, failures.sentence(diagnosis, what, exit_status, log), diagnosis.line)


def _died(server: Server) -> LaunchFailure:
    if server.log_path is None or server.process is None:
        raise ValueError("a remote engine is never known to have died")
    return _failure(server.log_path, server.process.exit_status, served=True)


def warm_up(server: Server, requests: int = WARM_UP_REQUESTS) -> None:
    """A few requests at once, of growing length, so that lazy compilation is not measured. Failures show later,
    in the run itself."""
    endpoint = server.endpoint()

    def one(number: int) -> None:
        endpoint.complete(server.model, prompt=f"# warm-up {number}\n" * 4 ** number, tokens=WARM_UP_TOKENS,
                          timeout_s=120)

    with ThreadPoolExecutor(requests) as pool:
        for done in [pool.submit(one, number) for number in range(requests)]:
            done.exception()


def _remote(cluster: Cluster, flags: Mapping[str, Any], folder: Path) -> Server:
    """Check an engine that is there already; it is never started, stopped or reconfigured."""
    wanted = {name: value for name, value in merged_flags(cluster, flags).items()
              if merged_flags(cluster, {}).get(name, value) != value or name not in merged_flags(cluster, {})}
    if wanted:
        raise InputError("remote-flags", f"the engine of cluster '{cluster.name}' is remote and its flags are fixed: "
                         f"{', '.join(sorted(wanted))} cannot be set; describe how to launch it to search its flags")
    base_url = required(cluster.engine.base_url, "base_url")
    started = time.monotonic()
    try:
        endpoint = Endpoint(base_url, cluster.engine)
        endpoint.healthy()
        identity = endpoint.identify(cluster.engine.served_model)
        endpoint.complete(identity.model)
    except NotReadyError as error:
        raise InputError("endpoint-unreachable", f"the remote engine of cluster '{cluster.name}' is not ready: "
                         f"{error.message}") from error
    server = Server(base_url, metrics_page(cluster, base_url)[0], cluster.telemetry.dcgm_url, identity.model,
                    identity.max_model_len, identity.version, identity.simulated, merged_flags(cluster, {}), None,
                    time.monotonic() - started, identity.passport, access=cluster.engine)
    _leave_evidence(folder, cluster, None, server, time.time())
    return server


def _leave_evidence(folder: Path, cluster: Cluster, command: LaunchCommand | None, server: Server,
                    started_wall: float) -> None:
    write_json(folder / "launch.json", {
        "cluster": cluster.name, "kind": cluster.engine.kind,
        "command": shlex.join(command.arguments) if command else None,
        "environment": sorted(command.environment) if command else [],  # names only
        "flags": server.flags, "base_url": server.base_url, "model": server.model,
        "max_model_len": server.max_model_len, "version": server.version, "simulated": server.simulated,
        "passport": server.passport, "started_wall_s": started_wall, "startup_s": server.startup_s,
    })
