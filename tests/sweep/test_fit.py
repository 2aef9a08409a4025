"""The monotone fit, its crossing, and the ladder that looks for it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spoc_lib.sweep.fit import Margins, cross, isotonic, margins
from spoc_lib.sweep.ladder import Ladder


def made(users, margin, spread=0.05, name="all ttft p95 <= 5 s") -> Margins:
    users = np.asarray(users, float)
    return Margins(name, users, np.asarray(margin, float), np.full(users.shape, spread), np.full(users.shape, spread))


def verdict_rows(users: int, share: float, rung: int, size: float = 400.0, metric: str = "ttft") -> dict:
    from spoc_lib.metrics import Samples
    from spoc_lib.sweep.slo import Slo, slo_row

    count = int(size)
    values = np.where(np.arange(count) < round(share * count), 9.0, 1.0)
    samples = Samples(values, np.ones(count), np.arange(count), np.random.default_rng(rung).uniform(0, 60, count))
    return slo_row(Slo(metric=metric, limit_s=5.0), samples, rung=rung, users=users, driver="virtual")


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.data())
def test_the_isotonic_fit_is_monotone_and_keeps_what_is_monotone(values, data):
    weights = np.array(data.draw(st.lists(st.floats(0.1, 5), min_size=len(values), max_size=len(values))))
    fitted = isotonic(np.array([values]), weights)[0]
    assert (np.diff(fitted) >= -1e-9).all()
    assert np.average(fitted, weights=weights) == pytest.approx(np.average(values, weights=weights), abs=1e-6)
    ordered = np.sort(values)
    assert isotonic(ordered[None, :], weights)[0] == pytest.approx(ordered)


def test_the_crossing_lies_between_the_rungs_around_it():
    found = cross([made([50, 100, 150], [-1.0, -0.5, 0.5])])
    assert found.users == pytest.approx(125) and (found.low, found.high) == (100, 150)
    assert found.binding == "all ttft p95 <= 5 s"


def test_the_slo_that_crosses_first_binds():
    found = cross([made([50, 100, 150], [-1, -0.5, 0.5]), made([50, 100, 150], [-1, 0.5, 1], name="itl")])
    assert found.binding == "itl" and found.users < 100 and found.by_slo["all ttft p95 <= 5 s"] == pytest.approx(125)


def test_a_cliff_is_not_interpolated():
    found = cross([made([100, 110], [-2.5, 3.5])])
    assert found.users == 100 and (found.low, found.high) == (100, 110)


def test_noise_widens_the_interval_beyond_the_bracket():
    quiet = cross([made([100, 110, 120, 130], [-0.2, -0.1, 0.1, 0.2], 0.01)])
    noisy = cross([made([100, 110, 120, 130], [-0.2, -0.1, 0.1, 0.2], 0.3)])
    assert (quiet.low, quiet.high) == (110, 120) and noisy.low < 110 and noisy.high > 120


def test_nothing_missed_and_nothing_met_are_unbounded():
    assert cross([made([50, 100], [-2, -1])]).high == math.inf
    assert cross([made([50, 100], [1, 2])]).low == 0


def test_shared_noise_does_not_average_out():
    rungs = made([100, 101, 102, 103, 104, 105], [-0.05, -0.03, -0.01, 0.01, 0.03, 0.05], 0.2)
    apart, shared = cross([rungs]), cross([rungs], shared_noise=True)
    assert shared.high == math.inf and apart.relative_width <= shared.relative_width


def test_margins_come_from_shares_and_survive_all_or_nothing():
    frame = pd.DataFrame([verdict_rows(50, 0.0, 0), verdict_rows(100, 0.05, 1), verdict_rows(150, 1.0, 2)])
    (found,) = margins(frame, 0.9)
    assert found.margin[0] < -2 and found.margin[1] == pytest.approx(0, abs=0.02) and found.margin[2] > 5
    assert np.isfinite(found.margin).all() and (found.up > 0).all()


def climb(share_of, ladder: Ladder, probes: int = 10) -> tuple[list[int], pd.DataFrame]:
    tried, rows = [], pd.DataFrame(columns=["users", "samples", "rung"])
    while len(tried) < probes and (step := ladder.next(rows)) is not None:
        row = pd.DataFrame([verdict_rows(step.users, share_of(step.users), len(tried), 4000)])
        rows = row if not tried else pd.concat([rows, row], ignore_index=True)
        tried.append(step.users)
    return tried, rows


def test_the_ladder_closes_in_on_the_edge():
    ladder = Ladder((25, 50, 100, 150, 200, 250, 300, 400))
    tried, rows = climb(lambda users: min(1.0, 0.05 * (users / 137) ** 6), ladder)
    found = ladder.crossing(rows)
    assert found.low <= 137 <= found.high and found.relative_width <= 0.10 and len(tried) <= 10


@pytest.mark.parametrize("edge", [7, 900])
def test_the_ladder_goes_below_its_foot_and_beyond_its_top(edge):
    ladder = Ladder((25, 50, 100, 200, 300))
    tried, rows = climb(lambda users: 0.01 if users <= edge else 0.3, ladder)
    found = ladder.crossing(rows)
    assert found.low <= edge <= found.high and math.isfinite(found.high)


def test_a_server_without_an_edge_ends_the_ladder_unresolved():
    ladder = Ladder((25, 50, 100))
    tried, rows = climb(lambda users: 0.0, ladder)
    assert max(tried) <= 400 and ladder.crossing(rows).high == math.inf


def test_one_user_too_many_is_an_answer():
    tried, rows = climb(lambda users: 1.0, Ladder((10, 20)))
    assert min(tried) == 1 and Ladder((10, 20)).crossing(rows).users == 0


def test_rungs_that_contradict_each_other_widen_the_interval():
    """At a cliff a rung falls on either side by luck: two precise rungs at one number of users, one each way."""
    agree = cross([made([120, 130, 135, 142], [-3, -3, -3, 3], 0.2)])
    contradict = cross([made([120, 130, 135, 135, 142], [-3, -3, -3, 3, 3], 0.2)])
    assert (agree.low, agree.high) == (135, 142)
    assert contradict.low < 135 and contradict.high == 142


def test_both_sides_of_the_edge_are_confirmed_with_other_users():
    tried, _ = climb(lambda users: 0.001 if users <= 137 else 0.6, Ladder((25, 50, 100, 150, 200)), probes=14)
    met, missed = max(users for users in tried if users <= 137), min(users for users in tried if users > 137)
    assert tried.count(met) == 2 and tried.count(missed) == 2
