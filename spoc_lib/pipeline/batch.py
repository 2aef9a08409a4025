"""Several clusters, one run each, then the comparison. Each run is a process of its own: one failing cluster never
stops the others, and papermill, Airflow or Slurm could have started the very same commands."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spoc_lib import config
from spoc_lib.core.errors import GateError
from spoc_lib.core.files import read_json
from spoc_lib.pipeline.execute import Say, execute
from spoc_lib.pipeline.parameters import check
from spoc_lib.pipeline.runs import Run, outputs_dir
from spoc_lib.report import index


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one cluster: its run (None if it never began), exit status, last words."""

    cluster: str
    run: str | None
    status: int
    reason: str


def run_batch(clusters: list[str], arguments: list[str], *, jobs: int, say: Say) -> list[Outcome]:
    """`spoc run CLUSTER … --only 01,02,03,04` for each cluster, at most `jobs` at a time, in the order given."""
    for cluster in clusters:
        config.load_cluster(cluster)
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(lambda cluster: _run_one(cluster, arguments, say), clusters))


def _run_one(cluster: str, arguments: list[str], say: Say) -> Outcome:
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "run.json"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "spoc_lib",
                "run",
                cluster,
                "--only",
                "01,02,03,04",
                "--json",
                str(answer),
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        last = ""
        try:
            for line in process.stdout:
                last = line.rstrip()
                say(f"[{cluster}] {last}")
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        result: dict[str, Any] = read_json(answer) if answer.exists() else {}
    return Outcome(cluster, result.get("run"), status, "" if status == 0 else last)


def report(
    runs: list[str], *, profile: str = "", settings: Mapping[str, Any] | None = None, say: Say, run_id: str = ""
) -> Run:
    """Notebook 05 over finished runs, in a run folder of its own.

    profile: default the first run's own; settings: other parameters of the notebook by name.
    """
    opened = [Run.open(run) for run in runs]
    for run in opened:
        if run.stage_state("03")["state"] != "done":
            raise GateError(
                "nothing-to-report",
                f"run '{run.id}' has no finished sweep: spoc run {run.state['cluster']} --run-id {run.id} --resume",
            )
    cluster = opened[0].state["cluster"]
    profile = profile or opened[0].stage_state("03")["parameters"]["profile"]
    parameters = {
        "cluster": opened[0].stage_state("03")["parameters"]["cluster"],
        "profile": profile,
        "runs": ",".join(str(run.folder) for run in opened),
        **(settings or {}),
    }
    check("05", parameters)
    comparison = Run.create(
        "report",
        run_id,
        {
            "cluster": cluster if len(opened) == 1 else "comparison",
            "profile": profile,
            "runs": [run.id for run in opened],
        },
    )
    with comparison.exclusive():
        execute(comparison, "05", parameters, say)
    index.rebuild(outputs_dir())
    return comparison
