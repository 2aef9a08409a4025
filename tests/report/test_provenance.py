"""Where numbers come from: in Parquet metadata, in results, in notebooks and pages; without secrets and paths."""

from __future__ import annotations

import json
import os
import re
import subprocess
from types import SimpleNamespace

import nbformat
import pytest
import yaml

from spoc_lib import config
from spoc_lib.core import schemas, stamp
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.core.tables import TableAppender, read_table, write_table
from spoc_lib.pipeline import batch, record, repeat
from spoc_lib.pipeline.runs import Run
from spoc_lib.report import digests, html, provenance
from spoc_lib.report.answer import Answer
from spoc_lib.report.studies import profile_of
from spoc_lib.workload import build_script
from spoc_lib.workload.fingerprint import script_sha256

CHUNK = [{"request": 1, "time_s": 2.0, "tokens": 3.0}]


@pytest.fixture
def stamped(monkeypatch):
    monkeypatch.setenv(stamp.VARIABLE, "")
    stamp.put({"run": "r", "git": "abc"})


def test_every_table_of_a_run_says_where_it_comes_from(stamped, tmp_path):
    write_table(tmp_path / "a.parquet", CHUNK, schemas.CHUNKS)
    appender = TableAppender(tmp_path / "b.parquet", schemas.CHUNKS)
    appender.extend(CHUNK)
    appender.close()
    for name in ("a", "b"):
        assert stamp.read(tmp_path / f"{name}.parquet") == {"run": "r", "git": "abc"}
        assert read_table(tmp_path / f"{name}.parquet", schemas.CHUNKS)["tokens"][0] == 3.0


def test_a_table_outside_of_a_run_has_no_stamp(monkeypatch, tmp_path):
    monkeypatch.delenv(stamp.VARIABLE, raising=False)
    assert stamp.read(write_table(tmp_path / "a.parquet", CHUNK, schemas.CHUNKS)) is None


def test_a_stage_is_recorded_with_versions_hardware_seeds_hashes_and_engine(made_run, tmp_path):
    folder = made_run(tmp_path / "r", 120, seed=5)
    cluster, profile = config.load_cluster("sim-4xh100"), config.load_profile("quick")
    parameters = {"cluster": "sim-4xh100", "profile": "quick", "seed": 5, "run_dir": "/somewhere/r",
                  "personas": "/home/me/mine.yaml"}
    made = provenance.collect(cluster, profile, parameters, 1.0, data=digests.inputs(cluster, parameters),
                              launches=folder / "sweep")
    assert made["engine"]["version"] == "0.32.0" and made["engine"]["calibration_id"] == "7cc016b83f89"
    assert made["seeds"]["workload"] == 5 and made["client"]["memory_gib"] > 0
    assert set(made["data_sha256"]) == {"cluster", "profile", "personas", "model", "gpu", "flags", "calibration",
                                        "cluster_facts"}
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in made["data_sha256"].values())
    assert made["parameters"]["personas"] == "mine.yaml" and "/home" not in json.dumps(made)


def test_the_script_hash_moves_with_its_seed_and_with_nothing_else():
    found = [script_sha256(build_script("tiny", seed)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


def test_the_kept_cluster_file_is_the_same_but_for_secrets(tmp_path):
    told = yaml.safe_load((config.data_dir() / "clusters" / "vllm-cpu.yaml").read_text())
    told["engine"]["environment"] |= {"HF_TOKEN": "hf_never", "OMP_NUM_THREADS": "2"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(told))
    cluster = config.load_cluster(str(tmp_path / "mine.yaml"))
    kept = record.keep_inputs(tmp_path / "run", cluster, {"cluster": str(tmp_path / "mine.yaml"), "profile": "quick"})
    assert set(kept) == {"cluster", "profile", "personas"}
    assert "hf_never" not in (tmp_path / "run" / kept["cluster"]).read_text()
    again = config.load_cluster(str(tmp_path / "run" / kept["cluster"]))
    assert again.engine.environment == {**told["engine"]["environment"], "HF_TOKEN": record.WITHHELD}
    assert again.model_copy(update={"engine": cluster.engine}) == cluster


def test_results_notebook_and_page_carry_it(tmp_path):
    made = provenance.collect(config.load_cluster("sim-4xh100"), config.load_profile("quick"), {"seed": 1}, 2.0)
    write_json(tmp_path / "capacity.json", {"max_users": 3})
    write_json(tmp_path / "search.json", {"strict": True})
    record.into_results(tmp_path, made)
    assert read_json(tmp_path / "capacity.json")["provenance"]["git"] == made["git"]
    assert read_json(tmp_path / "search.json") == {"strict": True}, "working papers stay as they are"
    last = nbformat.v4.new_code_cell("stage.finish()", outputs=[nbformat.v4.new_output(
        "display_data", {"text/plain": provenance.line(made)}, metadata={"spoc": made})])
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T"), last]), tmp_path / "n.ipynb")
    record.into_notebook(tmp_path / "n.ipynb", made)
    page = html.render(tmp_path / "n.ipynb", tmp_path / "n.html", "T", {}).read_text()
    inside = re.search(r'<script type="application/json" id="provenance">(.*?)</script>', page)
    assert json.loads(inside[1]) == json.loads(json.dumps(made))
    assert f"git {made['git']}" in page.split("<footer>")[1] and page.count(f"git {made['git']}") == 1, "said once"


def test_a_repeat_says_what_differs_and_how_the_figures_stand(made_run, tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    one, other = (Run(made_run(tmp_path / name, truth, seed=seed, version=version))
                  for name, truth, seed, version in (("one", 120, 1, "0.32.0"), ("two", 102, 2, "0.33.0")))
    found = {d.what: (d.then, d.now) for d in repeat.differences(one, other)}
    assert found == {"engine.version": ("0.32.0", "0.33.0"), "seeds.search": ("1", "2"), "seeds.workload": ("1", "2")}
    capacity, verdict = repeat.figures(one, other)
    assert re.match(r"capacity: 1[12]\d users \(.* at 90%\) then, (9\d|10\d) users", capacity) and "% users" in verdict
    assert repeat.differences(one, one) == []


def test_a_repeat_takes_the_files_that_the_run_kept_where_they_have_changed(made_run, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text((config.data_dir() / "clusters" / "sim-4xh100.yaml").read_text())
    told = {"cluster": str(mine), "profile": "quick", "personas": "", "seed": 7}
    folder = tmp_path / "run"
    kept = record.keep_inputs(folder, config.load_cluster(str(mine)), told)
    source = SimpleNamespace(folder=folder)
    assert repeat.as_recorded(source, {"parameters": told, "inputs": kept}) == {**told, "run_dir": ""}
    mine.write_text(mine.read_text().replace("count: 4", "count: 2"))
    again = repeat.as_recorded(source, {"parameters": told, "inputs": kept})
    assert config.load_cluster(again["cluster"]).hardware.count == 4 and again["seed"] == 7
    assert again["profile"] == "quick" and again["personas"] == ""


def test_a_report_asks_the_files_that_its_run_kept(made_run, tmp_path):
    run = Run(made_run(tmp_path / "run", 120, seed=1))
    mine = {}
    for what in ("cluster", "profile"):
        mine[what] = tmp_path / f"{what}.yaml"
        source = {"cluster": "clusters/sim-4xh100.yaml", "profile": "profiles/quick.yaml"}[what]
        mine[what].write_text((config.data_dir() / source).read_text())
    told = run.stage_state("03")["parameters"] | {what: str(path) for what, path in mine.items()}
    run.set_stage("03", parameters=told, inputs=record.keep_inputs(run.folder, config.load_cluster("sim-4xh100"), told))
    mine["profile"].write_text(mine["profile"].read_text().replace("gap_cap_s: 60", "gap_cap_s: 6"))
    mine["cluster"].unlink()
    asked = batch._parameters([run], batch._told(run)["profile"], {})
    assert config.load_cluster(asked["cluster"]).name == "sim-4xh100"
    assert config.load_profile(asked["profile"]).gap_cap_s == 60 == profile_of(Answer.read(run.folder)).gap_cap_s


@pytest.mark.parametrize("name, text", [
    *((name, text) for name in ("run.json", "sweep/capacity.json", "sweep/result.json") for text in ("", "[]")),
    ("run.json", "{}"), ("sweep/capacity.json", "{}")])  # fmt: skip
def test_a_damaged_file_of_a_run_is_one_sentence(made_run, tmp_path, name, text):
    folder = made_run(tmp_path / "run", 120, seed=1)
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=re.escape(str(folder / name))):
        Answer.read(folder)


def test_a_repeat_without_the_search_serves_with_the_flags_that_it_had_found(tmp_path):
    write_json(tmp_path / "search" / "result.json", {"best_flags": {"max_num_seqs": 64, "async_scheduling": False}})
    source = SimpleNamespace(folder=tmp_path)
    assert repeat._with_flags(source, {"flags": ""})["flags"] == "max_num_seqs=64 async_scheduling=false"
    assert repeat._with_flags(source, {"flags": "block_size=32"}) == {"flags": "block_size=32"}
    assert repeat._with_flags(source, {"users": 3}) == {"users": 3}


def test_asking_git_writes_nothing_into_the_users_repository(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True,
                       capture_output=True)

    git("init")
    (tmp_path / "file").write_text("text")
    git("add", "file")
    git("commit", "-m", "one")
    os.utime(tmp_path / "file", (1, 1))  # git status would now refresh its index
    index = (tmp_path / ".git" / "index").read_bytes()
    assert len(provenance.git_state(tmp_path)) == 12
    assert (tmp_path / ".git" / "index").read_bytes() == index
