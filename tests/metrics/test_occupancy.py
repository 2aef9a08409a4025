"""Little's law as an integral over the records, closed by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from spoc_lib.metrics import little, occupancy


def loop(late_s: float, users: int = 4, duration_s: float = 60.0) -> pd.DataFrame:
    """Users that think 1 s, wait `late_s` for the client to send, and are answered within 0.5 s."""
    cycle_s, rows = 1.5 + late_s, []
    for user in range(users):
        for turn in range(int(duration_s / cycle_s) + 1):
            intended_s = 1.0 + user * 0.1 + turn * cycle_s
            rows.append({"user": user, "intended_send_s": intended_s, "send_s": intended_s + late_s,
                         "end_s": intended_s + late_s + 0.5, "outcome": "completed"})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("late_s", [0.0, 0.1, 0.5])
def test_a_late_client_is_accounted_for_and_named(late_s):
    counted = occupancy(loop(late_s), 4, (10.0, 50.0), 0.0, 60.0)
    assert counted.little_error_ratio < 0.005
    assert counted.late == pytest.approx(4 * late_s / (1.5 + late_s), rel=0.05, abs=1e-9)
    assert counted.live == pytest.approx(counted.thinking + counted.late + counted.in_flight)


def test_a_user_too_few_still_misses():
    assert occupancy(loop(0.1), 5, (10.0, 50.0), 0.0, 60.0, gap_cap_s=1.0).little_error_ratio > 0.15


def row(**values) -> dict:
    return {"request": 0, "user": 0, "send_s": 0.0, "end_s": 3.0, "outcome": "completed", **values}


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_littles_law_holds_for_a_closed_loop(late_s):
    """Ten users, response 0.5 s, think 1.5 s less what the client was late."""
    rows = [row(request=user * 100 + k, user=user, intended_send_s=user * 0.2 + 2.0 * k - late_s,
                send_s=user * 0.2 + 2.0 * k, end_s=user * 0.2 + 2.0 * k + 0.5)
            for user in range(10) for k in range(50)]
    requests = pd.DataFrame(rows)
    law = little(requests, 10.0, 20.0, 80.0)
    assert law["response_s"] == pytest.approx(0.5) and law["think_s"] == pytest.approx(1.5 - late_s)
    assert law["late_s"] == pytest.approx(late_s) and abs(law["little_error_ratio"]) < 1e-6
    assert occupancy(requests, 10, (20.0, 80.0), 0.0, 101.0).late == pytest.approx(10 * late_s / 2.0)
    assert occupancy(requests[:0], 10, (20.0, 80.0), 0.0, 101.0).late == 0.0


def test_littles_law_holds_for_an_open_loop():
    """A user comes every 0.5 s, asks three times (response 0.5 s, think 1 s in between) and goes: 7 live, of whom none
    thinks before its first request."""
    rows = [row(request=user * 3 + k, user=user, intended_send_s=user * 0.5 + 1.5 * k, send_s=user * 0.5 + 1.5 * k,
                end_s=user * 0.5 + 1.5 * k + 0.5) for user in range(200) for k in range(3)]
    live = occupancy(pd.DataFrame(rows), 200, (20.0, 80.0), 0.0, 105.0, gap_cap_s=0.0).live
    assert live == pytest.approx(7.0)
    law = little(pd.DataFrame(rows), live, 20.0, 80.0, first_think_s=0.0)
    assert law["think_s"] == pytest.approx(2 / 3, rel=0.01) and abs(law["little_error_ratio"]) < 0.01
