"""The verdict in words: what is resolved is said with its interval, what is not is said to be open."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from spoc_lib import config
from spoc_lib.core import schemas
from spoc_lib.report.answer import Answer
from spoc_lib.report.evidence import comparable, ratio_findings
from spoc_lib.report.payer import Cards
from spoc_lib.report.verdict import ratio, sentences

BINDING = {"persona": "all", "metric": "itl", "percentile": 95.0, "limit_s": 0.05}


def answer(cluster: str, users: int | None, interval: list, verdict: str = "resolved") -> Answer:
    capacity = {
        "max_users": users, "interval": interval, "level": 0.9, "verdict": verdict, "reason": "nothing was missed",
        "next": "add rungs above 24 users", "binding": BINDING, "saturated": {"resource": "kv_blocks"},
        "simulated": True, "gap_cap_s": 60.0, "rung_s": 400.0,
    }  # fmt: skip
    empty = [pd.DataFrame(columns=s.names) for s in (schemas.RUNGS, schemas.SLO_VERDICTS)]
    return Answer("run", Path("."), config.load_cluster(cluster), capacity, *empty, None, None, None, None)


def test_a_resolved_answer_names_interval_slo_and_what_saturates():
    said = sentences([answer("sim-4xh100", 129, [120, 139])])
    assert "129 users (120 to 139 at 90 %), simulated" in said[0]
    assert "ITL p95 of all personas at 50 ms" in said[0] and "kv blocks" in said[0]


@pytest.mark.parametrize("users, interval", [(8, [8, None]), (None, [0, None])])
def test_an_open_answer_says_so_and_what_to_run_next(users, interval):
    open_one = answer("sim-4xh100", users, interval, "unresolved")
    said = sentences([open_one, answer("sim-2xh200", 100, [90, 110])])
    assert "unresolved" in said[0] and "Next: add rungs above 24 users" in said[0] and "inf" not in said[0]
    assert len(said) == 2, "an open answer is in no ratio"
    assert "unresolved" in Cards([open_one])._repr_html_() and ">8 users<" not in Cards([open_one])._repr_html_()


def test_the_ratio_takes_the_widest_interval_that_both_allow():
    first, second = answer("sim-4xh100", 120, [110, 130]), answer("sim-2xh200", 100, [90, 125])
    assert ratio(first, second) == (1.2, 110 / 125, 130 / 90)
    assert "its GPU count alone would say 2" in sentences([first, second])[-1]


def test_unlike_questions_get_no_ratio_but_the_reason():
    first, second = answer("sim-4xh100", 120, [110, 130]), answer("sim-2xh200", 100, [90, 125])
    second.capacity["gap_cap_s"] = 5.0
    measured = answer("sim-2xh200", 100, [90, 125])
    measured.capacity["simulated"] = False
    said = sentences([first, second, measured])
    assert "not comparable: other cap on think time (60 s against 5 s)." in said[-2]
    assert "not comparable: other numbers (simulated against measured)." in said[-1]
    assert comparable([first, second, measured]) == [first] and "No ratio" in ratio_findings([first, second])[0]
