"""The cap on think times and the answer."""

from __future__ import annotations

import pytest

from spoc_lib.config import load_cluster
from spoc_lib.sweep.cases import Case
from spoc_lib.sweep.gapcaps import capacity_by_gap_cap

pytestmark = pytest.mark.slow


def test_a_higher_cap_serves_more_users_of_the_same_sessions():
    case = Case(load_cluster("sim-2xh200"), "spoc", measured_s=20.0, warmup_s=5.0, start="cold", gap_cap_s=10.0)
    table = capacity_by_gap_cap(case, (10, 60))
    assert table.gap_cap_s.tolist() == [10.0, 60.0] and table.in_use.tolist() == [True, False]
    assert table.reason.isna().all() and (table.low == table.max_users).all() and (table.high > table.low).all()
    assert table.max_users[1] > table.max_users[0]


def test_a_question_without_an_answer_says_why():
    case = Case(load_cluster("sim-2xh200"), "spoc", flags={"gpu_memory_utilization": 0.1}, measured_s=20.0)
    table = capacity_by_gap_cap(case, (60,))
    assert table.max_users.isna().all() and table.reason.notna().all()
