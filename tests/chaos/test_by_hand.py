"""Each notebook as somebody has it open in JupyterLab: a live kernel in notebooks/, its parameters edited in their
cell, no papermill. Top to bottom, and once more with every cell run twice in a row; the second time must say what the
first did."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
#: Notebook: its stage's number and folder; the gallery is no stage.
STAGES = {"00_gallery": None, "01_workload_modeling": ("01", "workload"), "02_nsga2_search": ("02", "search"),
          "03_concurrency_sweep": ("03", "sweep"), "04_nsight_trace_analysis": ("04", "nsight"),
          "05_capacity_report": ("05", "report")}
#: What a pass may change in a result: when and how long, not what was found.
TIMES = re.compile(r"provenance|.*wall.*|seconds|started.*|finished.*|when|date")

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(1500)]


def opened(name: str, **parameters: str) -> nbformat.NotebookNode:
    """The notebook with these parameters written over those in its cell, as a hand would."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    for parameter, value in parameters.items():
        line = f"{parameter} = {value!r}"
        cell.source, changed = re.subn(rf"(?m)^{parameter} = .*$", lambda _, line=line: line, cell.source)
        assert changed == 1, parameter
    return notebook


def ran(client: NotebookClient, times: int) -> int:
    """Every code cell `times` in a row; how many runs of cells that was. A cell that fails raises, unless tagged so."""
    done = 0
    for at, cell in enumerate(client.nb.cells):
        for _ in range(times if cell.cell_type == "code" else 0):
            client.execute_cell(cell, at)
            done += 1
            outputs = [output for output in cell.outputs if output.output_type == "error"]
            assert not outputs or "raises-exception" in cell.metadata.get("tags", []), cell.source
    return done


def findings(value):
    """A result without its times."""
    if isinstance(value, dict):
        return {name: findings(one) for name, one in value.items() if not TIMES.fullmatch(name)}
    return [findings(inner) for inner in value] if isinstance(value, list) else value


def evidence(folder: Path) -> dict[str, int]:
    """Each file that holds a measurement, and when it was written: the second pass must not pay for it again."""
    kept = [*folder.glob("rungs/*/rung.json"), *folder.glob("confirm*/**/confirmation.json")]
    return {str(path): path.stat().st_mtime_ns for path in kept}


@pytest.mark.parametrize("name", STAGES)
def test_by_hand_top_to_bottom_and_again_with_every_cell_twice(place, name):
    parameters = {"cluster": str(place.folder / "small.yaml")}
    if name in ("00_gallery", "05_capacity_report"):  # both look at runs that are there
        for run in ("a", "b"):
            place.run(run, "--only", "03", "--set", "confirm_http=false")
        parameters |= {} if STAGES[name] is None else {"runs": "a,b"}
    parameters |= {} if STAGES[name] is None else {"profile": str(place.folder / "tiny.yaml")}
    before, beside = {path.parent for path in place.outputs.glob("*/run.json")}, sorted(NOTEBOOKS.iterdir())
    client = NotebookClient(opened(name, **parameters), kernel_name="python3", timeout=600,
                            resources={"metadata": {"path": str(NOTEBOOKS)}})
    seen, said = [], []
    with client.setup_kernel(env=place.environment()):
        for times in (1, 2):
            began = time.monotonic()
            said.append(f"{ran(client, times)} cells in {time.monotonic() - began:.1f} s")
            made = {path.parent for path in place.outputs.glob("*/run.json")} - before
            if STAGES[name] is None:
                assert not made
                continue
            (folder,) = made  # a cell that begins a run twice makes one
            number, part = STAGES[name]
            assert place.stage(folder.name, number) == "done"
            seen.append((findings(json.loads((folder / part / "result.json").read_text())), evidence(folder / part)))
            place.whole()
    print(f"{name}: {'; each twice: '.join(said)}")
    assert seen[:1] == seen[1:], "the second pass came to something else"
    place.no_orphans()
    assert sorted(NOTEBOOKS.iterdir()) == beside, "nothing is left beside the notebooks"
