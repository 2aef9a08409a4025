"""One whole small pipeline, as a user runs it: real papermill, real HTTP, real Locust; then a batch around it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from spoc_lib.core import stamp
from spoc_lib.pipeline import STAGES

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PROFILE = {
    "name": "tiny",
    "title": "as little as shows everything",
    "audit_users": 10,
    "audit_turns": 4,
    "search_trials": 6,
    "search_population": 4,
    "search_finalists": 1,
    "screen_s": 20,
    "rung_s": 20,
    "warmup_s": 4,
    "http_rung_s": 5,
    "http_users": 6,
    "probes": 5,
    "trace_s": 0.2,
    "gap_cap_s": 2,
    "start": "stationary",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small cluster, a small profile and an outputs folder of its own."""
    folder = tmp_path_factory.mktemp("place")
    cluster = yaml.safe_load((ROOT / "data/clusters/sim-2xh200.yaml").read_text())
    cluster |= {"name": "small", "personas": "tiny", "ladder": {"users": [5, 10, 20, 40, 80]}}
    cluster["engine"] = {**cluster["engine"], "api_key_env": "SPOC_TEST_KEY"}
    cluster["search"] = {"target_users": 10, "space": {"max_num_batched_tokens": [512, 2048, 8192]}}
    cluster["slos"] = [
        {"persona": "all", "metric": "ttft", "percentile": 95, "limit_s": 0.3},
        {"persona": "all", "metric": "itl", "percentile": 95, "limit_s": 0.02},
    ]
    (folder / "small.yaml").write_text(yaml.safe_dump(cluster))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(PROFILE))
    (folder / "outputs").mkdir()
    return folder


def environment(place: Path) -> dict[str, str]:
    return {**os.environ, "SPOC_OUTPUTS": str(place / "outputs"), "SPOC_TEST_KEY": "sk-never-to-be-seen"}


def command(place: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "spoc_lib", "run", "small.yaml", "--profile", "tiny.yaml", *more]


def spoc(place: Path, *more: str, check: int | None = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(command(place, *more), cwd=place, env=environment(place), capture_output=True, text=True)
    assert check is None or done.returncode == check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def whole(place):
    """The folder of one whole run."""
    spoc(place, "--run-id", "small-night")
    return place / "outputs" / "small-night"


def test_every_stage_leaves_its_artefacts_and_its_page(whole):
    state = json.loads((whole / "run.json").read_text())
    assert {n: s["state"] for n, s in state["stages"].items()} == dict.fromkeys(("01", "02", "03", "04", "05"), "done")
    for name in (
        "workload/sessions.parquet",
        "workload/audit.json",
        "search/study.db",
        "search/trials.parquet",
        "sweep/rungs.parquet",
        "sweep/capacity.json",
        "nsight/decomposition.parquet",
        "nsight/verdict.json",
        "report.json",
        "01_workload_modeling.html",
        "02_nsga2_search.html",
        "03_concurrency_sweep.html",
        "04_nsight_trace_analysis.html",
        "05_capacity_report.html",
    ):
        assert (whole / name).stat().st_size > 0, name
    assert not list(whole.rglob("*.part"))
    assert "small-night" in (whole.parent / "index.html").read_text()


def test_the_answer_names_users_interval_slo_and_that_it_is_simulated(whole):
    answer = json.loads((whole / "sweep" / "capacity.json").read_text())
    low, high = answer["interval"]
    assert low <= answer["max_users"] and (high is None or answer["max_users"] <= high)
    assert answer["simulated"] is True and answer["passport"]["simulated"] is True
    assert answer["binding"]["metric"] in ("ttft", "itl")
    assert "simulated" in json.loads((whole / "report.json").read_text())["verdict"][0]


def test_one_rung_was_real_locust_load_and_its_books_balance(whole):
    rungs = pd.read_parquet(whole / "sweep" / "rungs.parquet")
    real = rungs[rungs["driver"] == "locust"].iloc[0]
    assert real["planned"] == real["completed"] + real["failed"] + real["censored"] > 0
    folder = whole / "sweep" / "rungs"
    requests = next(
        pd.read_parquet(p) for p in sorted(folder.glob("*/requests.parquet")) if (p.parent / "chunks.parquet").exists()
    )
    assert len(requests) == real["planned"] and requests["request"].is_unique
    done = requests[requests["outcome"] == "completed"]
    assert (done["output_tokens"] == done["intended_output_tokens"]).all()
    assert (done["prompt_tokens"] == done["intended_prompt_tokens"]).all()


@pytest.mark.parametrize("number", ["01", "02", "03", "04", "05"])
def test_the_page_is_whole_without_a_network(whole, open_page, unframed, number):
    page = next(whole.glob(f"{number}_*.html"))
    text = page.read_text()
    assert page.stat().st_size < 6_000_000
    assert not re.search(r"""<(script|link|img|iframe)[^>]+(src|href)\s*=\s*["']?(https?:)?//""", text)
    dom, log = open_page(page)
    assert dom.count('class="plot-container plotly"') == text.count("Plotly.newPlot('figure-") > 0
    assert not unframed(dom), "each chart stands between its question and a finding"
    assert not re.findall(r"CONSOLE.*(?:Error|Failed).*", log)
    assert "Traceback" not in dom


def content(path: Path) -> bytes:
    """What a reader would see of a file; Parquet is compressed, so its words are read out."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    table = pd.read_parquet(path)
    return repr([table[name].astype(str).unique().tolist() for name in table.select_dtypes(["object", "string"])]
                + list(table.columns)).encode()  # fmt: skip


def test_no_artefact_holds_the_key_that_was_used(whole):
    """Notebooks, pages, Parquet, logs, SQLite, JSON: the key went to the server with every request and nowhere else."""
    files = [path for path in whole.parent.rglob("*") if path.is_file()]
    assert {".ipynb", ".html", ".parquet", ".log", ".db", ".sqlite", ".json"} <= {path.suffix for path in files}
    assert not [path for path in files if b"sk-never-to-be-seen" in content(path)]
    plans = [path for path in files if path.name == "plan.json"]
    assert plans and all(json.loads(path.read_text())["api_key_env"] == "SPOC_TEST_KEY" for path in plans)


def test_a_finished_run_is_not_overwritten_by_accident(place, whole):
    assert "add --resume" in spoc(place, "--run-id", "small-night", check=2).stderr


def test_resume_of_a_finished_run_keeps_all_of_it(place, whole):
    before = (whole / "sweep" / "capacity.json").stat().st_mtime_ns
    assert spoc(place, "--run-id", "small-night", "--resume").stdout.count("kept") == 5
    assert (whole / "sweep" / "capacity.json").stat().st_mtime_ns == before


def test_a_batch_survives_its_failing_clusters(place, whole):
    """It finds the run of an earlier try and keeps it; a cluster that fails and a file that cannot be read stop
    nothing; the summary names both causes."""
    lost = yaml.safe_load((place / "small.yaml").read_text()) | {"name": "lost", "personas": "nobody.yaml"}
    (place / "lost.yaml").write_text(yaml.safe_dump(lost))
    (place / "broken.yaml").write_text("name: [")
    done = subprocess.run(
        [sys.executable, "-m", "spoc_lib", "batch", "lost.yaml", "broken.yaml", "small.yaml", "--jobs", "2",
         "--profile", "tiny.yaml", "--run-id", "night"],
        cwd=place, env=environment(place), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("already, kept") == 4
    assert re.search(r"lost.yaml: failed after \d+ s \(exit 2\): .*nobody.yaml", done.stdout)
    assert re.search(r"broken.yaml: failed after 0 s \(exit 2\): .*not valid YAML", done.stdout)
    assert re.search(r"small.yaml: done", done.stdout) and "users" in done.stdout
    night = place / "outputs" / "night"
    assert [one["state"] for one in json.loads((night / "batch.json").read_text())["outcomes"]] == [
        "failed", "failed", "done"]  # fmt: skip
    assert (night / "05_capacity_report.html").exists() and "nobody.yaml" in (night / "lost.log").read_text()


def test_every_artefact_says_where_it_comes_from(whole):
    """Notebooks, pages, JSON results and every Parquet file, the load's child process included."""
    state = json.loads((whole / "run.json").read_text())
    made = json.loads((whole / "sweep" / "capacity.json").read_text())["provenance"]
    assert made["engine"]["version"] and made["engine"]["calibration_id"] and made["seeds"]["workload"] == 1
    assert {"cluster", "profile", "personas", "script", "calibration"} <= set(made["data_sha256"])
    for number, stage in state["stages"].items():
        assert all((whole / copy).is_file() for copy in stage["inputs"].values())
        notebook = next(whole.glob(f"{number}_*.ipynb"))
        told = json.loads((whole / STAGES[number].folder / "result.json").read_text())["provenance"]
        assert json.loads(notebook.read_text())["metadata"]["spoc"] == told
        assert 'id="provenance"' in notebook.with_suffix(".html").read_text()
    tables = [path for path in whole.rglob("*.parquet") if ".parts" not in str(path)]
    stamps = [stamp.read(path) for path in tables]
    assert len(tables) > 10 and all(found and found["run"] == "small-night" for found in stamps)
    assert {found["stage"] for found in stamps} >= {"01", "02", "03", "04"}


def test_a_run_is_repeated_as_it_was_recorded(place, whole):
    done = subprocess.run(
        [sys.executable, "-m", "spoc_lib", "run", "--from-run", "small-night", "--only", "01", "--run-id", "again"],
        cwd=place.parent, env=environment(place), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads((place / "outputs" / "again" / "repeat.json").read_text())
    assert {one["what"] for one in told["differences"]} <= {"git"}, "the tree may have moved on, nothing else"
    runs = [place / "outputs" / run / "workload" for run in ("small-night", "again")]
    tables = [pd.read_parquet(folder / "sessions.parquet") for folder in runs]
    pd.testing.assert_frame_equal(*tables)


def test_a_notebook_runs_from_plain_papermill(place):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "papermill",
            str(ROOT / "notebooks/04_nsight_trace_analysis.ipynb"),
            str(place / "out.ipynb"),
            "-r",
            "cluster",
            str(place / "small.yaml"),
            "-r",
            "profile",
            str(place / "tiny.yaml"),
            "-p",
            "users",
            "20",
            "-k",
            "python3",
        ],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "given as a parameter" in (place / "out.ipynb").read_text()


@pytest.mark.parametrize(
    "name, value, words", [("bogus", "1", "no parameter 'bogus'"), ("users", "many", "must be a whole number")]
)
def test_plain_papermill_with_a_wrong_parameter_ends_with_a_sentence(place, name, value, words):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "papermill",
            str(ROOT / "notebooks/04_nsight_trace_analysis.ipynb"),
            str(place / "bad.ipynb"),
            "-p",
            name,
            value,
            "-k",
            "python3",
        ],
        cwd=place,
        env=environment(place),
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert words in done.stderr


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--set", "bogus=1"], "no such parameter"),
        (["--only", "07"], "no notebook 07"),
        (["--only", "04", "--set", "trace=absent.sqlite"], "absent.sqlite"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(place, arguments, words):
    done = spoc(place, *arguments, check=2)
    assert words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
