"""A capture carried out: the engine started under nsys, the window opened and closed over HTTP, the report checked."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spoc_lib.config import Cluster
from spoc_lib.core.errors import InputError
from spoc_lib.nsight.nsysrep import find_nsys
from spoc_lib.nsight.plan import ENVIRONMENT, nsys_command
from spoc_lib.nsight.trace import load_trace, open_source
from spoc_lib.servers.readiness import Endpoint

_STOP_TIMEOUT_S = 600.0  # the workers write what they collected before they answer
_REPORT_TIMEOUT_S = 300.0


def under_nsys(cluster: Cluster, output: Path) -> Cluster:
    """The cluster whose engine starts under nsys and writes `output`.nsys-rep when its window closes.

    InputError for engines that are not started as a process here: a container's or a remote host's capture is made
    there (`spoc nsight plan`), and the twin writes its own trace.
    """
    if cluster.engine.kind != "process" or not cluster.engine.command:
        raise InputError("no-capture", f"the engine of cluster '{cluster.name}' is of kind {cluster.engine.kind}: only "
                         f"a process is captured from here; 'spoc nsight plan {cluster.name}' tells how otherwise")
    if find_nsys() is None:
        raise InputError("no-nsys", "nsys is not on this machine: install Nsight Systems, or capture elsewhere as "
                         f"'spoc nsight plan {cluster.name}' tells")
    command = [*nsys_command(str(output)), *cluster.engine.command, "--profiler-config.profiler", "cuda"]
    engine = cluster.engine.model_copy(update={
        "command": command, "environment": {**ENVIRONMENT, **cluster.engine.environment}})
    return cluster.model_copy(update={"engine": engine})


@contextmanager
def profiling(base_url: str, api_key: str | None = None) -> Iterator[None]:
    """The profiler's window around the block, closed however the block ends. InputError when the engine has none."""
    endpoint = Endpoint(base_url, api_key)
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
    report = _await_report(output, timeout_s, sleep)
    with open_source(report) as source:
        trace = load_trace(source)
        if len(trace.ranks) < expect_gpus:
            raise InputError("missing-rank", f"{report} holds kernels of {len(trace.ranks)} of {expect_gpus} GPUs: a "
                             f"rank was not captured, so nothing is concluded from it")
        part = sqlite.with_name(f".{sqlite.name}.part")
        shutil.copyfile(source.path, part)
        part.replace(sqlite)
    return sqlite


def _await_report(output: Path, timeout_s: float, sleep: Callable[[float], None]) -> Path:
    """The report, once its size no longer grows."""
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
