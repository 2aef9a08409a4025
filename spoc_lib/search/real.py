"""Trials on a real server: launched with the flags, loaded by Locust users over HTTP, summarised, torn down."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from spoc_lib.config import Cluster
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.core.files import write_json, write_text
from spoc_lib.search import recommend
from spoc_lib.search.evaluate import Measurement, TrialFailure, measurement
from spoc_lib.search.space import Flags, FlagSpace

VERSION_TIMEOUT_S = 120


@dataclass
class HttpEvaluator:
    """Launches the cluster's engine and plays `duration_s` real seconds of `users` users against it.

    Any kind of engine that can be launched: embedded (the twin over HTTP), process, container.
    """

    cluster: Cluster
    space: FlagSpace
    users: int
    duration_s: float
    warmup_s: float
    gap_cap_s: float = 60.0
    start: str = "stationary"
    seed: int = 0
    driver: str = "locust"

    def __post_init__(self) -> None:
        if self.cluster.engine.kind == "remote":
            raise InputError("remote-search", f"cluster '{self.cluster.name}': a remote engine's flags are fixed, so "
                             f"there is nothing to search: sweep it, or describe how to launch it")
        self.version = engine_version(self.cluster)

    def evaluate(self, flags: Flags, folder: Path, repeat: int = 0) -> Measurement:
        """Measure `flags`; evidence: command, server log, requests, chunks, metrics, rung."""
        from spoc_lib.servers import LaunchFailure, launch

        started = time.monotonic()
        passed = self.space.launch_flags(flags)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "command.txt", recommend.command(self.cluster, passed) + "\n")
        try:
            with launch(self.cluster, passed, folder) as server:
                row, slo = self._load(server, folder, repeat)
        except LaunchFailure as failure:
            raise TrialFailure(failure.failure_class, failure.message) from failure
        write_json(folder / "rung.json", {"rung": row, "slo": slo, "engine": server.version,
                                          "startup_s": server.startup_s})
        return measurement(row, slo, users=self.users, driver=self.driver, duration_s=time.monotonic() - started)

    def _load(self, server, folder: Path, repeat: int) -> tuple[dict, list[dict]]:
        from spoc_lib import load
        from spoc_lib.core import schemas
        from spoc_lib.core.tables import read_table
        from spoc_lib.sweep.rung import summarise
        from spoc_lib.telemetry.recorder import Recorder

        plan = load.LoadPlan(
            base_url=server.base_url, model=server.model, personas=self.cluster.personas, users=self.users,
            duration_s=self.duration_s, warmup_s=self.warmup_s, seed=self.seed, salt=repeat,
            gap_cap_s=self.gap_cap_s, start=self.start, context_limit=self.space.fixed.get("max_model_len"),
            api_key_env=self.cluster.engine.api_key_env)
        path = folder / "metrics.parquet"
        try:
            with Recorder(server.metrics_url, server.dcgm_url, path):
                run = load.run(plan, folder)
        except InputError:
            raise
        except SpocError as error:
            raise TrialFailure("load-failed", error.message) from error
        return summarise(run.requests, run.chunks, read_table(path, schemas.METRICS), run.window, self.cluster.slos,
                         self.users, self.driver, planned=run.summary["planned"],
                         client_limited=bool(run.summary.get("client_limited")), gap_cap_s=self.gap_cap_s)


def engine_version(cluster: Cluster) -> str:
    """The engine's version as far as it can be had without a launch; part of the cache's key.

    embedded: the workbench's own version; container: the image; process: the `vllm` that the command's Python
    sees, else what `<command> --version` prints.
    """
    from importlib.metadata import version

    engine = cluster.engine
    if engine.kind == "embedded":
        return f"embedded {version('spoc-workbench')}"
    if engine.kind == "container":
        return engine.image
    program = engine.command[0]
    asked = ([program, "-c", "import importlib.metadata as m; print(m.version('vllm'))"]
             if Path(program).name.startswith("python") else [program, "--version"])
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"unknown version of {program}"
    return f"vllm {answer.stdout.strip().splitlines()[-1]}" if answer.stdout.strip() else f"unknown {program}"
