"""The verdict in words: what is resolved is said with its interval, what is not is said to be open."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from spoc_lib import config
from spoc_lib.core import schemas
from spoc_lib.report.answer import Answer
from spoc_lib.report.payer import Cards
from spoc_lib.report.verdict import ratio, sentences

BINDING = {"persona": "all", "metric": "itl", "percentile": 95.0, "limit_s": 0.05}


def answer(cluster: str, users: int | None, interval: list, verdict: str = "resolved") -> Answer:
    capacity = {
        "max_users": users, "interval": interval, "level": 0.9, "verdict": verdict, "reason": "nothing was missed",
        "next": "add rungs above 24 users", "binding": BINDING, "saturated": {"resource": "kv_blocks"},
        "simulated": True,
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
