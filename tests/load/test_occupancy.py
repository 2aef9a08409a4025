"""Little's law as an integral over the records, closed by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from spoc_lib.load.occupancy import occupancy


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
