"""The steady window and what makes a rung invalid, on series and tables with known answers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spoc_lib.load import LoadPlan
from spoc_lib.load.figures import merged_ratio
from spoc_lib.load.summary import blurred, claimed_ratio, invalid_reasons
from spoc_lib.load.window import mean_in_flight, mser, steady_window, token_rate
from spoc_lib.metrics import streams


def tables(rates: list[float], response_s: float = 2.0, tokens: int = 20) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests that start evenly, `rates[k]` of them in second k, each streaming `tokens` over `response_s`."""
    sends = np.concatenate([k + (np.arange(int(rate)) + 0.5) / rate for k, rate in enumerate(rates) if rate])
    requests = pd.DataFrame({"request": np.arange(len(sends)), "user": np.arange(len(sends)), "send_s": sends,
                             "end_s": sends + response_s})
    times = (sends[:, None] + np.linspace(0.1, response_s, tokens)[None, :]).ravel()
    chunks = pd.DataFrame({"request": np.repeat(requests["request"], tokens), "time_s": times, "tokens": 1.0})
    return requests, chunks


def test_mser_drops_the_transient_and_nothing_of_a_flat_series():
    assert mser(np.r_[np.linspace(0, 10, 10), np.full(40, 10.0)]) == pytest.approx(9, abs=1)
    assert mser(np.full(50, 7.0)) == 0


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=80))
def test_mser_drops_at_most_half(values):
    assert 0 <= mser(np.array(values)) <= len(values) // 2


def test_the_filling_pipe_is_cut():
    requests, chunks = tables([10.0] * 60, response_s=5.0)
    window = steady_window(requests, chunks, 0.0, 60.0)
    assert window.verdict == "steady" and 3.0 < window.start_s < 8.0 and window.end_s == 60.0
    rate = chunks[(chunks["time_s"] >= window.start_s) & (chunks["time_s"] < 60)]["tokens"].sum() / window.length_s
    assert rate == pytest.approx(200, rel=0.02)  # the transient would have made it less


def test_warm_up_is_never_part_of_it():
    requests, chunks = tables([10.0] * 60)
    assert steady_window(requests, chunks, 0.0, 60.0, settle_s=15.0).start_s >= 15.0


def test_a_moving_rate_is_unresolved_and_says_for_how_long():
    requests, chunks = tables([float(k) for k in range(1, 61)])
    window = steady_window(requests, chunks, 0.0, 60.0)
    assert window.verdict == "unresolved" and "still moving" in window.reason and window.needed_s > 60


@pytest.mark.parametrize(("rate", "steady"), [
    (lambda k: 10, True), (lambda k: 10 if k < 100 else 0, False), (lambda k: 10 if k < 90 else 4, False),
    (lambda k: 10 + 8 * math.cos(math.tau * k / 120), False), (lambda k: 10 + 4 * math.sin(k), True),
])
def test_a_server_that_stops_before_the_end_is_not_steady(rate, steady):
    """Nor one that slows down late, or dips and comes back; one that sways within seconds is."""
    requests, chunks = tables([float(round(rate(k))) for k in range(120)])
    window = steady_window(requests, chunks, 0.0, 120.0)
    assert (window.verdict == "steady") == steady, window.reason


def test_chance_alone_moves_nothing():
    """A closed loop of 20 users with answers and thoughts of very unequal length, as the rule must bear it."""
    rng, steady = np.random.default_rng(2), 0
    for _ in range(20):
        sends: list[float] = []
        ends: list[float] = []
        for _ in range(20):
            time_s = rng.uniform(-16, 0)
            while time_s < 120:
                sends.append(time_s)
                ends.append(time_s + 0.3 + 0.02 * max(2, int(rng.lognormal(math.log(300) - 0.5, 1.0))))
                time_s = ends[-1] + rng.exponential(10.0)
        times = np.concatenate([np.arange(a + 0.3, b, 0.02) for a, b in zip(sends, ends, strict=True)])
        requests = pd.DataFrame({"request": range(len(sends)), "send_s": sends, "end_s": ends})
        chunks = pd.DataFrame({"request": 0, "time_s": times, "tokens": 1.0})
        steady += steady_window(requests, chunks, 0.0, 120.0).verdict == "steady"
    assert steady >= 16


@pytest.mark.parametrize(("offered_ratio", "steady"), [(0.7, True), (1.2, False), (2.0, False)])
def test_a_queue_that_grows_is_not_steady_though_the_token_rate_is(offered_ratio, steady):
    """An open loop that offers more than the server can do keeps it busy at one rate, and waits ever longer."""
    rng = np.random.default_rng(7)
    sends = np.cumsum(rng.exponential(4.0 / 8 / offered_ratio, int(300 * 2 * offered_ratio)))
    free, begins = np.zeros(8), []
    for send_s in sends:  # eight answers of 4 s at a time, first come, first served
        begins.append(max(send_s, free.min()))
        free[free.argmin()] = begins[-1] + 4.0
    requests = pd.DataFrame({"request": range(len(sends)), "send_s": sends, "end_s": np.array(begins) + 4.0})
    times = (np.array(begins)[:, None] + np.linspace(0.1, 4.0, 20)[None, :]).ravel()
    chunks = pd.DataFrame({"request": np.repeat(requests["request"], 20), "time_s": times, "tokens": 1.0})
    window = steady_window(requests, chunks, 0.0, 290.0)
    assert (window.verdict == "steady") == steady, window.reason
    assert steady or "requests in flight in its first half" in window.reason


def test_too_short_is_unresolved_and_says_for_how_long():
    requests, chunks = tables([1.0] * 20)
    window = steady_window(requests, chunks, 0.0, 20.0)
    assert window.verdict == "unresolved" and "40 are needed" in window.reason
    assert 40 < window.needed_s < 80
    assert steady_window(requests, chunks, 0.0, 1.0).verdict == "unresolved"


def test_nothing_answered_is_unresolved():
    requests, chunks = tables([1.0] * 20)
    assert steady_window(requests, chunks[:0], 0.0, 20.0).verdict == "unresolved"
    assert steady_window(requests[:0], chunks[:0], 0.0, 20.0).verdict == "unresolved"


def test_in_flight_is_the_exact_integral():
    requests = pd.DataFrame({"send_s": [0.0, 0.5], "end_s": [1.0, 2.5]})
    assert list(mean_in_flight(requests, np.array([0.0, 1.0, 2.0, 3.0]))) == [1.5, 1.0, 0.5]


def test_token_rate_weighs_chunks():
    chunks = pd.DataFrame({"time_s": [0.1, 0.2, 1.5], "tokens": [2.0, 3.0, 4.0]})
    assert list(token_rate(chunks, np.array([0.0, 1.0, 3.0]))) == [5.0, 2.0]


def row(**values) -> dict:
    return {"request": 0, "user": 0, "send_s": 0.0, "first_token_s": 1.0, "end_s": 3.0, "ttft_s": 1.0,
            "output_tokens": 5, "intended_output_tokens": 5, "outcome": "completed", "error_class": None, **values}


def test_tokens_read_together_are_told_from_a_server_that_sends_so():
    chunks = pd.DataFrame({"request": [0, 0, 0, 1, 1], "time_s": [1.0, 1.0, 2.0, 2.0, 2.0], "tokens": 1.0})
    assert merged_ratio(streams(chunks)) == pytest.approx(2 / 3) and merged_ratio(streams(chunks[:1])) == 0.0
    late = {"merged_ratio": 0.4, "client_loop_lag_p99_s": 0.174, "tpot_s": {"p50": 0.0015}}
    assert "40% of the tokens were read together" in blurred(late)[0] and "174 ms late" in blurred(late)[0]
    assert blurred({**late, "client_loop_lag_p99_s": 0.001}) == []  # the client was in time: the server's own doing
    assert blurred({**late, "merged_ratio": 0.0}) == []


def summary(**values) -> dict:
    return {"planned": 4, "completed": 2, "failed": 1, "censored": 1, "lost_clients": 0, "lost_why": [],
            "interrupted": False, "output_claimed_ratio": 1.0, "client_live_users": 2.0, "finished_users": 0,
            "little_error_ratio": 0.0, **values}


def test_what_makes_a_rung_invalid():
    plan = LoadPlan(base_url="http://h", model="m", users=2, duration_s=1)
    assert invalid_reasons(plan, summary()) == []
    for change, said in (({"planned": 5}, "planned is not"), ({"client_live_users": 1.9}, "1.9 users were live, 2"),
                         ({"client_live_users": 1.5, "finished_users": 1}, "2 were asked for (1 came to the end"),
                         ({"little_error_ratio": 0.05}, "Little's law misses by 5.0%"),
                         ({"lost_clients": 1, "lost_why": ["MemoryError"]}, "were lost: MemoryError"),
                         ({"output_claimed_ratio": 4e6}, "4,000,000 times"), ({"interrupted": True}, "interrupted"),
                         ({"completed": 0, "failed": 3}, "no request was completed")):
        (reason,) = invalid_reasons(plan, summary(**change))
        assert said in reason


def test_claimed_tokens_are_held_against_those_asked_for():
    told = [row(tokens_source="usage", output_tokens=tokens) for tokens in (5, 5, 4_000_000)]
    assert claimed_ratio(pd.DataFrame(told)) == pytest.approx(4_000_010 / 15)
    assert claimed_ratio(pd.DataFrame([row(tokens_source="tokenizer")])) is None
