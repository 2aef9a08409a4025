"""What a run keeps so that it can be repeated and believed: copies of the files it was told, one provenance a stage,
and that provenance in every artefact (JSON results, notebooks, pages, Parquet)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from spoc_lib import config
from spoc_lib.core import stamp, yamlfile
from spoc_lib.core.files import read_json, write_json, write_text
from spoc_lib.core.quickimport import import_jsonschema
from spoc_lib.pipeline.parameters import Common
from spoc_lib.pipeline.runs import Run
from spoc_lib.report import digests, provenance
from spoc_lib.workload.fingerprint import script_sha256
from spoc_lib.workload.script import ConversationScript

#: Folder of the copies; a copy is named by its content, so stages that were told the same share it.
INPUTS = "inputs"
#: Names of environment variables whose values are never written down.
SECRET = re.compile(r"key|token|secret|passw|credential", re.IGNORECASE)
WITHHELD = "(withheld)"
#: The JSON results that carry the provenance; other files of a stage are its own working papers.
RESULTS = ("result.json", "capacity.json", "verdict.json", "audit.json", "report.json")


class Told(Protocol):
    """What is recorded of a stage (`stage.Stage`)."""

    number: str
    run: Run
    parameters: Common
    cluster: config.Cluster
    profile: config.Profile

    @property
    def folder(self) -> Path:
        """Where the stage's files go."""
        ...

    @property
    def script(self) -> ConversationScript:
        """The conversations of the run."""
        ...


def keep_inputs(folder: Path, cluster: config.Cluster, parameters: Mapping[str, Any]) -> dict[str, str]:
    """Copies of the stage's cluster, profile and persona file in the run's folder, and of the user's own model or GPU
    file: {what: path below the folder}. The cluster's copy names the copies beside it.

    Traces stay where they are (their hash is recorded); so does the monorepo.
    """
    sources = {
        "cluster": config.find("clusters", str(parameters["cluster"]), "cluster"),
        "profile": config.find("profiles", str(parameters["profile"]), "profile"),
    }
    personas = digests.personas_file(cluster.personas)
    if personas is not None and personas.suffix in (".yaml", ".yml"):
        sources["personas"] = personas
    own = {what: Path(path) for what, path in (("model", cluster.model), ("gpu", cluster.hardware.gpu))
           if config.is_path(path)}
    kept = {what: f"{INPUTS}/{what}-{digests.sha256(source)[:12]}.yaml" for what, source in sources.items()}
    kept |= {what: f"{INPUTS}/{what}-{digests.sha256(source)[:12]}/{source.name}" for what, source in own.items()}
    for what, source in {**sources, **own}.items():
        if not (folder / kept[what]).exists():
            text = yamlfile.text_of(source)
            write_text(folder / kept[what], _kept_cluster(text, source, cluster, kept) if what == "cluster" else text)
    return kept


def _kept_cluster(text: str, source: Path, played: config.Cluster, kept: Mapping[str, str]) -> str:
    """A cluster file's text as it is, unless `engine.environment` sets a variable that sounds like a secret, or the
    file names others by their paths: then with the copies' names, and whole paths for what is not copied."""
    told: Any = yamlfile.read(source)
    named = config.load_cluster(str(source))
    environment: dict[str, str] = told["engine"].get("environment") or {}
    hidden = [name for name in environment if SECRET.search(str(name))]
    paths = {"model": named.model, "gpu": named.hardware.gpu, "personas": named.personas}
    whole = {what: path for what, path in paths.items() if config.is_path(path)}
    if not (hidden or whole or named.corpus):
        return text
    if named.personas != played.personas:  # the copy is of the personas that a parameter named
        kept = {what: copy for what, copy in kept.items() if what != "personas"}
    whole |= {what: kept[what].removeprefix(f"{INPUTS}/") for what in whole if what in kept}
    environment.update(dict.fromkeys(hidden, WITHHELD))
    told["hardware"] |= {"gpu": whole.pop("gpu", named.hardware.gpu)}
    return yamlfile.dump(told | whole | {"corpus": named.corpus})


def stamp_of(stage: Told) -> dict[str, Any]:
    """What the stage's tables carry: everything that is known before it has run."""
    return {
        "run": stage.run.id,
        "stage": stage.number,
        "cluster": stage.cluster.name,
        **{name: value for name, value in provenance.software().items() if name != "packages"},
        "parameters": provenance.asked(stage.parameters.model_dump()),
        "data_sha256": digests.inputs(stage.cluster, stage.parameters.model_dump()),
    }


def collect(stage: Told, seconds: float) -> dict[str, Any]:
    """The provenance of a stage that has run, the hash of its script with it where it played one."""
    parameters = stage.parameters.model_dump()
    data = digests.inputs(stage.cluster, parameters)
    if stage.number != "05":
        data["script"] = script_sha256(stage.script)
    return provenance.collect(stage.cluster, stage.profile, parameters, seconds, data=data, launches=stage.folder)


def into_results(folder: Path, made: Mapping[str, Any]) -> None:
    """Put the provenance into the JSON results that stand in `folder`."""
    for path in (folder / name for name in RESULTS):
        if path.is_file():
            write_json(path, {**read_json(path, "stage result"), "provenance": made})


def into_notebook(path: Path, made: Mapping[str, Any]) -> None:
    """Put the provenance into an executed notebook's metadata, where its page finds it too."""
    import_jsonschema()
    import nbformat

    document = nbformat.read(path, as_version=4)
    document.metadata[provenance.MARK] = nbformat.from_dict(dict(made))
    write_text(path, nbformat.writes(document))


def begin(stage: Told) -> dict[str, str]:
    """Keep what the stage was told and stamp its tables from now on; the copies, for the run's record."""
    stamp.put(stamp_of(stage))
    return keep_inputs(stage.run.folder, stage.cluster, stage.parameters.model_dump())
