"""The published findings: verdicts by their rules on made-up tables, and SLOs that nobody may move to please them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from spoc_lib.config import load_cluster, load_profile
from spoc_lib.report import paper
from spoc_lib.report.answer import Answer
from spoc_lib.report.paper_claims import BUDGETS, RATIO, USERS, judge, spans
from spoc_lib.report.paper_users import joint
from spoc_lib.report.studies import Study
from spoc_lib.sweep.cases import Case


def study(
    name: str = "sim-2xh200",
    *,
    users: int = 90,
    best=((300.0, 2048), (700.0, 2048), (6000.0, 1024)),
    ratio: float = 1.4,
    itl_small: float = 0.02,
    moves=(80, 100),
) -> Study:
    """A run whose tables hold just what the rules look at; 700 us is the calibrated gap."""
    cluster = load_cluster(name)
    rungs = pd.DataFrame(
        {
            "users": [60, users],
            "verdict": "met",
            "driver": "virtual",
            "sm_active_ratio": [0.3, 0.5],
            "kv_usage_ratio": [0.05, 0.11],
        }
    )
    answer = Answer(
        "run",
        Path("."),
        cluster,
        {"max_users": users, "interval": [users - 5, users + 5]},
        rungs,
        pd.DataFrame(),
        None,
        None,
        None,
        None,
    )
    sensitivity = pd.DataFrame(
        {"asked": ["as asked", "start", "gap cap"], "value": ["", "cold", "30 s"], "users": [users, *moves]}
    )
    budgets = pd.DataFrame(
        [
            {
                "gap_prefill_us": gap,
                "calibrated": gap == 700.0,
                "max_num_batched_tokens": budget,
                "users": 100 if budget == winner else 50,
                "best": budget == winner,
            }
            for gap, winner in best
            for budget in (1024, 2048)
        ]
    )
    arrival = pd.DataFrame({"max_num_batched_tokens": [512, 8192], "ttft_s": [9.0, 4.0], "itl_p95_s": [itl_small, 0.2]})
    throttle = pd.DataFrame({"persona": ["all"], "clock_factor": [0.7], "ratio": [ratio]})
    grid = pd.DataFrame(
        {
            "start": ["cold", "cold"],
            "percentile": [95.0, 99.0],
            "itl_limit_s": [0.05, 0.05],
            "users": [users, users // 3],
        }
    )
    return Study(answer, Case.of(cluster, load_profile("quick")), 60, sensitivity, budgets, arrival, throttle, grid)


def test_the_paper_and_its_slos_stay_what_they_are():
    assert {
        (s.persona, s.metric, s.percentile, s.limit_s)
        for name in ("sim-4xh100", "sim-2xh200")
        for s in load_cluster(name).slos
    } == {("all", "ttft", 95.0, 5.0), ("all", "itl", 95.0, 0.05)}
    assert USERS == {(4, "h100-sxm"): 300, (2, "h200-sxm"): 85} and RATIO == 3.5
    assert BUDGETS == {(4, "h100-sxm"): 2048, (2, "h200-sxm"): 1024}
    assert (paper.SM_ACTIVE, paper.KV_USAGE) == (0.37, 0.105)


def test_judge_and_spans():
    assert judge(True, ["x"], "no") == ("reproduced", "as swept")
    assert judge(False, ["x", "y"], "no") == ("depends on", "x; y")
    assert judge(False, [], "no") == ("not reproduced", "no")
    assert spans([None, 1.0, float("inf"), 3.0], 2.0) and not spans([1.0, 3.0], 3.1) and not spans([], 1.0)
    assert spans([1.0, 3.0], 3.1, 0.05)


@pytest.mark.parametrize(
    "best, verdict",
    [
        (((300.0, 2048), (700.0, 1024), (6000.0, 1024)), "reproduced"),
        (((300.0, 2048), (700.0, 2048), (6000.0, 1024)), "depends on"),
        (((300.0, 2048), (700.0, 2048), (6000.0, 2048)), "not reproduced"),
    ],
)
def test_the_best_budget_depends_on_the_gap_that_measurements_hardly_fix(best, verdict):
    claim = paper._budget((2, "h200-sxm"), study(best=best))
    assert claim.verdict == verdict
    assert verdict == "reproduced" or "1024" in claim.paper and "ms" in claim.why


@pytest.mark.parametrize("ratio, verdict", [(1.4, "reproduced"), (1.05, "not reproduced")])
def test_throttle(ratio, verdict):
    assert paper._throttle([study(ratio=ratio)]).verdict == verdict


def test_chunked_prefill_must_hold_on_every_cluster():
    held, not_held = study(), study("sim-4xh100", itl_small=0.3)
    assert paper._chunked([held]).verdict == "reproduced"
    assert paper._chunked([held, not_held]).verdict == "depends on"
    assert paper._chunked([not_held]).verdict == "not reproduced"


def test_shares_depend_on_users_where_the_rungs_that_met_span_them():
    one = study("sim-4xh100")
    rungs = one.answer.rungs.assign(
        **{
            name: 0.0
            for name in (
                "output_tokens_per_s",
                "ttft_p50_s",
                "ttft_p95_s",
                "itl_p50_s",
                "itl_p95_s",
                "cached_ratio",
                "dram_active_ratio",
                "thinking_users",
                "in_flight_users",
                "preemptions",
            )
        }
    )
    object.__setattr__(one.answer, "rungs", rungs)
    assert paper._share("SM", "sm_active_ratio", 0.37, 0.05, one).verdict == "depends on"
    assert paper._share("KV", "kv_usage_ratio", 0.105, 0.03, one).verdict == "reproduced"
    assert paper._share("KV", "kv_usage_ratio", 0.6, 0.03, one).verdict == "not reproduced"


def test_the_joint_grid_gives_a_ratio_for_every_setting_and_drops_impossible_ones():
    one, other = study("sim-4xh100", users=300), study(users=90)
    assert list(joint(one, other)["ratio"]) == pytest.approx([300 / 90, 100 / 30])
    none = other.grid.assign(users=[90, 0])
    assert len(joint(one, replace(other, grid=none))) == 1
    assert "ratio" in paper.grids([one, other]) and "cluster" in paper.grids([one])


def test_without_runs_nothing_is_judged():
    found = paper.findings([])
    assert len(found) >= 10 and set(found["verdict"]) == {"not judged"}
