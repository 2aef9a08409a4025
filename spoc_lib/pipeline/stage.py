"""What a notebook holds while it runs: its cluster, profile, folder, script, and the results of earlier stages."""

from __future__ import annotations

import html
import os
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from spoc_lib import config
from spoc_lib.config.flags import read_flags, unknown_flags
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.pipeline import record
from spoc_lib.pipeline.parameters import STAGES, Common, from_notebook
from spoc_lib.pipeline.runs import Run, lock
from spoc_lib.report import provenance, style
from spoc_lib.servers.commands import flag_arguments

#: How long a stage waits for the process that is at it: a killed run's kernel ends a second or two after it.
WAIT_S = 10.0
#: The stages that this process is at, each held against other processes: the notebook's number to its open lock file.
_HELD: dict[str, tuple[Path, int]] = {}


@dataclass
class Stage:
    """One notebook at work in one run."""

    number: str
    run: Run
    parameters: Common
    cluster: config.Cluster
    profile: config.Profile
    started_s: float = field(default_factory=time.monotonic)
    _progress_s: float = 0.0

    @property
    def folder(self) -> Path:
        """Where this stage's artefacts stand."""
        return self.run.folder / STAGES[self.number].folder

    @property
    def seed(self) -> int:
        """Of workload and search."""
        return self.parameters.seed

    @cached_property
    def personas(self):
        """The persona set: the `personas` parameter, else the cluster's."""
        from spoc_lib.workload.personas import load_personas

        return load_personas(self.cluster.personas)

    @cached_property
    def corpus(self):
        """The text behind the prompts: the `monorepo` parameter, else the cluster's, else Python's own library."""
        from spoc_lib.workload.corpus import Corpus

        return Corpus.from_directory(self.cluster.corpus)

    @property
    def script(self):
        """The conversations of salt 0."""
        return self.script_factory(0)

    @property
    def gap_cap_s(self) -> float:
        """The cap on think time; it moves 'how many users', so it is printed wherever users are counted."""
        return getattr(self.parameters, "gap_cap_s", 0.0) or self.profile.gap_cap_s

    @property
    def script_factory(self) -> Callable[[int], Any]:
        """`salt -> ConversationScript`: a fresh salt gives the same sizes with a cold cache."""
        from spoc_lib.workload import build_script

        return lambda salt: build_script(self.personas, self.seed, salt=salt, gap_cap_s=self.gap_cap_s,
                                         start=self.profile.start, context_limit=self.cluster.context_limit())

    def result_of(self, number: str) -> dict[str, Any] | None:
        """The result of a finished stage of this run, or None."""
        if self.run.stage_state(number)["state"] != "done":
            return None
        return read_json(self.run.folder / STAGES[number].folder / "result.json", "stage result")

    def flags(self) -> dict[str, Any]:
        """The flags to serve with: the `flags` parameter (name=value …), else the search's best, else defaults."""
        given = getattr(self.parameters, "flags", "")
        if given:
            return read_flags(given)
        found = self.result_of("02")
        return dict(found["best_flags"]) if found else {}

    def cluster_for(self, target_users: int = 0, objective: str = "") -> config.Cluster:
        """The cluster, with another number of users to search at, or another first objective, where one is given."""
        given = {"target_users": target_users, "objective": objective}
        values = self.cluster.search.model_dump() | {name: value for name, value in given.items() if value}
        search = yamlfile.parse(config.SearchSpec, values, "parameters of the search")
        return self.cluster.model_copy(update={"search": search})

    @property
    def flags_sentence(self) -> str:
        """The flags as vLLM takes them, and where they come from."""
        if getattr(self.parameters, "flags", ""):
            origin = "given as parameter"
        else:
            origin = "best of the NSGA-II search of this run" if self.result_of("02") else \
                "vLLM's defaults (no search in this run)"
        unread = " ".join(f"Passed on unread: {sentence}." for sentence in unknown_flags(self.flags()))
        flags = shlex.join(flag_arguments(self.flags())) or "none beyond the fixed ones"
        return f"Flags: {flags} ({origin}). {unread}".rstrip()

    def progress(self, text: str, fraction: float | None = None) -> None:
        """Tell whoever watches the run; at most five times a second, and never into the notebook."""
        now = time.monotonic()
        if now - self._progress_s >= 0.2:
            self._progress_s = now
            write_json(self.run.folder / "progress.json", {"stage": self.number, "text": text, "fraction": fraction})

    def finish(self, result: dict[str, Any], findings: list[str]) -> None:
        """Store the stage's result with its findings and provenance, and mark the stage done."""
        made = record.collect(self, time.monotonic() - self.started_s)
        write_json(self.folder / "result.json", {**result, "findings": findings})
        record.into_results(self.folder, made)
        if self.number == "05":  # its report.json stands in the run's own folder
            record.into_results(self.run.folder, made)
        self.run.set_stage(self.number, state="done", finished_wall_s=time.time(), findings=findings,
                           finishes=self.run.finishes(self.number) + 1)
        _release(self.number)
        provenance.show(made)

    def _origin(self) -> str:
        if getattr(self.parameters, "trace", ""):
            return "from the trace that was given; its own table says whether it was measured or simulated"
        return "SIMULATED by the embedded engine" if self.cluster.simulated else "measured on a real engine"

    def _repr_html_(self) -> str:
        rows = {
            "cluster": self.cluster.title,
            "run": self.run.id,
            "profile": f"{self.profile.name}: {self.profile.title}",
            "parameters": ", ".join(f"{k}={v}" for k, v in self.parameters.model_dump().items()
                                    if v not in ("", 0, 0.0) and k not in ("cluster", "profile", "run_dir")),
            "numbers": self._origin(),
        }
        cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in rows.items())
        return f'<table class="spoc-facts">{cells}</table>'


def begin(number: str, namespace: dict[str, Any]) -> Stage:
    """Open a stage from a notebook: check its parameters (`globals()`), open or create the run, mark it running.

    Once more in the same kernel, with the same parameters, it is the same run's.
    """
    style.activate()
    parameters = from_notebook(number, namespace)
    cluster = config.load_cluster(parameters.cluster)
    profile = config.load_profile(parameters.profile)
    facts = {"cluster": cluster.name, "profile": profile.name, "seed": parameters.seed}
    run = _told_run(number, cluster, parameters, facts) if parameters.run_dir else \
        _begun_before(namespace, number, parameters) or Run.create(cluster.name, facts=facts)
    stage = Stage(number, run, parameters, with_workload(cluster, parameters), profile)
    _hold(stage)
    inputs = record.begin(stage)
    _prepare(stage, inputs)
    run.set_stage(number, state="running", started_wall_s=time.time(), parameters=parameters.model_dump(),
                  inputs=inputs, reads={other: run.finishes(other) for other in STAGES[number].reads})
    return stage


def _hold(stage: Stage) -> None:
    """Keep every other process from this stage of this run until it is finished, or this process (a notebook's kernel)
    ends or begins the notebook for another run; InputError when another one is at it."""
    path = stage.run.folder / f".{stage.number}.lock"
    if stage.number in _HELD and _HELD[stage.number][0] == path and path.exists():
        return
    _release(stage.number)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(handle, f"notebook {stage.number} of run '{stage.run.id}': wait for it, end its kernel, or name another "
                     "run_dir", wait_s=WAIT_S)
    except InputError:
        os.close(handle)
        raise
    _HELD[stage.number] = path, handle


def _release(number: str) -> None:
    if number in _HELD:
        os.close(_HELD.pop(number)[1])


def _told_run(number: str, cluster: config.Cluster, parameters: Common, facts: dict[str, Any]) -> Run:
    """The run in `run_dir`; InputError where it is another cluster's, but for the report, which is over any runs."""
    run = Run.at(parameters.run_dir, facts)
    if number != "05" and run.state.get("cluster") != cluster.name:
        raise InputError("other-cluster", f"run_dir: run '{run.id}' is of cluster '{run.state.get('cluster')}', not of "
                         f"'{cluster.name}': name another folder")
    return run


def _begun_before(namespace: dict[str, Any], number: str, parameters: Common) -> Run | None:
    """The run that this notebook began in this kernel: a cell that is run again makes no second one."""
    before = namespace.get("stage")
    if isinstance(before, Stage) and (before.number, before.parameters) == (number, parameters) \
            and before.run.state_path.is_file():
        return before.run
    return None


def _prepare(stage: Stage, inputs: dict[str, str]) -> None:
    """A stage with the same parameters is gone on with, and what was measured is not paid for again, finished or not;
    any other starts on an empty folder. So does a finished search whose files have changed: a study asks one question,
    where each rung of a sweep knows its own."""
    before = stage.run.stage_state(stage.number)
    told = before.get("parameters", {}) | {"run_dir": ""} == stage.parameters.model_dump() | {"run_dir": ""}
    finished_otherwise = before["state"] == "done" and before.get("inputs", inputs) != inputs
    if not told or stage.number == "02" and finished_otherwise:
        shutil.rmtree(stage.folder, ignore_errors=True)
    stage.folder.mkdir(exist_ok=True)


def with_workload(cluster: config.Cluster, parameters: Common) -> config.Cluster:
    """The cluster with the notebook's own personas and monorepo, where they are given, and the personas' SLOs."""
    from spoc_lib.workload.personas import with_persona_slos

    given = {"personas": getattr(parameters, "personas", ""), "corpus": getattr(parameters, "monorepo", "")}
    chosen = {name: os.path.expanduser(value) for name, value in given.items() if value}
    return with_persona_slos(cluster.model_copy(update=chosen))
