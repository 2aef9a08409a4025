"""Trials on a real server: launched with the flags, loaded by Locust users over HTTP, summarised, torn down."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spoc_lib.config import Cluster
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.core.files import write_json, write_text
from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import write_table
from spoc_lib.core.version import VERSION
from spoc_lib.metrics import Measured
from spoc_lib.search import recommend
from spoc_lib.search.evaluate import Measurement, TrialFailure, measurement
from spoc_lib.search.space import Flags, FlagSpace
from spoc_lib.servers import LaunchFailure, Server, launch
from spoc_lib.servers.commands import required
from spoc_lib.sweep.drivers import ScriptFactory, http_rung
from spoc_lib.sweep.record import AGAIN_SALT, Timing
from spoc_lib.sweep.rung import summarise
from spoc_lib.sweep.slo import goodput

VERSION_TIMEOUT_S = 120
#: A rung's row, its SLO rows, its samples.
Loaded = tuple[dict[str, Any], list[dict[str, Any]], Measured]


@dataclass
class HttpEvaluator:
    """Launches the cluster's engine and plays `duration_s` real seconds of `users` users against it.

    Any kind of engine that can be launched: embedded (the twin over HTTP), process, container.
    """

    cluster: Cluster
    space: FlagSpace
    script_factory: ScriptFactory
    users: int
    duration_s: float
    warmup_s: float
    gap_cap_s: float = 60.0
    driver: str = "locust"

    def __post_init__(self) -> None:
        if self.cluster.engine.kind == "remote":
            raise InputError("remote-search", f"cluster '{self.cluster.name}': a remote engine's flags are fixed, so "
                             f"there is nothing to search: sweep it, or describe how to launch it")
        self.version = engine_version(self.cluster)

    def evaluate(self, flags: Flags, folder: Path, repeat: int = 0) -> Measurement:
        """Measure `flags`; evidence: command, server log, requests, chunks, metrics, rung."""
        started = time.monotonic()
        passed = self.space.launch_flags(flags)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "command.txt", recommend.command(self.cluster, passed) + "\n")
        try:
            with launch(self.cluster, passed, folder) as server:
                row, slo, samples = twice_if_invalid(
                    lambda salt: self._load(server, folder, repeat + salt), server.drain)
        except LaunchFailure as failure:
            raise TrialFailure(failure.failure_class, failure.message) from failure
        write_json(folder / "rung.json", {"rung": row, "slo": slo, "engine": server.version,
                                          "startup_s": server.startup_s})
        return measurement(row, slo, users=self.users, driver=self.driver, duration_s=time.monotonic() - started,
                           samples=samples, goodput_per_s=goodput(samples, self.cluster.slos)["good_per_s"],
                           objectives=self.space.objectives)

    def _load(self, server: Server, folder: Path, repeat: int) -> Loaded:
        timing = Timing(self.duration_s, self.warmup_s)
        try:
            rung = http_rung(self.cluster, server, self.script_factory(repeat), self.users, timing, folder, _quiet)
        except (InputError, LaunchFailure):
            raise
        except SpocError as error:
            raise TrialFailure("load-failed", error.message) from error
        write_table(folder / "metrics.parquet", rung.metrics, METRICS)
        row, slo = summarise(rung.requests, rung.chunks, rung.metrics, rung.window, self.cluster.slos,
                             self.users, self.driver, start_s=rung.start_s, end_s=rung.end_s, planned=rung.planned,
                             client_limited=rung.client_limited, gap_cap_s=self.gap_cap_s)
        return row, slo, Measured(rung.requests, rung.chunks, rung.window, rung.end_s)


def twice_if_invalid(play: Callable[[int], Loaded], drain: Callable[[], bool]) -> Loaded:
    """`play` with salt 0, and once more before other identities when that rung says nothing about the server (a client
    that came late): a second rung costs seconds, a launch a minute."""
    found = play(0)
    if found[0]["verdict"] != "invalid":
        return found
    drain()
    return play(AGAIN_SALT)


def _quiet(line: str) -> None:
    """A trial's own progress is one line, when it is answered."""


def engine_version(cluster: Cluster) -> str:
    """The engine's version as far as it can be had without a launch; part of the cache's key.

    embedded: the workbench's own version; container: the image; process: the `vllm` that the command's Python
    sees, else what `<command> --version` prints.
    """
    engine = cluster.engine
    if engine.kind == "embedded":
        return f"embedded {VERSION}"
    if engine.kind == "container":
        return required(engine.image, "image")
    program = required(engine.command, "command")[0]
    asked = ([program, "-c", "import importlib.metadata as m; print(m.version('vllm'))"]
             if Path(program).name.startswith("python") else [program, "--version"])
    try:
        answer = subprocess.run(asked, capture_output=True,
                                encoding="utf-8", errors="replace", timeout=VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"unknown version of {program}"
    return f"vllm {answer.stdout.strip().splitlines()[-1]}" if answer.stdout.strip() else f"unknown {program}"
