"""Run folders: created once, opened by name, held by one writer, their state whole at every moment."""

from __future__ import annotations

import pytest

from spoc_lib.cli import main
from spoc_lib.core.errors import InputError
from spoc_lib.pipeline.execute import choose_stages, run_cluster
from spoc_lib.pipeline.runs import Run
from spoc_lib.report import index


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    return tmp_path


def test_a_run_is_created_once_and_found_again():
    run = Run.create("c", "mine", {"cluster": "c"})
    run.set_stage("01", state="done")
    run.set_stage("02", state="running")
    run.set_stage("02", state="failed", reason="x")
    assert Run.open("mine").stage_state("02") == {"state": "failed", "reason": "x"}
    assert Run.open(run.folder).stage_state("01")["state"] == "done"
    with pytest.raises(InputError, match="exists"):
        Run.create("c", "mine")


def test_two_runs_in_one_second_get_two_folders():
    assert Run.create("c").folder != Run.create("c").folder


@pytest.mark.parametrize("name", ["../escape", "a/b"])
def test_a_run_id_cannot_leave_the_outputs_folder(name):
    with pytest.raises(InputError, match="plain name"):
        Run.create("c", name)


def test_latest_is_the_newest_of_that_cluster():
    Run.create("b", facts={"cluster": "b"})
    newest = Run.create("a", facts={"cluster": "a"})
    Run.create("b", facts={"cluster": "b"})
    assert Run.latest("a") == newest
    with pytest.raises(InputError, match="begin one, without --resume"):
        Run.latest("absent")


def test_a_damaged_run_stands_in_no_other_runs_way(outputs):
    newest = Run.create("a", facts={"cluster": "a"})
    for name, text in (("cut", '{"half'), ("other", "[]"), ("less", "{}")):
        (outputs / name).mkdir()
        (outputs / name / "run.json").write_text(text)
        with pytest.raises(InputError, match="run.json"):
            Run.open(name).stage_state("03")
    assert Run.latest("a") == newest and Run.all() == [newest]


def test_one_writer_at_a_time():
    run = Run.create("c")
    with run.exclusive(), pytest.raises(InputError, match="another process"), Run(run.folder).exclusive():
        pass


def test_stages_are_chosen_in_order_and_unknown_ones_refused():
    assert choose_stages() == ["01", "02", "03", "04", "05"]
    assert choose_stages("4,2") == ["02", "04"]
    assert choose_stages(start="03") == ["03", "04", "05"]
    with pytest.raises(InputError, match="no notebook 09"):
        choose_stages("9")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"cluster_name": "nowhere"}, "unknown cluster 'nowhere'"),
        ({"profile": "hasty"}, "unknown profile 'hasty'"),
        ({"settings": {"01": {"users": "many"}}}, "must be a whole number"),
    ],
)
def test_bad_input_is_refused_before_a_run_folder_exists(outputs, arguments, words):
    given = {
        "cluster_name": "sim-4xh100",
        "profile": "quick",
        "seed": 1,
        "stages": ["01"],
        "settings": {},
        "say": print,
    }
    with pytest.raises(InputError, match=words):
        run_cluster(**{**given, **arguments})
    assert list(outputs.iterdir()) == []


def test_the_index_lists_whole_and_damaged_runs(outputs):
    Run.create("c", "good", {"cluster": "c<script>"})
    (outputs / "bad").mkdir()
    (outputs / "bad" / "run.json").write_text('{"half')
    page = index.rebuild(outputs).read_text()
    assert "good" in page and "damaged" in page and "c&lt;script&gt;" in page


def test_a_file_where_a_folder_is_wanted_is_one_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path / "file"))
    monkeypatch.setattr("sys.argv", ["spoc", "run", "sim-4xh100"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1 and "spoc: a file stands where a folder is wanted" in capsys.readouterr().err
