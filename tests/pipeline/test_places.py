"""Where a run lies and a kernel looks: folders of any name, paths from the user's own folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from papermill.parameterize import parameterize_path

from spoc_lib.config.shipped import CHECKOUT
from spoc_lib.core.files import to_json
from spoc_lib.pipeline import execute
from spoc_lib.pipeline.parameters import split_settings
from spoc_lib.pipeline.runs import Run, outputs_dir


@pytest.mark.parametrize("name", ["{x}", "{", "}}{{", "a=b {x} $HOME", "{0}", "50% #1?"])
def test_papermill_takes_a_path_as_it_is(name):
    path = Path("/runs") / name / "r1/04.ipynb"
    assert parameterize_path(execute._literal(path), {"x": "other"}) == str(path)


def test_a_kernel_in_another_folder_finds_what_its_parent_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPOC_OUTPUTS", "mine")
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.delenv("SPOC_DATA", raising=False)
    assert outputs_dir() == tmp_path / "mine" and Run.create("x", "r1").folder == tmp_path / "mine/r1"
    with execute._kernel_environment():
        monkeypatch.chdir("/")
        assert outputs_dir() == tmp_path / "mine" and "SPOC_DATA" not in os.environ
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [str(CHECKOUT), str(tmp_path / "src")]
    assert (os.environ["SPOC_OUTPUTS"], os.environ["PYTHONPATH"]) == ("mine", "src")


def test_a_socket_fits_into_its_folder_s_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 30)))
    with execute._socket_folder() as folder:
        assert len(f"{folder}/kernel-1".encode()) < 107


def test_paths_are_meant_from_the_folder_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert execute.absolute("./c.yaml") == execute.absolute("c.yaml") == str(tmp_path / "c.yaml")
    assert execute.absolute("sim-4xh100") == "sim-4xh100"
    (tmp_path / "mine.jsonl").write_text("")
    chosen = split_settings(["personas=traces:mine.jsonl", "monorepo=src"], ["01"])["01"]
    assert chosen == {"personas": f"traces:{tmp_path / 'mine.jsonl'}", "monorepo": str(tmp_path / "src")}
    assert split_settings(["personas=traces:hub:a/b"], ["01"])["01"] == {"personas": "traces:hub:a/b"}


def test_a_name_that_is_no_utf8_does_not_stop_a_result():
    assert '"/runs/?"' in to_json({"folder": Path(os.fsdecode(b"/runs/\xff"))})
