"""What a batch is told, who takes turns, and what it says; whole batches are in test_whole and in tests/chaos."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.core.errors import GateError, InputError
from spoc_lib.pipeline import batch
from spoc_lib.pipeline.batch import Outcome, begin, compare, lane, reopen, run_batch, summary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "outputs"


def with_engine(**engine) -> Cluster:
    spec = yaml.safe_load((ROOT / "data/clusters/sim-4xh100.yaml").read_text())
    return Cluster.model_validate(spec | {"engine": engine})


def told(**more) -> dict:
    return {"profile": None, "seed": None, "settings": []} | more


def test_clusters_that_share_an_engine_take_turns():
    far, same = (with_engine(kind="remote", base_url=url) for url in ("http://h:1", "http://h:1/v1/"))
    other = with_engine(kind="remote", base_url="http://h:2")
    own, boxed = with_engine(kind="process", command=["x"]), with_engine(kind="container", image="i")
    assert lane(far) == lane(same) != lane(other)
    assert lane(own) == lane(boxed) == "this machine"
    assert lane(load_cluster("sim-4xh100")) != lane(load_cluster("sim-2xh200"))


def test_a_batch_remembers_what_it_was_told(tmp_path):
    (tmp_path / "mine.yaml").write_text((ROOT / "data/clusters/sim-2xh200.yaml").read_text())
    made = begin(["sim-4xh100", "mine.yaml"], profile="standard", seed=7, settings=["users=3"], batch_id="night")
    again = reopen()
    assert again.folder == made.folder.resolve() == reopen("night").folder
    assert again.state["batch"] == {"clusters": ["sim-4xh100", str(tmp_path / "mine.yaml")], "settings": ["users=3"]}
    assert (again.state["profile"], again.state["seed"]) == ("standard", 7)


def test_two_files_with_one_name_are_refused(tmp_path):
    (tmp_path / "copy.yaml").write_text((ROOT / "data/clusters/sim-2xh200.yaml").read_text())
    with pytest.raises(InputError, match="both describe a cluster named 'sim-2xh200'"):
        begin(["sim-2xh200", "copy.yaml"], **told())


def test_a_broken_file_fails_its_cluster_and_only_a_batch_of_nothing_else(tmp_path, outputs):
    (tmp_path / "broken.yaml").write_text("name: [")
    with pytest.raises(InputError, match="not valid YAML.*unknown cluster 'nowhere'"):
        begin(["broken.yaml", "nowhere"], **told())
    assert not outputs.exists()
    begin(["broken.yaml", "sim-2xh200"], **told())


def test_what_cannot_be_resumed_says_so():
    with pytest.raises(InputError, match="no batch to resume"):
        reopen()
    with pytest.raises(InputError, match="no run 'gone'"):
        reopen("gone")
    batch.Run.create("c", "plain")
    with pytest.raises(InputError, match="is no batch"):
        reopen("plain")


def test_a_cluster_that_broke_meanwhile_is_an_outcome_and_without_a_run_there_is_nothing_to_compare(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / "data/clusters/sim-2xh200.yaml").read_text())
    made = begin(["mine.yaml"], **told())
    path.write_text("name: [")
    said: list[str] = []
    outcomes = run_batch(made, jobs=1, say=said.append)
    assert [(one.state, one.status) for one in outcomes] == [("failed", 2)]
    with pytest.raises(GateError, match="no cluster finished"):
        compare(made, outcomes, said.append)


def test_the_summary_names_each_cause_and_the_way_on():
    made = begin(["sim-2xh200"], **told(batch_id="b"))
    failed = Outcome("c", "c-b", "failed", 1, "spoc: why", 2.0)
    lines = summary(made, [Outcome("a", "a-b", "done", 0, "", 61.0), failed])
    assert lines[:2] == ["a: done after 61 s", "c: failed after 2 s (exit 1): spoc: why"]
    assert lines[2].endswith("; go on with: spoc batch --resume --run-id b")
    assert len(summary(made, [Outcome("a", "a-b", "done", 0, "", 61.0)])) == 1
