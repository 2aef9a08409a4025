"""Whether a stage that is done may stay when its run goes on: the same question, asked of the same files and of the
results of the same earlier stages."""

from __future__ import annotations

from pathlib import Path

from spoc_lib import config
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json
from spoc_lib.core.tables import need_whole
from spoc_lib.pipeline.parameters import STAGES, Common
from spoc_lib.pipeline.record import RESULTS
from spoc_lib.pipeline.runs import Run
from spoc_lib.pipeline.stage import with_workload
from spoc_lib.report import digests
from spoc_lib.report.index import outdated


def why_again(run: Run, number: str, now: Common) -> str:
    """Why a stage that is done must run again when it is asked for with the parameters `now`; '' where it may stay."""
    stage, before = STAGES[number], run.stage_state(number)
    told = before.get("parameters", {})
    asked = now.model_dump(exclude={"run_dir"})
    changed = sorted(name for name, value in asked.items() if told.get(name) != value)
    if changed:
        return f"done before with another {', '.join(changed)}"
    notebook = run.folder / f"{stage.notebook}.ipynb"
    try:
        then = read_json(run.folder / stage.folder / "result.json", "stage result")["provenance"]["data_sha256"]
        _read_all(run.folder / stage.folder)
        ended = not notebook.exists() or (read_json(notebook)["metadata"].get("papermill") or {}).get("end_time")
    except (InputError, KeyError, TypeError, AttributeError):
        return "what it left cannot be read"
    if not ended:  # a notebook that is not there was run by hand
        return "its notebook was cut off at the end"
    files = _changed_files(then, now)
    if files:
        return f"done before with another content of: {', '.join(files)}"
    newer = outdated(run.state["stages"], number)
    return f"done before {' and '.join(newer)} ran again" if newer else ""


def _read_all(folder: Path) -> None:
    """Open the results and tables of a stage; InputError for one that is damaged."""
    for path in (folder / name for name in RESULTS if (folder / name).exists()):
        read_json(path, "stage result")
    for path in folder.glob("*.parquet"):
        need_whole(path)


def _changed_files(then: dict[str, str], now: Common) -> list[str]:
    """The files behind a stage that are there still and hold something else than they did."""
    found = digests.inputs(with_workload(config.load_cluster(now.cluster), now), now.model_dump())
    return [name for name, digest in found.items() if name != "cluster_facts" and then.get(name, digest) != digest]
