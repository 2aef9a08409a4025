"""A finished run once more, with the parameters, seeds and files that it kept; and what came out otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spoc_lib import config
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.pipeline.execute import Say, run_stages
from spoc_lib.pipeline.parameters import STAGES
from spoc_lib.pipeline.record import WITHHELD
from spoc_lib.pipeline.runs import Run
from spoc_lib.report import comparison, digests, index
from spoc_lib.report.answer import Answer

#: Provenance that differs between any two runs and says nothing.
EXPECTED = ("seconds", "finished", "parameters")
#: What a stage may be that began and did not finish.
UNFINISHED = ("failed", "interrupted", "running")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is otherwise than it was: versions, git, hardware, a file's hash, a figure."""

    what: str
    then: str
    now: str


def repeat(source: Run, *, stages: list[str], run_id: str = "", say: Say) -> Run:
    """Run `stages` of `source` again in a new run: its parameters, seeds, cluster, profile and persona files.

    What the workbench ships besides (models, GPUs, calibration, flags) is as it is today, and `differences` says where
    that is not as it was. InputError where `source` holds no such stage or a file of it is gone.
    """
    recorded = source.state["stages"]
    unfinished = [number for number in stages if recorded.get(number, {}).get("state") in UNFINISHED]
    stages = [number for number in stages if recorded.get(number, {}).get("state") == "done"]
    if not stages or "runs" in source.state:
        raise InputError("nothing-to-repeat", f"run '{source.id}' has no finished notebook of its own to repeat: name "
                         "a run that `spoc run` made")
    parameters = {number: as_recorded(source, recorded[number]) for number in stages}
    if "02" not in stages:
        parameters = {number: _with_flags(source, told) for number, told in parameters.items()}
    first = parameters[stages[0]]
    cluster = config.load_cluster(first["cluster"])
    if WITHHELD in cluster.engine.environment.values():
        hidden = next(name for name, value in cluster.engine.environment.items() if value == WITHHELD)
        raise InputError("withheld", f"run '{source.id}' does not keep the value of engine.environment.{hidden}: run "
                         "the original cluster file with the same --seed and --set")
    profile = config.load_profile(first["profile"])
    run = Run.create(cluster.name, run_id, {"cluster": cluster.name, "profile": profile.name, "seed": first["seed"],
                                            "repeats": source.id})
    with run.exclusive():
        say(f"run {run.id} in {run.folder}: {source.id} once more")
        if unfinished:
            say(f"not repeated, for {source.id} did not finish it: {', '.join(unfinished)}")
        try:
            run_stages(run, stages, parameters, resume=False, say=say)
            write_json(run.folder / "repeat.json", {"of": source.id, "differences": differences(source, run),
                                                    "figures": figures(source, run)})
        finally:
            index.rebuild(run.folder.parent)
    return run


def as_recorded(source: Run, stage: Mapping[str, Any]) -> dict[str, Any]:
    """The stage's parameters as they were, each file replaced by the run's copy where the original has changed."""
    parameters = {**stage["parameters"], "run_dir": ""}
    kept = stage.get("inputs") or {}
    told = str(parameters["cluster"])
    if "cluster" in kept and not (_same("clusters", told, kept["cluster"]) and _names_the_same(told, kept)):
        parameters["cluster"] = str(source.folder / kept["cluster"])
    for what, folder in (("profile", "profiles"), ("personas", "personas")):
        told = parameters.get(what, "")
        if not told and what == "personas":
            told = config.load_cluster(parameters["cluster"]).personas
        if what in parameters and what in kept and not _same(folder, told, kept[what]):
            parameters[what] = str(source.folder / kept[what])
    return parameters


def _names_the_same(cluster: str, kept: Mapping[str, str]) -> bool:
    """Whether the model's and GPU's file that the cluster's names hold what the run's copies of them hold."""
    try:
        now = config.load_cluster(cluster)
    except InputError:  # one of them is gone
        return False
    return all(_same("", path, kept[what])
               for what, path in (("model", now.model), ("gpu", now.hardware.gpu)) if what in kept)


def _with_flags(source: Run, parameters: dict[str, Any]) -> dict[str, Any]:
    """The flags that the source's search had found, said outright: this run does not search."""
    found = source.folder / STAGES["02"].folder / "result.json"
    if parameters.get("flags") != "" or not found.is_file():
        return parameters
    best = read_json(found, "search result")["best_flags"]
    return {**parameters, "flags": " ".join(f"{name}={str(value).lower()}" for name, value in best.items())}


def _same(folder: str, told: str, copy: str) -> bool:
    """Whether the file that was named then is there still, with the content that the run's copy is named by."""
    try:
        return digests.sha256(config.find(folder, told, folder))[:12] in copy
    except InputError:
        return False


def differences(source: Run, run: Run) -> list[Difference]:
    """What stands otherwise in the provenance of the stages that both runs finished, each thing once."""
    found: dict[str, Difference] = {}
    for info in STAGES.values():
        paths = [one.folder / info.folder / "result.json" for one in (source, run)]
        if all(path.is_file() for path in paths):
            then, now = (_flat(read_json(path).get("provenance") or {}) for path in paths)
            for name in sorted(then.keys() | now.keys()):
                if then.get(name) != now.get(name) and not name.startswith(EXPECTED):
                    found.setdefault(name, Difference(name, str(then.get(name, "not recorded")),
                                                      str(now.get(name, "not recorded"))))
    return list(found.values())


def _flat(record: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{name}.")
        else:
            flat[before + name] = value
    return flat


def figures(source: Run, run: Run) -> list[str]:
    """The capacities beside each other with their intervals, and whether they can be told apart."""
    if any(one.stage_state("03")["state"] != "done" for one in (source, run)):
        return []
    then, now = Answer.read(source.folder), Answer.read(run.folder)
    told = [f"capacity: {_capacity(then)} then, {_capacity(now)} now"]
    if then.users and now.users:
        told.append(comparison.against(now, then).sentence)
    return told


def _capacity(answer: Answer) -> str:
    if answer.users is None or answer.interval is None:
        return "unresolved"
    low, high = answer.interval
    return f"{answer.users:g} users ({low:g} to {high:g} at {answer.level:.0%})"


def sentences(run: Run) -> list[str]:
    """What `spoc run --from-run` says at its end."""
    told = read_json(run.folder / "repeat.json", "comparison with the repeated run")
    said = [f"{one['what']}: {one['then']} then, {one['now']} now" for one in told["differences"]]
    same = f"nothing differs from {told['of']}: versions, git state, machine, files and script are the same"
    return [*(said or [same]), *told["figures"]]
