"""What other programs read: each format before its own reader."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from spoc_lib.cli.app import app
from spoc_lib.report import export, llmd
from spoc_lib.report.answer import Answer


@pytest.fixture(scope="module")
def answer(made_run, tmp_path_factory):
    return Answer.read(made_run(tmp_path_factory.mktemp("export") / "run", 120, seed=1))


def test_openmetrics_is_what_prometheus_reads(answer):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus_client is not installed")
    families = {f.name: f for f in parser.text_string_to_metric_families(export.openmetrics(answer))}
    assert families["spoc_capacity_users"].samples[0].value == answer.users
    info = families["spoc_run"].samples[0].labels
    assert info["cluster"] == "sim-4xh100" and info["engine_version"] == "0.32.0" and info["seed"] == "1"
    waits = [s for s in families["spoc_rung_ttft_seconds"].samples if s.labels["quantile"] == "0.99"]
    assert len(waits) == len(answer.climbed) and all(math.isinf(s.value) for s in waits)


def test_a_label_keeps_its_quotes_and_line_ends():
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="prometheus_client is not installed")
    name = 'a "quoted"\\\nname'
    text = export._family("x", "gauge", "Text.", [({"run": name}, 1.5)]) + "# EOF\n"
    [family] = parser.text_string_to_metric_families(text)
    assert family.samples[0].labels == {"run": name} and family.samples[0].value == 1.5


def test_llmd_takes_the_reports(answer, tmp_path):
    library = pytest.importorskip("llmd_benchmark_report", reason="pip install llmd-benchmark-report")
    written = llmd.write(answer, tmp_path)
    assert [p.name for p in written] == ["rung-03-110-users.yaml", "rung-05-120-users.yaml"]
    for path in written:
        report = library.load_benchmark_report(yaml.safe_load(path.read_text()))
        assert report.version == "0.2.1" and report.scenario.stack[0].standardized.model.name == "gpt-oss-120b"


def test_llmd_figures_are_those_of_the_answered_requests(answer):
    report = llmd.reports(answer)["rung-05-120-users.yaml"]
    requests = pd.read_parquet(answer.folder / "sweep/rungs/05/requests.parquet")
    done = requests[requests["outcome"] == "completed"]
    told = report["results"]["request_performance"]["aggregate"]
    assert told["requests"]["total"] == 200 and told["requests"]["failures"] == 4
    latency = told["latency"]
    assert latency["time_to_first_token"]["mean"] == pytest.approx(done["ttft_s"].mean())
    assert latency["time_per_output_token"]["mean"] == pytest.approx(
        (0.01 * done["output_tokens"] / (done["output_tokens"] - 1)).mean())
    assert latency["inter_token_latency"]["mean"] == pytest.approx(
        (0.01 * done["output_tokens"]).sum() / (done["output_tokens"] - 1).sum())
    assert report["scenario"]["load"]["native"]["config"]["live_users"] == 120


def test_a_report_that_the_schema_refuses_is_not_written(answer, tmp_path, monkeypatch):
    pytest.importorskip("llmd_benchmark_report", reason="pip install llmd-benchmark-report")
    monkeypatch.setattr(llmd, "SCHEMA_VERSION", "9.9")
    with pytest.raises(ValueError, match="Unsupported schema version"):
        llmd.write(answer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_csv_holds_the_tables_and_where_they_come_from(answer, tmp_path):
    names = {path.name for path in export.csv_folder(answer, tmp_path)}
    assert names == {"rungs.csv", "slo_verdicts.csv", "slo_limits.csv", "capacity.csv", "provenance.json"}
    rungs = pd.read_csv(tmp_path / "rungs.csv")
    assert list(rungs["users"]) == list(answer.rungs["users"]) and math.isinf(rungs["ttft_p99_s"][0])
    assert pd.read_csv(tmp_path / "capacity.csv")["max_users"][0] == answer.users


@pytest.mark.parametrize("form, name", [("llmd", "llmd"), ("openmetrics", "metrics.txt"), ("csv", "csv")])
def test_the_command_writes_into_the_run(answer, form, name):
    done = CliRunner().invoke(app, ["export", str(answer.folder), "--format", form])
    assert done.exit_code == 0, done.output
    assert (answer.folder / "export" / name).exists()
