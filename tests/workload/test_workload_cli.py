"""`spoc workload` as a user meets it: results, exit status, one sentence for a mistake."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import yaml

from spoc_lib.cli import main
from spoc_lib.workload import load_personas


@pytest.fixture
def spoc(monkeypatch, capsys):
    """Runs the command line in this process."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["spoc", "workload", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=captured.out, stderr=captured.err)
    return run


def test_build_and_export(spoc, tmp_path):
    out = spoc("build", "tiny", "--users", 5, "--turns", 3, "-o", tmp_path / "s.parquet", "--json", "-")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["requests"] == 15 and (tmp_path / "s.parquet").exists()
    out = spoc("export", "tiny", "--users", 3, "--turns", 3, "-o", tmp_path / "m.jsonl")
    assert out.returncode == 0
    back = json.loads(spoc("import", tmp_path / "m.jsonl", "--json", "-").stdout)
    assert {"sessions", "turns", "tokens", "skipped", "own_history_reuse"} <= set(back) and back["turns"] == 9


def test_open_arrivals(spoc, tmp_path):
    out = spoc("export", "tiny", "--rate-per-s", 2, "--cv", 3, "--duration-s", 30, "-o", tmp_path / "m.jsonl",
               "--json", "-")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["arrivals"] == json.loads(out.stdout)["users"] > 10
    assert spoc("build", "tiny", "--rate-per-s", 0).returncode == 2


def test_audit(spoc, tmp_path):
    out = spoc("audit", "tiny", "--users", 60, "--json", tmp_path / "audit.json")
    assert out.returncode == 0, out.stdout + out.stderr
    assert "In-flight share" in out.stdout and json.loads((tmp_path / "audit.json").read_text())["passed"]


def test_audit_of_a_single_turn(spoc):
    out = spoc("audit", "tiny", "--users", 1, "--turns", 1)
    assert out.returncode in (0, 1) and "Traceback" not in out.stderr
    assert "in flight" in out.stdout


def broken(tmp_path, change):
    document = load_personas("tiny").model_dump(mode="json")
    change(document)
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(("change", "said"), [
    (lambda d: d["personas"][0].update(share=0.9), "field 'personas': their shares sum to 1.2"),
    (lambda d: d["personas"][0]["output_tokens"].update(min=90), "min (90) is above max (64)"),
    (lambda d: d["personas"][0].update(colour="red"), "no such field"),
    (lambda d: d["personas"][0].pop("turns"), "required"),
    (lambda d: d["personas"][1].update(compact_to_tokens=None), "compact_to_tokens"),
    (lambda d: d["geometry"]["depth"].update(files=0.9), "shares of depth"),
    (lambda d: d["personas"][1].update(name="T0"), "same name"),
    (lambda d: d["personas"][0].update(context_limit_tokens=100), "context_limit_tokens"),
])
def test_bad_personas(spoc, tmp_path, change, said):
    out = spoc("build", broken(tmp_path, change))
    assert out.returncode == 2 and said in out.stderr
    assert "Traceback" not in out.stderr and len(out.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("arguments", "said"), [
    (["build", "nobody"], "unknown personas 'nobody'"), (["import", "/nowhere"], "no trace at"),
    (["export", "tiny", "--format", "excel"], "unknown format"),
    (["audit", "tiny", "--monorepo", "/nowhere"], "monorepo"),
    (["build", "tiny", "--context-limit", "10"], "at least"),
])
def test_bad_input(spoc, arguments, said):
    out = spoc(*arguments)
    assert out.returncode == 2 and said in out.stderr and "Traceback" not in out.stderr
