"""The study: order, cache, classes of failure, seeds, kill -9 and resume."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy
from optuna.samplers import NSGAIISampler
from optuna.trial import TrialState

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.search import pareto
from spoc_lib.search import storage as search_storage
from spoc_lib.search.evaluate import TrialFailure, measurement
from spoc_lib.search.space import build_space
from spoc_lib.search.storage import open_storage
from spoc_lib.search.study import Proposal, SearchStudy, record_of
from spoc_lib.search.table import measured_engines, trials_table

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "analytic.py"
spec = importlib.util.spec_from_file_location("analytic_server", PROGRAM)
analytic = importlib.util.module_from_spec(spec)
sys.modules["analytic_server"] = analytic
spec.loader.exec_module(analytic)
REFERENCE = pareto.Reference(analytic.TTFT_LIMIT_S, analytic.ITL_LIMIT_S, "test")


def test_the_defaults_are_trial_0_and_the_number_is_kept(tmp_path):
    study = analytic.study(tmp_path)
    study.run(20)
    table = trials_table(study.trials(), REFERENCE)
    assert len(table) == 20 and table["trial"].tolist() == list(range(20))
    assert record_of(study.trials()[0])["flags"] == study.space.defaults
    assert isinstance(study.study.sampler, NSGAIISampler)
    assert table["hypervolume"].is_monotonic_increasing and table["hypervolume"].iloc[-1] > 0
    assert set(table[table["on_front"]]["state"]) == {"complete"}


def test_the_same_seed_gives_the_same_trials_and_another_does_not(tmp_path):
    runs = [analytic.study(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    for one in runs:
        one.run(25)
    first, second, other = map(analytic.sequence, runs)
    assert first == second != other


def test_no_trial_is_wasted_on_a_known_or_invalid_engine(tmp_path):
    evaluator = analytic.FormulaEvaluator()
    study = analytic.study(tmp_path, evaluator=evaluator)
    study.run(40)
    assert len(evaluator.evaluated) == 40
    assert all(study.space.invalid(flags) is None for flags in evaluator.evaluated)


def small(tmp_path, **search) -> SearchStudy:
    """Two flags with few values: repeats and refused combinations cannot be avoided."""
    base = load_cluster("sim-4xh100").model_dump()
    space = build_space(Cluster.model_validate({**base, "search": {"target_users": 150, "space": search}}))
    evaluator = analytic.FormulaEvaluator()

    def evaluate(flags, folder, repeat=0, whole=space.context):
        return analytic.FormulaEvaluator.evaluate(evaluator, {**whole, **flags}, folder, repeat)

    evaluator.evaluate = evaluate
    return SearchStudy(space, evaluator, tmp_path, "workload", 0, 4, [space.defaults])


def test_an_exhausted_space_is_answered_from_the_cache(tmp_path):
    study = small(tmp_path, max_num_batched_tokens=[2048, 8192], enable_prefix_caching=[True, False])
    study.run(12)
    table = trials_table(study.trials(), REFERENCE)
    assert len(study.evaluator.evaluated) == 4 == (table["state"] != "duplicate").sum()
    repeats = table[table["state"] == "duplicate"]
    for row in repeats.itertuples():
        first = table.iloc[int(row.duplicate_of)]
        assert (row.flags, row.ttft_p95_s, row.violation) == tuple(first[["flags", "ttft_p95_s", "violation"]])
    assert not repeats["on_front"].any()


def test_invalid_combinations_are_never_evaluated(tmp_path):
    study = small(tmp_path, max_num_batched_tokens=[64, 8192], max_num_seqs=[128])
    study.initial = [study.space.defaults, {"max_num_batched_tokens": 64, "max_num_seqs": 128}]
    study.run(2)
    record = record_of(study.trials()[1])
    assert record["state"] == "invalid" and "max_num_batched_tokens (64)" in record["reason"]
    assert study.trials()[1].state == TrialState.FAIL and len(study.evaluator.evaluated) == 1


def test_a_failed_trial_has_a_class_and_no_number(tmp_path):
    study = analytic.study(tmp_path)
    crash = {**study.space.defaults, "gpu_memory_utilization": 0.95, "max_num_batched_tokens": 32768}
    study.initial = [study.space.defaults, crash, crash]
    study.run(3)
    table = trials_table(study.trials(), REFERENCE)
    assert table["state"].tolist() == ["complete", "failed", "duplicate"]
    assert table["failure_class"].tolist()[1:] == ["out-of-memory"] * 2
    assert table.iloc[1][list(pareto.OBJECTIVES)].isna().all() and not table.iloc[1]["on_front"]
    assert (tmp_path / table.iloc[1]["evidence"] / "verdict.json").is_file()
    assert len(study.evaluator.evaluated) == 2  # a known failure is not paid for again


def test_a_missed_slo_is_infeasible_and_off_the_front(tmp_path):
    study = analytic.study(tmp_path, evaluator=analytic.FormulaEvaluator(slowdown=40.0))
    study.run(8)
    table = trials_table(study.trials(), REFERENCE)
    assert set(table["state"]) <= {"infeasible", "failed"} and not table["on_front"].any()
    assert (table["violation"].dropna() > 0).all() and table["hypervolume"].iloc[-1] == 0
    assert all(t.constraints for t in study.trials() if t.state == TrialState.COMPLETE)


def test_repeats_are_measured_again_and_averaged(tmp_path):
    study = analytic.study(tmp_path)
    study.propose = lambda s, slot: Proposal(s.space.defaults, repeat=True)
    study.run(3)
    table = trials_table(study.trials(), REFERENCE)
    assert len(study.evaluator.evaluated) == 3 and table["state"].tolist() == ["complete"] * 3
    assert measured_engines(table)["repeats"].tolist() == [3]


def test_goodput_takes_the_place_of_throughput_on_request(tmp_path):
    plain, study = analytic.study(tmp_path / "plain"), analytic.study(tmp_path / "good")
    study.space = dataclasses.replace(study.space, objectives=pareto.objectives("goodput"))
    study.evaluator.objectives = study.space.objectives
    study.run(6)
    table = trials_table(study.trials(), REFERENCE, study.space.objectives)
    assert study.study.metric_names[0] == "goodput_per_s" and study.name != plain.name
    points = table[["goodput_per_s", "ttft_p95_s", "itl_p95_s"]].to_numpy(float)
    measured = table["ttft_p95_s"].notna().to_numpy()
    assert [t.values for t in study.trials() if t.values] == points[measured].tolist()
    front = pareto.front(points, (table["state"] == "complete").to_numpy())
    assert table["on_front"].tolist() == front.tolist() and front.any()
    assert (table["output_tokens_per_s"].notna() == measured).all()


def row(**changes):
    base = {"completed": 100, "failed": 0, "verdict": "met", "reason": "", "output_tokens_per_s": 10.0,
            "ttft_p95_s": 1.0, "itl_p95_s": 0.01}
    return {**base, **changes}


@pytest.mark.parametrize(("changes", "words"), [
    ({"failed": 20}, "20 of 120 requests failed"),
    ({"completed": 10}, "only 10 requests completed"),
    ({"ttft_p95_s": float("inf")}, "infinite"),
    ({"itl_p95_s": float("nan")}, "infinite or missing"),
    ({"verdict": "invalid", "reason": "Little's law misses by 9%"}, "Little's law"),
])
def test_collapsed_trials_are_failures(changes, words):
    with pytest.raises(TrialFailure, match=words):
        measurement(row(**changes), [], users=100, driver="virtual", duration_s=1.0)


def test_constraints_are_shares_of_the_limit():
    slo = [{"persona": "all", "metric": "ttft", "percentile": 95.0, "limit_s": 5.0, "value_s": 6.0, "samples": 40},
           {"persona": "p", "metric": "itl", "percentile": 95.0, "limit_s": 0.05, "value_s": float("inf"),
            "samples": 9},
           {"persona": "all", "metric": "error_rate", "percentile": 99.0, "value_s": float("nan"), "samples": 40,
            "beyond_ratio": 0.03},
           {"persona": "q", "metric": "ttft", "percentile": 95.0, "limit_s": 5.0, "value_s": float("nan"),
            "samples": 0}]
    found = measurement(row(), slo, users=100, driver="virtual", duration_s=1.0)
    assert found.constraints == {"all ttft p95": pytest.approx(0.2), "p itl p95": 100.0,
                                 "all error_rate p99": pytest.approx(2.0)}
    assert found.violation == pytest.approx(102.2)


def test_a_folder_keeps_to_its_search(tmp_path):
    analytic.study(tmp_path, seed=1).run(2)
    with pytest.raises(InputError, match="another space, workload, SLOs, engine version or seed"):
        analytic.study(tmp_path, seed=2).run(2)


def test_an_unusable_database_is_one_sentence_without_the_password():
    with pytest.raises(InputError) as error:
        open_storage("postgresql+psycopg://me:secret@127.0.0.1:1/none")
    assert "secret" not in error.value.message and "127.0.0.1" in error.value.message
    with pytest.raises(InputError, match="not a database URL"):
        open_storage("nonsense")


def test_a_database_that_is_cut_off_says_which_file_to_remove(tmp_path):
    analytic.study(tmp_path).run(2)
    os.truncate(tmp_path / "study.db", 300)
    with pytest.raises(InputError, match=f"remove {tmp_path / 'study.db'}, and its trials are measured again"):
        analytic.study(tmp_path).run(2)


def test_a_database_that_is_locked_when_it_is_opened_is_not_to_be_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(search_storage, "LOCK_WAIT_S", 0.1)
    other = sqlite3.connect(tmp_path / "study.db")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(InputError, match="cannot be used") as error:
        analytic.study(tmp_path).run(2)
    other.close()
    assert "remove" not in error.value.message


def test_a_full_disk_is_told_as_one_and_loses_nothing(tmp_path):
    """Whoever asks: SQLite says so in its own words, SQLAlchemy and Optuna in theirs."""
    study = analytic.study(tmp_path)
    study.run(2)
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'study.db'}")
    with pytest.raises(OSError, match="No space left on device") as full, search_storage.answering(tmp_path), \
            engine.begin() as database:
        database.exec_driver_sql("PRAGMA max_page_count = 1")
        database.exec_driver_sql("CREATE TABLE more AS SELECT hex(randomblob(1000000)) AS text")
    assert full.value.errno == errno.ENOSPC
    engine.dispose()
    analytic.study(tmp_path).run(3)


def test_a_locked_database_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(search_storage, "LOCK_WAIT_S", 0.1)
    study = analytic.study(tmp_path)
    study.run(3)
    other = sqlite3.connect(tmp_path / "study.db")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(InputError, match="stopped answering .*spoc search resume"):
        study.run(5)
    other.close()
    rest = analytic.study(tmp_path)
    rest.run(5)
    whole = analytic.study(tmp_path / "whole")
    whole.run(5)
    assert analytic.sequence(rest) == analytic.sequence(whole)


def test_kill_9_and_resume_make_the_trials_of_an_uninterrupted_search(tmp_path):
    whole = analytic.study(tmp_path / "whole")
    whole.run(24)
    folder = tmp_path / "killed"
    for kill_at in (3, 11):  # in the first generation, and later
        process = subprocess.Popen([sys.executable, str(PROGRAM), str(folder), "24", "0.25"], cwd=PROGRAM.parents[2])
        wait_for_trials(folder, kill_at)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    rest = analytic.study(folder)
    rest.run(24)
    assert analytic.sequence(rest) == analytic.sequence(whole)
    lost = [t for t in rest.trials() if t.state == TrialState.FAIL and not record_of(t)]
    table = trials_table(rest.trials(), REFERENCE)
    assert (table["failure_class"] == "interrupted").sum() == len(lost) and len(table) == 24 + len(lost)
    assert not [t for t in rest.trials() if t.state == TrialState.RUNNING]


@pytest.mark.parametrize("at", [1, 5, 6, 7, 12])  # also in the trial that selects a generation's parents
def test_a_trial_that_is_made_again_is_the_same_trial(tmp_path, at):
    whole, cut = analytic.study(tmp_path / "whole"), analytic.study(tmp_path / "cut")
    whole.run(16)
    evaluate = cut.evaluator.evaluate

    def interrupt(flags, folder, repeat=0):
        if len(cut.evaluator.evaluated) == at:
            raise KeyboardInterrupt
        return evaluate(flags, folder, repeat)

    cut.evaluator.evaluate = interrupt
    with pytest.raises(KeyboardInterrupt):
        cut.run(16)
    rest = analytic.study(tmp_path / "cut")
    rest.run(16)
    assert analytic.sequence(rest) == analytic.sequence(whole)


def wait_for_trials(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(list(folder.glob("trials/*/verdict.json"))) >= count:
            time.sleep(0.1)  # into the next trial
            return
        time.sleep(0.02)
    raise AssertionError("the search did not get going")


def test_a_kill_between_the_record_and_the_telling_loses_no_answer(tmp_path):
    whole, cut = analytic.study(tmp_path / "whole"), analytic.study(tmp_path / "cut")
    whole.run(10)
    cut.run(5)
    cut._enqueue(5)
    cut._objective(cut.study.ask())  # answered and recorded; the process dies before Optuna is told
    again = analytic.study(tmp_path / "cut")
    again.run(10)
    assert analytic.sequence(again) == analytic.sequence(whole) and len(again.trials()) == 10
