"""NVTX ranges of the embedded engine, captured for real: the server in an interactive session of nsys.

Without a GPU there is no CUDA profiler window, so the session itself is started and stopped. It hears what the engine
does step by step (`engine.http.marks`); kernels, the twin has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spoc_lib.config import Cluster
from spoc_lib.core import yamlfile
from spoc_lib.core.files import write_text
from spoc_lib.core.stats import percentile
from spoc_lib.nsight import nvtx
from spoc_lib.nsight.attach import COLLECTED
from spoc_lib.nsight.nsysrep import find_nsys, run_tool
from spoc_lib.nsight.trace import open_source

_TIMEOUT_S = 120


def in_session(cluster: Cluster, name: str, folder: Path) -> Cluster:
    """The embedded `cluster` as a process that nsys launched into session `name`; its file lands in `folder`."""
    path = write_text(folder / "cluster.yaml",
                      yamlfile.dump(cluster.model_dump(mode="json", exclude_none=True)))
    command = [str(find_nsys()), "launch", f"--session-new={name}", "--trace=nvtx", "--wait=primary", sys.executable,
               "-m", "spoc_lib", "engine", "serve", "--cluster", str(path.absolute()), "--dev"]
    engine = cluster.engine.model_copy(update={"kind": "process", "command": command})
    return cluster.model_copy(update={"engine": engine, "flags": {}})  # the file holds the flags


@contextmanager
def recording(name: str, output: Path) -> Iterator[None]:
    """Session `name` records while the block runs and leaves `output`.nsys-rep or .qdstrm. InputError when nsys
    refuses."""
    _nsys("start", f"--session={name}", *COLLECTED, f"--output={output.absolute()}")
    try:
        yield
    finally:
        _nsys("stop", f"--session={name}")


def _nsys(*arguments: str) -> None:
    run_tool([str(find_nsys()), *arguments], f"nsys {arguments[0]}", _TIMEOUT_S, {**os.environ, "LC_ALL": "C"})


def heard(report: Path) -> str:
    """What a report of the engine's ranges holds, in a sentence."""
    with open_source(report) as source:
        ranges = nvtx.step_ranges(source)
    if not ranges:
        return (f"nsys captured no step range in {report.name}: nvtx 0.2.12 and later lose theirs under an nsys as old "
                f"as 2022.4.")
    phases: dict[str, list[float]] = {}
    for one in ranges:
        phases.setdefault(nvtx.parse_step(one.text)["phase"], []).append((one.end - one.start) / 1e6)
    told = ", ".join(f"{len(found)} {phase} (median {percentile(found, 50):.1f} ms)"
                     for phase, found in sorted(phases.items()))
    return f"nsys captured {len(ranges)} engine steps as NVTX ranges: {told}."
