"""Paths in a cluster file are meant from its own folder, whoever reads it and wherever it works; a run keeps the files
that they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from spoc_lib import config
from spoc_lib.core.errors import InputError
from spoc_lib.pipeline import record
from spoc_lib.pipeline.repeat import as_recorded
from spoc_lib.pipeline.runs import Run
from spoc_lib.report import digests, provenance
from spoc_lib.workload.personas import load_personas


@pytest.fixture
def mine(tmp_path, monkeypatch) -> Path:
    """A cluster file with a GPU, a model, personas and a corpus of its own beside it; the reader works elsewhere."""
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    (folder / "files").mkdir(parents=True)
    elsewhere.mkdir()
    data = config.data_dir()
    for source, name in (("gpus/h200-sxm", "gpu"), ("models/gpt-oss-120b", "model"), ("personas/tiny", "people")):
        shutil.copy(data / f"{source}.yaml", folder / "files" / f"{name}.yaml")
    told = yaml.safe_load((data / "clusters" / "sim-2xh200.yaml").read_text())
    told |= {"model": "./files/model.yaml", "personas": "files/people.yaml", "corpus": "files"}
    told["hardware"]["gpu"] = "files/../files/gpu.yaml"
    (folder / "cluster.yaml").write_text(yaml.safe_dump(told))
    monkeypatch.chdir(elsewhere)
    return folder / "cluster.yaml"


def test_paths_in_a_cluster_file_are_meant_from_its_folder(mine, tmp_path, monkeypatch):
    cluster, files = config.load_cluster(str(mine)), mine.parent / "files"
    assert cluster.hardware.gpu == str(files / "gpu.yaml") and cluster.model == str(files / "model.yaml")
    assert cluster.personas == str(files / "people.yaml") and cluster.corpus == str(files)
    monkeypatch.chdir(mine.parent.parent)
    assert config.load_cluster("mine/cluster.yaml") == cluster
    (files / "gpu.yaml").unlink()
    with pytest.raises(InputError, match="unknown gpu"):
        config.load_cluster(str(mine))


def test_recorded_sessions_too_and_a_set_on_a_hub_stays_one(mine):
    told = yaml.safe_load(mine.read_text())
    for given, meant in (("traces:files", f"traces:{mine.parent / 'files'}"), ("traces:owner/set", "traces:owner/set")):
        mine.write_text(yaml.safe_dump(told | {"personas": given}))
        assert config.load_cluster(str(mine)).personas == meant


def test_a_run_keeps_what_the_cluster_file_names(mine, tmp_path):
    cluster, run = config.load_cluster(str(mine)), tmp_path / "run"
    parameters = {"cluster": str(mine), "profile": "quick"}
    kept = record.keep_inputs(run, cluster, parameters)
    assert set(kept) == {"cluster", "profile", "personas", "model", "gpu"}
    before = digests.inputs(cluster, parameters)
    shutil.rmtree(mine.parent / "files")
    again = config.load_cluster(str(run / kept["cluster"]))
    assert config.load_gpu(again.hardware.gpu) and config.load_model(again.model) and load_personas(again.personas)
    after = digests.inputs(again, parameters | {"cluster": str(run / kept["cluster"])})
    assert {name for name in before if before[name] != after[name]} == {"cluster"}, "only the file's own bytes"


@pytest.mark.parametrize("gone", ["gpu", "model"])
def test_a_repeat_takes_the_files_as_they_were(mine, tmp_path, gone):
    run = Run.create("x", "x-1", {"cluster": "x"}, tmp_path / "outputs")
    parameters = {"cluster": str(mine), "profile": "quick", "personas": "", "seed": 1}
    kept = record.keep_inputs(run.folder, config.load_cluster(str(mine)), parameters)
    stage = {"parameters": parameters, "inputs": kept}
    assert as_recorded(run, stage) == parameters | {"run_dir": ""}
    file = mine.parent / "files" / f"{gone}.yaml"
    file.write_text(file.read_text() + "# changed\n")
    assert as_recorded(run, stage)["cluster"] == str(run.folder / kept["cluster"])
    file.unlink()
    again = config.load_cluster(as_recorded(run, stage)["cluster"])
    assert {"gpu": again.hardware.gpu, "model": again.model}[gone] == str(run.folder / kept[gone])


def test_a_file_of_ones_own_is_called_by_its_name_wherever_it_lies(mine, tmp_path):
    cluster = config.load_cluster(str(mine))
    kept = record.keep_inputs(tmp_path / "run", cluster, {"cluster": str(mine), "profile": "quick"})
    for one in (cluster, config.load_cluster(str(tmp_path / "run" / kept["cluster"]))):
        assert (one.model_name, one.hardware.gpu_name) == ("model", "gpu")
        made = provenance.collect(one, config.load_profile("quick"), {"seed": 1}, 2.0)
        assert made["server"]["hardware"]["gpu"] == "gpu" and str(tmp_path) not in json.dumps(made)
