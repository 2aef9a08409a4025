"""A whole search through the command line: on the virtual clock, resumed, shown, and confirmed over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from typer.testing import CliRunner

from spoc_lib.cli.app import app
from spoc_lib.config import load_cluster, load_profile
from spoc_lib.core import schemas
from spoc_lib.core.errors import SpocError
from spoc_lib.core.tables import read_table
from spoc_lib.search.settings import SETTINGS, only_worker

TRIALS = 10


class Done(NamedTuple):
    """What a command answered."""

    returncode: int
    stdout: str
    stderr: str



@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, Path]:
    """A cluster and a profile that a test can afford: short prompts, few users, seconds."""
    folder = tmp_path_factory.mktemp("small")
    cluster = load_cluster("sim-4xh100").model_dump(mode="json")
    cluster |= {"name": "small", "personas": "tiny", "search": {"target_users": 60, "space": {}},
                "slos": [{"metric": "ttft", "limit_s": 2.0}, {"metric": "itl", "limit_s": 0.05}]}
    strict = {**cluster, "name": "strict", "slos": [{"metric": "ttft", "limit_s": 0.001}]}
    profile = load_profile("quick").model_dump(mode="json")
    profile |= {"name": "small", "screen_s": 8.0, "search_population": 6, "http_rung_s": 5.0, "http_users": 6,
                "seeds": 2}
    paths = {}
    for name, value in (("cluster", cluster), ("strict", strict), ("profile", profile)):
        paths[name] = folder / f"{name}.yaml"
        paths[name].write_text(yaml.safe_dump(value))
    return paths


def spoc(*arguments: object, check: int | None = 0) -> Done:
    """`spoc search …` in this process: starting Python anew for each question would take longer than the answer."""
    result = CliRunner().invoke(app, ["search", *map(str, arguments)])
    done = Done(result.exit_code, result.stdout, result.stderr)
    if isinstance(result.exception, SpocError):
        done = Done(result.exception.exit_status, result.stdout, result.exception.message)
    elif result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert check is None or done.returncode == check, done.stderr
    return done


def run_arguments(small: dict[str, Path], out: Path, cluster: str = "cluster") -> list[object]:
    return ["run", small[cluster], "--profile", small["profile"], "--trials", TRIALS, "--seed", 3, "--no-confirm",
            "--out", out]


@pytest.fixture(scope="module")
def searched(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("searched") / "search"
    spoc(*run_arguments(small, out))
    return out


def test_the_search_leaves_a_table_a_study_and_evidence(searched):
    table = read_table(searched / "trials.parquet", schemas.TRIALS)
    assert len(table) == TRIALS and (searched / "study.db").is_file()
    assert set(table["state"]) <= {"complete", "infeasible", "failed", "duplicate", "invalid"}
    for row in table.itertuples():
        if row.state in ("complete", "infeasible"):
            evidence = searched / row.evidence
            names = {"command.txt", "engine.json", "requests.parquet", "metrics.parquet", "rung.json", "verdict.json"}
            assert names <= {path.name for path in evidence.iterdir()}


def test_show_and_best_answer_from_the_folder(searched):
    shown = spoc("show", searched).stdout
    assert "Pareto front at 60 users" in shown and "knee" in shown and "vllm serve openai/gpt-oss-120b" in shown
    result = json.loads(spoc("show", searched, "--json", "-").stdout)
    assert result["simulated"] and result["trials"] == TRIALS and result["knee"]["state"] == "complete"
    assert result["findings"] and {row["trial"] for row in result["front"]}
    command = spoc("best", searched).stdout.strip()
    assert command.startswith("vllm serve openai/gpt-oss-120b --tensor-parallel-size 4")
    compose = yaml.safe_load(spoc("best", searched, "--format", "compose").stdout)
    assert compose["services"]["vllm"]["command"][:2] == ["--model", "openai/gpt-oss-120b"]
    pod = yaml.safe_load(spoc("best", searched, "--format", "kubernetes").stdout)
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert "unknown format 'helm'" in spoc("best", searched, "--format", "helm", check=2).stderr


def test_a_folder_that_holds_a_search_is_not_overwritten(small, searched):
    assert "holds a search already" in spoc(*run_arguments(small, searched), check=2).stderr


def test_trials_that_other_slos_judged_are_not_taken_over(small, searched, tmp_path):
    copy = shutil.copytree(searched, tmp_path / "search")
    settings = json.loads((copy / SETTINGS).read_text())
    settings["cluster"]["slos"][0]["limit_s"] = 0.001
    (copy / SETTINGS).write_text(json.dumps(settings))
    assert "holds a search of another space, workload, SLOs" in spoc("resume", copy, check=2).stderr


def test_a_search_that_another_process_works_on_is_refused(small, searched):
    with only_worker(searched):
        assert "another process is searching in" in spoc("resume", searched, check=2).stderr


def test_goodput_is_an_objective_on_request(small, tmp_path):
    arguments = run_arguments(small, tmp_path / "good")
    arguments[arguments.index("--trials") + 1] = 3
    done = spoc(*arguments, "--objective", "goodput", "--json", "-")
    result = json.loads(done.stdout)
    assert result["objectives"][0] == "goodput_per_s" and result["knee"]["goodput_per_s"] > 0
    assert "requests/s within the limits" in result["findings"][0]
    assert "goodput" in spoc("show", tmp_path / "good").stdout
    assert "objective" in spoc(*run_arguments(small, tmp_path / "bad"), "--objective", "profit", check=2).stderr


@pytest.mark.slow
def test_kill_9_then_resume_gives_the_same_search(small, searched, tmp_path):
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-m", "spoc_lib", "search", *map(str, run_arguments(small, out))],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(out.glob("trials/*/verdict.json"))) < 5:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if not (out / "result.json").exists():
        assert "spoc search resume" in spoc("show", out, check=2).stderr
    spoc("resume", out)
    columns = ["state", "flags", "ttft_p95_s", "output_tokens_per_s"]
    one, other = (read_table(folder / "trials.parquet", schemas.TRIALS) for folder in (searched, out))
    other = other[other["failure_class"] != "interrupted"]
    assert one[columns].values.tolist() == other[columns].values.tolist()
    assert json.loads(spoc("best", out, "--json", "-").stdout)["flags"] == json.loads(
        spoc("best", searched, "--json", "-").stdout)["flags"]


def test_resume_goes_on_to_more_trials(searched):
    result = json.loads(spoc("resume", searched, "--trials", TRIALS + 4, "--json", "-").stdout)
    assert result["trials"] == TRIALS + 4


def test_no_feasible_point_is_said_with_the_nearest(small, tmp_path):
    done = spoc(*run_arguments(small, tmp_path / "strict", "strict"), check=1)
    assert "No trial meets the SLOs at 60 users. The nearest is trial" in done.stdout
    best = spoc("best", tmp_path / "strict", check=1)
    assert best.stdout.startswith("vllm serve") and "No trial meets the SLOs" in best.stderr


@pytest.mark.slow
@pytest.mark.alone
def test_the_knee_is_confirmed_over_http_beside_the_twin(small, tmp_path):
    arguments = [a for a in run_arguments(small, tmp_path / "search") if a != "--no-confirm"]
    done = spoc(*arguments, "--json", "-")
    confirmation, = json.loads(done.stdout)["confirmations"]
    assert confirmation["role"] == "knee" and confirmation["users"] == 6, confirmation
    if confirmation["failure_class"] == "invalid-rung":
        pytest.skip(f"this machine is too busy for a client on time: {confirmation['sentence']}")
    assert confirmation["http"]["output_tokens_per_s"] > 0, confirmation
    assert confirmation["ratio"]["output_tokens_per_s"] == pytest.approx(1.0, abs=0.3), confirmation
    evidence = tmp_path / "search" / "confirmations" / confirmation["evidence"]
    assert (evidence / "http" / "server.log").is_file() and (evidence / "http" / "requests.parquet").is_file()
