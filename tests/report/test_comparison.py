"""Runs against a reference: real differences are called real, noise is not, and what may not be compared is said."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from typer.testing import CliRunner

from spoc_lib.cli.app import app
from spoc_lib.core.errors import InputError
from spoc_lib.report.answer import Answer, distinct
from spoc_lib.report.comparison import against, compare_runs
from spoc_lib.sweep.compare import Swept, compare


@pytest.fixture(scope="module")
def answers(made_run, tmp_path_factory):
    """Several sweeps of the same truth (120 users), and several of 15 % fewer."""
    folder = tmp_path_factory.mktemp("runs")
    return {(truth, seed): Answer.read(made_run(folder / f"r{truth}-{seed}", truth, seed=seed))
            for truth in (120, 102) for seed in range(6)}


def test_runs_of_one_truth_are_hardly_ever_told_apart(answers):
    """At 90 % one in ten may be, for either reason; the test errs to the safe side."""
    told = [against(answers[120, a], answers[120, b]).verdict for a in range(6) for b in range(a)]
    assert set(told) <= {"no difference shown", "fewer", "more"}
    assert sum(verdict != "no difference shown" for verdict in told) <= 0.1 * len(told)


def test_fifteen_percent_fewer_users_is_found_and_its_interval_covers_the_truth(answers):
    found = [against(answers[102, seed], answers[120, seed]) for seed in range(6)]
    assert sum(one.regression for one in found) >= 5
    assert all(one.low <= 102 / 120 <= one.high for one in found)


def test_a_regression_of_an_engine_version_is_named_in_one_sentence(made_run, tmp_path):
    old = Answer.read(made_run(tmp_path / "old", 120, seed=1))
    new = Answer.read(made_run(tmp_path / "new", 102, seed=2, version="0.33.0"))
    [one] = compare_runs([old, new])
    assert one.sentence.startswith("the twin of vLLM 0.33.0 against the twin of vLLM 0.32.0: -1")
    assert "% users (" in one.sentence and "because ITL p95 of all personas at 1" in one.sentence
    assert one.changed == ["engine: the twin of vLLM 0.33.0 against the twin of vLLM 0.32.0"]
    assert one.fewer_ratio > 0.9


@pytest.mark.parametrize("changed, words", [({"personas": "others"}, "other personas"),
                                            ({"gap_cap_s": 30.0}, "other cap on think time (30 s against 60 s)")])
def test_other_questions_are_not_compared(made_run, tmp_path, changed, words):
    one = Answer.read(made_run(tmp_path / "one", 120, seed=1))
    other = Answer.read(made_run(tmp_path / "other", 102, seed=2, **changed))
    found = against(other, one)
    assert found.verdict == "not comparable" and words in found.sentence and not found.regression


def test_an_unresolved_run_is_open(answers):
    one, other = answers[120, 0], answers[102, 0]
    other.capacity["verdict"] = "unresolved"
    assert against(other, one).verdict == "open"
    other.capacity["verdict"] = "resolved"


def test_one_run_alone_is_refused(answers):
    with pytest.raises(InputError, match="at least two runs"):
        compare_runs([answers[120, 0]])


def test_two_runs_of_one_cluster_get_names_of_their_own(answers):
    assert [a.cluster.name for a in distinct([answers[120, 0], answers[102, 0]])] == ["r120-0", "r102-0"]


def test_the_command_fails_on_a_regression_and_only_on_one(made_run, tmp_path):
    paths = [str(made_run(tmp_path / name, truth, seed=seed))
             for name, truth, seed in (("old", 120, 1), ("new", 102, 2), ("same", 120, 3))]
    run = CliRunner().invoke
    done = run(app, ["compare", paths[0], paths[1], "--fail-on-regression"])
    assert done.exit_code == 1 and "% users" in done.output and "parametric bootstrap" in done.output
    assert run(app, ["compare", paths[0], paths[1]]).exit_code == 0
    assert run(app, ["compare", paths[0], paths[2], "--fail-on-regression"]).exit_code == 0


def test_a_cluster_whose_rungs_all_miss_a_limit_has_no_ratio_there(made_run, tmp_path):
    whole = Swept.read(made_run(tmp_path / "one", 120, seed=1) / "sweep")
    late = whole.limits["metric"] == "itl"
    missed = whole.limits.assign(**{name: whole.limits[name].mask(late, share) for name, share in (
        ("beyond_ratio", 0.9), ("beyond_low_ratio", 0.8), ("beyond_high_ratio", 0.95))})
    (row,) = compare([whole, replace(whole, limits=missed)], "itl").to_dict("records")
    assert row["users"] == 0 and row["reference_users"] > 100 and pd.isna(row["ratio"])
