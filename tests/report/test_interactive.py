"""The workbench from a blank notebook: instant import, results that show themselves, errors in a sentence, and the
gallery notebook as a user runs it, twice."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

import spoc_lib as spoc
from spoc_lib import config
from spoc_lib.core.errors import InputError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_the_import_is_instant_and_brings_no_room_along():
    code = ("import time, sys; t = time.perf_counter(); import spoc_lib as spoc; took = time.perf_counter() - t\n"
            "assert took < 0.3, took\nassert 'pandas' not in sys.modules and 'plotly' not in sys.modules\n"
            "assert set(spoc.__all__) < set(dir(spoc)) and '_' not in ''.join(n[0] for n in spoc.__all__)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_cluster_offers_its_fields_and_shows_itself():
    cluster = spoc.cluster("sim-4xh100")
    assert not [name for name in dir(cluster) if name.startswith(("model_", "_"))]
    assert {"hardware", "slos", "simulated"} <= set(dir(cluster))
    assert "<th>hardware</th><td>gpu h100-sxm, count 4</td>" in cluster._repr_html_()


@pytest.mark.parametrize("ask, words", [
    (lambda: spoc.cluster("sim-4xh1000"), "use one of sim-2xh200, sim-4xh100"),
    (lambda: spoc.quick_capacity("vllm-cpu"), "is a real engine"),
    (lambda: spoc.quick_capacity("sim-4xh100", max_num_sqes=3), "did you mean max_num_seqs"),
    (lambda: spoc.quick_capacity("sim-4xh100", measured_s=0), "measured_s must be at least 10"),
    (lambda: spoc.cluster(Path("nowhere.yaml")), "unknown cluster 'nowhere.yaml'"),
    (lambda: spoc.latest("nowhere"), "no run of cluster 'nowhere'"),
    (lambda: spoc.run("nowhere"), "no run 'nowhere'"),
    (lambda: spoc.compare("nowhere", "nor here"), "no run 'nowhere'"),
])  # fmt: skip
def test_errors_read_well(ask, words):
    with pytest.raises(InputError) as caught:
        ask()
    assert words in caught.value.message
    assert caught.value._render_traceback_() == [f"InputError [{caught.value.code}]: {caught.value.message}"]


def test_runs_and_comparisons_are_a_sentence_in_a_terminal(made_run, tmp_path):
    one, other = (spoc.run(str(made_run(tmp_path / name, truth, seed=1))) for name, truth in (("a", 120), ("b", 90)))
    assert re.fullmatch(r"4 × H100 .*: \d+ users \(.*\), simulated; .*", repr(one))
    assert re.fullmatch(r"\[b of .* against a of .*: -\d+% users .*\]", repr(spoc.compare(one, other)))


@pytest.fixture(scope="module")
def gallery(tmp_path_factory, made_run):
    """The gallery executed over a small cluster of its name and two finished runs, then once more in its kernel."""
    place = tmp_path_factory.mktemp("gallery")
    shutil.copytree(config.data_dir(), place / "data")
    small = yaml.safe_load((place / "data/clusters/sim-4xh100.yaml").read_text())
    small |= {"personas": "tiny", "search": {"target_users": 40},
              "slos": [{"persona": "all", "metric": "itl", "percentile": 95, "limit_s": 0.006}]}
    (place / "data/clusters/sim-4xh100.yaml").write_text(yaml.safe_dump(small))
    for name, truth in (("one", 120), ("two", 102)):
        made_run(place / "outputs" / name, truth, seed=truth)
    notebook = nbformat.read(ROOT / "notebooks/00_gallery.ipynb", as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPOC_DATA", str(place / "data"))
        patch.setenv("SPOC_OUTPUTS", str(place / "outputs"))
        client = NotebookClient(notebook, kernel_name="python3", timeout=120)
        with client.setup_kernel():
            for _ in range(2):
                for position, cell in enumerate(notebook.cells):
                    client.execute_cell(cell, position)
    return {cell.id: cell for cell in notebook.cells}


def shown(cell) -> str:
    return "".join(str(output.get("data", {}).get("text/html", "")) for output in cell.outputs)


def test_five_lines_give_a_capacity(gallery):
    source = gallery["g-02"].source
    assert len([line for line in source.splitlines() if line]) <= 5
    assert "users under its SLA" in shown(gallery["g-02"]) and "simulated" in shown(gallery["g-02"])
    question, figure, finding = (output.data for output in gallery["g-04"].outputs)
    assert "application/vnd.plotly.v1+json" in figure and "How near" in question["text/html"]
    assert "users under its SLA" in finding["text/html"]


def test_the_gallery_shows_errors_as_one_sentence(gallery):
    for cell, words in (("g-12", "unknown cluster 'sim-4xh1000'"), ("g-13", "max_num_seqs")):
        [error] = [output for output in gallery[cell].outputs if output.output_type == "error"]
        assert len(error.traceback) == 1 and words in error.traceback[0]


def test_the_gallery_opens_and_compares_runs(gallery):
    assert "two" in shown(gallery["g-15"]) and "spoc-answer" in shown(gallery["g-16"])
    assert "% users" in shown(gallery["g-17"]) or "no difference shown" in shown(gallery["g-17"])
