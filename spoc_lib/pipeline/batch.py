"""Several clusters, one run each, then the comparison. Each run is a process of its own: one failing cluster never
stops the others, and papermill, Airflow or Slurm could have started the very same commands.

A batch is itself a run folder: `run.json` holds what it was told, `batch.json` what became of each cluster so far,
`<cluster>.log` what its run said, and notebook 05 stands in it over all runs that finished.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spoc_lib import config
from spoc_lib.config.access import root_url
from spoc_lib.core.errors import GateError, InputError
from spoc_lib.core.files import write_json
from spoc_lib.pipeline.execute import Say, absolute, again, execute
from spoc_lib.pipeline.parameters import check
from spoc_lib.pipeline.repeat import as_recorded
from spoc_lib.pipeline.runs import Run, outputs_dir
from spoc_lib.report import index
from spoc_lib.servers.process import GuardedProcess

#: The notebooks that a batch runs for each cluster; 05 stands over all of them.
STAGES_EACH = "01,02,03,04"
POLL_S = 0.2
#: What an interrupted run may take to end its engine, its load and its kernel before it is killed.
GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one cluster. state: done | failed | waiting (not started yet) | interrupted.

    run: its run's id; status: exit status of `spoc run`; reason: its last words where it failed.
    """

    cluster: str
    run: str | None = None
    state: str = "waiting"
    status: int | None = None
    reason: str = ""
    seconds: float = 0.0


def begin(
    clusters: list[str], *, profile: str | None, seed: int | None, settings: list[str], batch_id: str = ""
) -> Run:
    """A new batch over `clusters`. A cluster file that cannot be read is that cluster's failure, not the batch's:
    InputError only when none can, or when two clusters would share their runs' name."""
    names: dict[str, str] = {}
    faults: list[str] = []
    for cluster in clusters:
        try:
            name = config.load_cluster(cluster).name
        except InputError as error:
            faults.append(error.message)
            continue
        if name in names:
            raise InputError("same-cluster", f"'{names[name]}' and '{cluster}' both describe a cluster named '{name}': "
                             "name each cluster once, and give each file its own 'name'")
        names[name] = cluster
    if not names:
        raise InputError("no-cluster", "; ".join(faults) or "name at least one cluster")
    profile, seed = profile or "quick", 1 if seed is None else seed
    config.load_profile(profile)
    told = {"clusters": [absolute(cluster) for cluster in clusters], "settings": settings}
    return Run.create("batch", batch_id, {"cluster": "comparison", "profile": absolute(profile), "seed": seed,
                                          "batch": told})


def reopen(batch_id: str = "") -> Run:
    """An earlier batch to go on with, by default the newest one."""
    if batch_id:
        run = Run.open(batch_id)
        if "batch" not in run.state:
            raise InputError("no-batch", f"run '{batch_id}' is no batch: resume it with spoc run")
        return run
    batches = [run for run in Run.all() if "batch" in run.state]
    if not batches:
        raise InputError("nothing-to-resume", "there is no batch to resume: leave out --resume")
    return max(batches, key=lambda run: run.state["anchor"]["wall_s"])


def run_batch(batch: Run, *, jobs: int, say: Say) -> list[Outcome]:
    """`spoc run CLUSTER --resume …` for each cluster of the batch, in the order given, at most `jobs` at a time.

    Clusters that share an engine take turns (see `lane`). Runs that finished in an earlier try are kept. When this
    process is interrupted or killed, the runs under way are ended with it.
    """
    return _Batch(batch, jobs, say).play()


def lane(cluster: config.Cluster) -> str:
    """What a run of this cluster wants for itself: clusters of one lane run one after the other. A remote endpoint;
    this machine's GPUs; an embedded engine shares nothing but processor time."""
    engine = cluster.engine
    if engine.kind == "remote":
        return root_url(str(engine.base_url))
    return "this machine" if engine.kind in ("process", "container") else f"embedded {cluster.name}"


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the simulator once, while the first notebooks of all runs begin, instead of in each when it is needed."""
    code = "from spoc_lib.engine.virtual import compile_ahead; compile_ahead()"
    process = GuardedProcess([sys.executable, "-c", code], Path(os.devnull), grace_s=1.0)
    try:
        yield
    finally:
        process.stop()


class _Batch:
    def __init__(self, batch: Run, jobs: int, say: Say) -> None:
        told = batch.state
        self.batch, self.jobs, self.say = batch, jobs, say
        self.arguments = ["--profile", told["profile"], "--seed", str(told["seed"]),
                          *(word for setting in told["batch"]["settings"] for word in ("--set", setting))]
        self.outcomes = {cluster: Outcome(cluster) for cluster in told["batch"]["clusters"]}
        self.lock, self.stopping = threading.Lock(), threading.Event()

    def play(self) -> list[Outcome]:
        lanes: dict[str, list[tuple[str, str]]] = {}
        for path in self.outcomes:
            try:
                cluster = config.load_cluster(path)
            except InputError as error:
                self._tell(path, state="failed", status=error.exit_status, reason=error.message)
            else:
                lanes.setdefault(lane(cluster), []).append((path, cluster.name))
        with compiling_ahead(), ThreadPoolExecutor(max_workers=self.jobs) as pool:
            under_way = [pool.submit(self._one_by_one, clusters) for clusters in lanes.values()]
            try:
                for one in under_way:
                    one.result()
            except BaseException:
                self.stopping.set()
                raise
        return list(self.outcomes.values())

    def _one_by_one(self, clusters: list[tuple[str, str]]) -> None:
        for path, name in clusters:
            if not self.stopping.is_set():
                self._run(path, name)

    def _run(self, path: str, name: str) -> None:
        run_id, log = f"{name}-{self.batch.id.removeprefix('batch-')}", self.batch.folder / f"{name}.log"
        log.write_bytes(b"")
        began = time.monotonic()
        command = [sys.executable, "-m", "spoc_lib", "run", path, "--resume", "--run-id", run_id,
                   "--only", STAGES_EACH, *self.arguments]
        process = GuardedProcess(command, log, grace_s=GRACE_S)
        try:
            last = self._follow(process, log, name)
        finally:
            process.stop()
        status = process.exit_status
        state = "interrupted" if self.stopping.is_set() else "failed" if status else "done"
        self._tell(path, run=run_id, state=state, status=status, reason=last if state == "failed" else "",
                   seconds=time.monotonic() - began)

    def _follow(self, process: GuardedProcess, log: Path, name: str) -> str:
        """Repeat what the run says until it ends or the batch is to stop; its last line."""
        last, partial = "", b""
        with open(log, "rb") as lines:
            while True:
                ended = not process.alive or self.stopping.is_set()
                *whole, partial = (partial + lines.read()).split(b"\n")
                for line in whole:
                    last = line.decode("utf-8", "replace").rstrip() or last
                    self.say(f"[{name}] {last}")
                if ended:
                    return last
                time.sleep(POLL_S)

    def _tell(self, path: str, **facts: Any) -> None:
        """Each outcome is on disk as soon as it is known."""
        with self.lock:
            self.outcomes[path] = replace(self.outcomes[path], **facts)
            write_json(self.batch.folder / "batch.json", {"outcomes": list(self.outcomes.values())})


def compare(batch: Run, outcomes: list[Outcome], say: Say) -> None:
    """Notebook 05 over the batch's finished runs, in the batch's own folder. GateError when none finished."""
    runs = [Run.open(outcome.run) for outcome in outcomes if outcome.state == "done" and outcome.run]
    if not runs:
        raise GateError("nothing-to-report", "no cluster finished, so there is nothing to compare")
    batch.update(runs=[run.id for run in runs])
    _report_on(batch, runs, batch.state["profile"], {}, say)


def summary(batch: Run, outcomes: list[Outcome]) -> list[str]:
    """One line a cluster, with the cause where it failed, and how to go on."""
    lines = []
    for outcome in outcomes:
        why = f" (exit {outcome.status}): {outcome.reason}" if outcome.state == "failed" else ""
        lines.append(f"{outcome.cluster}: {outcome.state} after {outcome.seconds:.0f} s{why}")
    if any(outcome.state != "done" for outcome in outcomes):
        lines.append(f"logs: {batch.folder}/*.log; {again(batch)}")
    return lines


def report(
    runs: list[str], *, profile: str = "", settings: Mapping[str, Any] | None = None, say: Say, run_id: str = ""
) -> Run:
    """Notebook 05 over finished runs, in a run folder of its own.

    profile: default the first run's own; settings: other parameters of the notebook by name.
    """
    opened = [Run.open(run) for run in runs]
    for run in opened:
        if run.stage_state("03")["state"] != "done":
            raise GateError("nothing-to-report", f"run '{run.id}' has no finished sweep; {again(run)}")
    profile = profile or _told(opened[0])["profile"]
    _parameters(opened, profile, settings or {})  # refused before a folder exists
    comparison = Run.create(
        "report",
        run_id,
        {
            "cluster": opened[0].state["cluster"] if len(opened) == 1 else "comparison",
            "profile": profile,
            "runs": [run.id for run in opened],
        },
    )
    with comparison.exclusive():
        _report_on(comparison, opened, profile, settings or {}, say)
    return comparison


def _told(run: Run) -> dict[str, Any]:
    """The parameters of the run's sweep, with its own copies of the files that have changed or gone since."""
    return as_recorded(run, run.stage_state("03"))


def _parameters(runs: list[Run], profile: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {
        "cluster": _told(runs[0])["cluster"],
        "profile": profile,
        "runs": ",".join(str(run.folder) for run in runs),
        **settings,
    }
    check("05", parameters)
    return parameters


def _report_on(comparison: Run, runs: list[Run], profile: str, settings: Mapping[str, Any], say: Say) -> None:
    try:
        execute(comparison, "05", _parameters(runs, profile, settings), say)
    finally:
        index.rebuild(outputs_dir())
