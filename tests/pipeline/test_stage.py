"""What a stage makes of its parameters."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from spoc_lib import pipeline
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.pipeline.parameters import check
from spoc_lib.pipeline.resume import why_again
from spoc_lib.report import index

DATA = Path(__file__).resolve().parents[2] / "data"
PERSONAS, CLUSTERS = DATA / "personas" / "tiny.yaml", DATA / "clusters"


def test_a_persona_brings_its_slos_to_the_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    own = yaml.safe_load(PERSONAS.read_text())
    own["personas"][0]["slos"] = [{"metric": "ttft", "percentile": 90, "limit_s": 1.5}]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(own))
    stage = pipeline.begin("03", {"personas": str(tmp_path / "mine.yaml")})
    assert [s.name for s in stage.cluster.slos] == [
        "all ttft p95 <= 5 s", "all itl p95 <= 0.05 s", f"{own['personas'][0]['name']} ttft p90 <= 1.5 s"]  # fmt: skip


def test_a_cell_that_is_run_again_makes_no_second_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    kernel = {"cluster": "sim-2xh200", "seed": 3}
    kernel["stage"] = pipeline.begin("03", kernel)
    kernel["stage"].finish({}, [])
    assert pipeline.begin("03", kernel).run == kernel["stage"].run
    other = pipeline.begin("03", {**kernel, "seed": 4}).run
    assert other != kernel["stage"].run and len(list(tmp_path.glob("*/run.json"))) == 2
    shutil.rmtree(kernel["stage"].run.folder)
    assert pipeline.begin("03", kernel).run.state_path.is_file()


def test_what_a_finished_stage_measured_is_kept_until_it_is_asked_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    kernel = {"run_dir": str(tmp_path / "mine"), "gap_cap_s": 5.0}
    stage = pipeline.begin("03", kernel)
    (stage.folder / "rungs").mkdir()
    stage.finish({}, [])
    assert (pipeline.begin("03", kernel).folder / "rungs").is_dir()
    assert not (pipeline.begin("03", {**kernel, "gap_cap_s": 6.0}).folder / "rungs").exists()


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A run of a cluster file of its own whose 03 and 05 are done, 05 with a report.json: (run, the cluster's file)."""
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    path = tmp_path / "mine.yaml"
    path.write_text((CLUSTERS / "sim-2xh200.yaml").read_text())
    told = {"cluster": str(path), "run_dir": str(tmp_path / "mine")}
    pipeline.begin("03", told).finish({}, [])
    report = pipeline.begin("05", told)
    write_json(report.run.folder / "report.json", {"verdict": []})
    report.finish({}, [])
    return report.run, path


def _again(run, number: str) -> str:
    return why_again(run, number, check(number, run.stage_state(number)["parameters"]))


def test_a_finished_stage_stays_until_its_files_or_the_stages_before_it_are_others(finished):
    run, path = finished
    assert _again(run, "03") == "" == _again(run, "05")
    pipeline.begin("03", run.stage_state("03")["parameters"]).finish({}, [])
    assert _again(run, "03") == "" and _again(run, "05") == "done before 03 ran again"
    assert next(row.status for row in index.rows(run.folder.parent)) == "outdated in 05"
    path.write_text(path.read_text().replace("limit_s: 5.0", "limit_s: 4.0"))
    assert _again(run, "03") == "done before with another content of: cluster"


@pytest.mark.parametrize("name, text", [
    *(("result.json", text) for text in ("", "{", "[]", "{}")), ("capacity.json", "{"), ("rungs.parquet", "PAR1")])
def test_a_finished_stage_that_left_something_spoiled_runs_again(finished, name, text):
    run, _ = finished
    (run.folder / "sweep" / name).write_text(text)
    assert _again(run, "03") == "what it left cannot be read"


def test_a_stage_that_runs_again_leaves_the_provenance_of_the_report_alone(finished):
    run, _ = finished
    before = read_json(run.folder / "report.json")["provenance"]
    pipeline.begin("03", run.stage_state("03")["parameters"] | {"gap_cap_s": 5.0}).finish({}, [])
    assert read_json(run.folder / "report.json")["provenance"] == before and "gap_cap_s" not in before["parameters"]


def test_the_run_of_another_cluster_is_refused(finished):
    run, path = finished
    with pytest.raises(InputError, match="is of cluster 'sim-2xh200', not of 'sim-4xh100'"):
        pipeline.begin("03", {"cluster": "sim-4xh100", "run_dir": str(run.folder)})
    assert pipeline.begin("05", {"cluster": "sim-4xh100", "run_dir": str(run.folder)}).run == run


def test_a_finished_search_whose_files_changed_begins_anew_and_a_sweep_keeps_its_rungs(finished):
    run, path = finished
    told = run.stage_state("03")["parameters"]
    pipeline.begin("02", told | {"run_dir": str(run.folder)}).finish({}, [])
    measured = [run.folder / "search" / "study.db", run.folder / "sweep" / "rungs"]
    for made in measured:
        made.mkdir()
    path.write_text(path.read_text().replace("limit_s: 5.0", "limit_s: 4.0"))
    for number in ("02", "03"):
        pipeline.begin(number, run.stage_state(number)["parameters"])
    assert [made.exists() for made in measured] == [False, True]


@pytest.mark.slow
def test_a_stage_of_a_run_is_one_process_at_a_time(finished):
    run, path = finished
    told = run.stage_state("03")["parameters"]
    code = (f"from spoc_lib.pipeline import stage; stage.WAIT_S = 0.5; "
            f"stage.begin('03', {told | {'gap_cap_s': 5.0}!r})")
    stage = pipeline.begin("03", told)
    assert pipeline.begin("03", told).run == run  # a cell that is run again
    assert next(row.status for row in index.rows(run.folder.parent)) == "running in 03"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process is working on notebook 03 of run 'mine'" in other.stderr
    assert run.stage_state("03")["parameters"] == told, "what is told of the run is what runs"
    stage.finish({}, [])
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_dir_that_can_be_no_run_is_refused_with_the_reason(tmp_path):
    with pytest.raises(InputError, match="must be a plain name"):
        pipeline.begin("03", {"run_dir": str(tmp_path / "a b")})


def test_the_notebook_that_runs_keeps_the_provenance(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    InteractiveShell.instance()
    with capture_output() as shown:
        stage = pipeline.begin("03", {})
        stage.finish({}, [])
    InteractiveShell.clear_instance()
    (output,) = shown.outputs
    assert output.metadata["spoc"] == read_json(stage.folder / "result.json")["provenance"]
    assert output.data["text/plain"].startswith("SPOC ")
