"""What a stage makes of its parameters."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from spoc_lib import pipeline

PERSONAS = Path(__file__).resolve().parents[2] / "data" / "personas" / "tiny.yaml"


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
