"""A capture carried out: the engine started under nsys, the window opened and closed over HTTP, the report checked."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spoc_lib.config import Cluster
from spoc_lib.config.access import Access
from spoc_lib.core.errors import InputError
from spoc_lib.nsight.nsysrep import find_nsys
from spoc_lib.nsight.plan import ENVIRONMENT, nsys_command
from spoc_lib.nsight.trace import load_trace, open_source
from spoc_lib.servers.commands import INHERITED, container_engine, model_argument
from spoc_lib.servers.readiness import Endpoint

_PROFILER = ("--profiler-config.profiler", "cuda")
_STOP_TIMEOUT_S = 600.0  # the workers write what they collected before they answer
_REPORT_TIMEOUT_S = 300.0


def require_nsys(cluster: Cluster) -> str:
    """Path of nsys. InputError where this cluster's engine cannot be captured from here: remote, or no nsys."""
    how = f"'spoc nsight plan {cluster.name}' tells how otherwise"
    if cluster.engine.kind not in ("process", "container"):
        raise InputError("no-capture", f"the engine of cluster '{cluster.name}' is of kind {cluster.engine.kind}: only "
                         f"an engine that is started here is captured from here; {how}")
    if cluster.hardware.gpu == "cpu":
        raise InputError("no-gpu", f"cluster '{cluster.name}' runs on the CPU: there are no GPU kernels to capture")
    nsys = find_nsys()
    if nsys is None:
        raise InputError("no-nsys", f"nsys is not on this machine: install Nsight Systems, or capture elsewhere; {how}")
    return nsys


@contextmanager
def under_nsys(cluster: Cluster, output: Path) -> Iterator[Cluster]:
    """The cluster whose engine starts under nsys and writes `output`.nsys-rep when its window closes; a container of
    the engine is removed at the end.

    InputError for engines that are not started here, and where nsys is absent.
    """
    nsys = require_nsys(cluster)
    if cluster.engine.kind == "container":
        name = f"spoc-capture-{os.getpid()}"
        command = _container_command(cluster, output.absolute(), Path(nsys).resolve(), name)
        try:
            yield _as_process(cluster, command)
        finally:
            with suppress(FileNotFoundError):  # neither docker nor podman is here: the launch has said so
                subprocess.run([command[0], "rm", "--force", name], capture_output=True, timeout=60, check=False)
        return
    yield _as_process(cluster, [*nsys_command(str(output.absolute())), *(cluster.engine.command or ()), *_PROFILER])


def _as_process(cluster: Cluster, command: list[str]) -> Cluster:
    engine = cluster.engine.model_copy(update={
        "kind": "process", "command": command, "environment": {**ENVIRONMENT, **cluster.engine.environment}})
    return cluster.model_copy(update={"engine": engine})


def _container_command(cluster: Cluster, output: Path, nsys: Path, name: str) -> list[str]:
    """The engine in its container under the host's nsys; on the host's network, so that its port is the launch's."""
    program = container_engine()
    count = cluster.hardware.count
    gpus = (["--gpus", str(count)] if program == "docker" else
            [part for gpu in range(count) for part in ("--device", f"nvidia.com/gpu={gpu}")])
    variables = [*ENVIRONMENT, *cluster.engine.environment, *(one for one in INHERITED if os.environ.get(one))]
    root = nsys.parent.parent
    return [program, "run", "--rm", "--name", name, *gpus, "--ipc", "host", "--network", "host",
            "--cap-add", "SYS_ADMIN", "--volume", f"{root}:{root}:ro", "--volume", f"{output.parent}:{output.parent}",
            *[part for variable in dict.fromkeys(variables) for part in ("--env", variable)],
            "--entrypoint", str(nsys), str(cluster.engine.image), *nsys_command(str(output))[1:],
            "vllm", "serve", model_argument(cluster), *_PROFILER]


@contextmanager
def profiling(base_url: str, access: Access | None = None) -> Iterator[None]:
    """The profiler's window around the block, closed however the block ends. InputError when the engine has none."""
    endpoint = Endpoint(base_url, access)
    _toggle(endpoint, base_url, "/start_profile")
    try:
        yield
    finally:
        _toggle(endpoint, base_url, "/stop_profile")


def _toggle(endpoint: Endpoint, base_url: str, path: str) -> None:
    status, _ = endpoint.ask("POST", path, timeout_s=_STOP_TIMEOUT_S)
    if status != 200:
        raise InputError("no-profiler", f"{base_url} answers {status} to {path}: start the engine with "
                         f"--profiler-config.profiler cuda")


def collect(output: Path, sqlite: Path, expect_gpus: int, *, timeout_s: float = _REPORT_TIMEOUT_S,
            sleep: Callable[[float], None] = time.sleep) -> Path:
    """Wait for the report `output`.nsys-rep (or a left-over .qdstrm), export it to `sqlite`, and check that all ranks
    are in it. InputError for a missing report or a partial capture; the report itself is kept in both cases."""
    report = await_report(output, timeout_s, sleep)
    with open_source(report) as source:
        trace = load_trace(source)
        trace.require_gpus(expect_gpus)
        part = sqlite.with_name(f".{sqlite.name}.part")
        shutil.copyfile(source.file, part)
        part.replace(sqlite)
    return sqlite


def await_report(output: Path, timeout_s: float, sleep: Callable[[float], None] = time.sleep) -> Path:
    """`output`.nsys-rep or .qdstrm, once its size no longer grows. InputError when none comes in time."""
    candidates = [output.with_name(f"{output.name}.{suffix}") for suffix in ("nsys-rep", "qdstrm")]
    deadline, size = time.monotonic() + timeout_s, -1
    while True:
        found = next((p for p in candidates if p.exists() and p.stat().st_size), None)
        if found is not None and found.stat().st_size == size:
            return found
        if time.monotonic() > deadline:
            raise InputError("no-report", f"nsys wrote no report {candidates[0]} within {timeout_s:g} s: see the "
                             f"engine's log for what nsys said")
        size = found.stat().st_size if found is not None else -1
        sleep(0.5)
