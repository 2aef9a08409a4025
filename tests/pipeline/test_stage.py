"""What a stage makes of its parameters."""

from __future__ import annotations

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
