"""What papermill does to parameters, and the sentences with which we answer."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.pipeline import parameters
from spoc_lib.pipeline.stage import begin

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def test_text_that_papermill_turned_into_a_number_is_refused_with_the_way_out():
    with pytest.raises(InputError, match=r"'run_dir'.*-r \(raw\)"):
        parameters.check("03", {"run_dir": float("inf")})


@pytest.mark.parametrize("value, want", [(True, True), ("false", False), ("True", True)])
def test_flags_arrive_as_text_or_as_truth(value, want):
    assert parameters.check("03", {"confirm_http": value}).confirm_http is want


@pytest.mark.parametrize(
    "number, values, words",
    [
        ("03", {"confirm_http": "maybe"}, "'confirm_http': must be true or false"),
        ("04", {"users": 1.5}, "'users': must be a whole number"),
        ("04", {"users": "many"}, "'users': must be a whole number"),
        ("04", {"users": -1}, "'users'"),
        ("01", {"gap_cap_s": "long"}, "'gap_cap_s': must be a number"),
        ("01", {"userz": 3}, "no parameter 'userz'"),
        ("01", {"users": 10**6 + 1}, "'users': Input should be less than or equal to 1000000"),
        ("02", {"seed": 2**32}, "'seed': Input should be less than or equal to 4294967295"),
        ("03", {"gap_cap_s": "inf"}, "'gap_cap_s': Input should be less than or equal to 86400"),
        ("03", {"gap_cap_s": 10**400}, "'gap_cap_s'"),
        ("03", {"flags": "x" * 10_000_000}, "'flags': must be at most 4096 characters, not 10000000"),
        ("05", {"runs": "a\nb"}, "'runs': must be one line of plain text"),
        ("05", {"run_dir": "a\0b"}, "'run_dir': must be one line of plain text"),
    ],
)
def test_wrong_parameters_are_one_sentence(number, values, words):
    with pytest.raises(InputError) as caught:
        parameters.check(number, values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_papermill_injected_unknown_to_the_notebook_is_refused():
    namespace = {
        "cluster": "sim-4xh100",
        "bogus": 1,
        "In": ["", "cluster = 'x'", "# Parameters\nbogus = 1\n"],
    }
    with pytest.raises(InputError, match="no parameter 'bogus'"):
        parameters.from_notebook("03", namespace)


def test_a_name_that_python_spells_in_another_way_is_refused_too():
    with pytest.raises(InputError, match="no parameter"):  # an identifier with the micro sign means the Greek letter
        parameters.from_notebook("03", {"\u03bc": 1, "In": ["# Parameters\n\u00b5 = 1\n"]})


def test_a_name_too_long_for_any_file_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path))
    for values in ({"cluster": "c" * 4000}, {"profile": "p" * 4000}, {"run_dir": "/" + "r" * 4000}):
        with pytest.raises(InputError, match="unknown|at most 200") as caught:
            begin("03", values)
        assert len(str(caught.value)) < 400
    assert not list(tmp_path.iterdir())


def test_names_of_a_hand_run_notebook_are_left_alone():
    namespace = {"cluster": "sim-2xh200", "rows": 3, "In": ["", "rows = 3"]}
    assert parameters.from_notebook("03", namespace).cluster == "sim-2xh200"


def test_settings_go_to_the_notebooks_that_know_them():
    chosen = parameters.split_settings(["monorepo=/src", "users=8"], ["01", "03", "04", "05"])
    both = {"monorepo": "/src", "users": "8"}
    assert chosen == {"01": both, "03": {"monorepo": "/src"}, "04": both, "05": {}}
    with pytest.raises(InputError, match="no such parameter"):
        parameters.split_settings(["monorepoo=/src"], ["01"])
    with pytest.raises(InputError, match="name=value"):
        parameters.split_settings(["monorepo"], ["01"])


@pytest.mark.parametrize("stage", parameters.STAGES.values(), ids=lambda s: s.number)
def test_each_notebook_is_thin_clean_and_declares_its_parameters_as_literals(stage):
    path = NOTEBOOKS / f"{stage.notebook}.ipynb"
    notebook = json.loads(path.read_text())
    assert path.stat().st_size < 100_000
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    assert max(len("".join(c["source"]).splitlines()) for c in code) <= 30
    tagged = [c for c in code if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    declared = {}
    for node in ast.parse("".join(tagged[0]["source"])).body:
        assert isinstance(node, ast.Assign)
        declared[node.targets[0].id] = ast.literal_eval(node.value)
    assert parameters.check(stage.number, declared).model_dump() == {
        name: field.default for name, field in stage.parameters.model_fields.items()
    }
    assert set(declared) == set(stage.parameters.model_fields)
