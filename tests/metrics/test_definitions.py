"""Each metric from records whose answer is worked out by hand, and the table that people read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from spoc_lib.config import Slo
from spoc_lib.core.schemas import CHUNKS, REQUESTS
from spoc_lib.core.stats import Ranked
from spoc_lib.core.tables import as_table
from spoc_lib.metrics import METRICS, Measured, Samples, markdown, streams

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs/how-the-numbers-are-made.md"
INF = math.inf


def request(number: int, send_s: float, first_s: float | None, end_s: float | None, **more) -> dict:
    return {"request": number, "persona": "P0", "user": number, "intended_send_s": send_s, "send_s": send_s,
            "first_token_s": first_s, "end_s": end_s, "intended_prompt_tokens": 10, "intended_output_tokens": 5,
            "outcome": "completed", **more}


#: A window of [10, 20), the load cut off at 20.
ROWS = [
    request(0, 2.0, 12.0, 14.0, prompt_tokens=100, output_tokens=5, cached_tokens=60),  # sent before it, answered in it
    request(1, 10.0, 11.0, 13.0, prompt_tokens=20, output_tokens=5, cached_tokens=15, intended_send_s=9.5),
    request(2, 12.0, 12.5, 15.0, outcome="failed", prompt_tokens=20),  # broke off: 3 of 5 tokens came
    request(3, 16.0, 18.0, None, outcome="censored"),  # streams when the load ends; its last chunk came at 19
    request(4, 17.0, None, None, outcome="censored"),  # waits when the load ends
    request(5, 20.0, None, None, outcome="censored"),  # sent at the window's end, that is after it
]
PIECES = [(0, 12.0, 1), (0, 13.0, 2), (0, 14.0, 2), (1, 11.0, 1), (1, 13.0, 4), (2, 12.5, 1), (2, 14.5, 2),
          (3, 18.0, 1), (3, 19.0, 1)]


@pytest.fixture
def seen() -> Measured:
    table = pd.DataFrame([{name: row.get(name) for name in REQUESTS.names} for row in ROWS])
    chunks = as_table(pd.DataFrame(PIECES, columns=["request", "time_s", "tokens"]).astype(
        {"tokens": float}), CHUNKS).to_pandas()
    return Measured(as_table(table, REQUESTS).to_pandas(), chunks.sample(frac=1, random_state=1), (10.0, 20.0), 20.0)


def told(samples: Samples) -> list[tuple]:
    cut = np.zeros(len(samples), bool) if samples.cut is None else samples.cut
    return sorted(zip(samples.value_s.tolist(), samples.weight.tolist(), cut.tolist(), strict=True))


@pytest.mark.parametrize("name, values", [
    ("ttft", [(1.0, 1, False), (2.0, 1, False), (3.0, 1, True), (INF, 1, False)]),
    ("ttft_per_prompt_token", [(0.05, 1, False), (0.2, 1, False), (0.3, 1, True), (INF, 1, False)]),
    ("e2e", [(3.0, 1, False), (3.0, 1, True), (4.0, 1, True), (INF, 1, False)]),
    ("tpot", [(0.5, 1, False), (2.0, 1, False), (INF, 1, False)]),  # request 3: 2 s since its first, one token more
    ("itl", [(0.5, 2, False), (0.5, 2, False), (0.5, 4, False), (1.0, 1, False), (1.0, 1, True), (1.0, 2, False),
             (INF, 2, False)]),
    ("inter_chunk", [(1.0, 1, False), (1.0, 1, False), (1.0, 1, False), (2.0, 1, False), (2.0, 1, False)]),
    ("schedule_lag", [(0.0, 1, False), (0.0, 1, False), (0.0, 1, False), (0.5, 1, False)]),
])
def test_whose_values_count_in_a_window_and_as_what(seen, name, values):
    assert told(seen.samples(name)) == values


@pytest.mark.parametrize("name, value", [
    ("output_tokens_per_s", 15 / 10), ("prompt_tokens_per_s", (100 + 20 + 20 + 10) / 10),
    ("request_rate_per_s", 2 / 10), ("cached_ratio", 15 / 20), ("error_rate", 1 / 4)])
def test_rates_and_shares_of_a_window(seen, name, value):
    assert seen.numbers(name) == {name: value}


def test_a_wait_that_was_cut_off_counts_as_at_least_so_long(seen):
    ttft = seen.samples("ttft")  # 1, 2, at least 3, infinite: the third's weight goes to those beyond
    assert [ttft.percentile(q) for q in (25, 50, 51)] == [1.0, 2.0, INF]
    assert ttft.at_least.percentile(75) == 3.0 and ttft.where(~ttft.cut).percentile(100) == INF


@pytest.mark.parametrize("limit_s, values", [(2.5, [1.0, 2.0, INF, INF]), (5.0, [1.0, INF])])
def test_against_a_limit_it_is_decided_or_all_within_one_limit_of_the_end_are_left_out(seen, limit_s, values):
    decided = seen.of(Slo(metric="ttft", limit_s=limit_s))
    assert decided.cut is None and sorted(decided.value_s) == values


def test_goodput_is_of_requests_that_met_every_limit(seen):
    slos = [Slo(metric="ttft", limit_s=1.5), Slo(metric="itl", limit_s=0.6)]
    assert METRICS["goodput"].of(seen, slos) == 1 / 4 and METRICS["goodput_per_s"].of(seen, slos) == 1 / 10


def test_the_product_limit_is_that_of_the_textbook():
    """Each end takes its share of who is still waiting; values, weights and ties at random."""
    rng = np.random.default_rng(1)

    def by_hand(values, weights, cut, share):
        survival, left = 1.0, sum(weights)
        for index in sorted(range(len(values)), key=lambda i: (values[i], cut[i])):
            if not cut[index]:
                survival *= 1 - weights[index] / left
                if 1 - survival >= share - 1e-9:
                    return values[index]
            left -= weights[index]
        return INF

    shares = [0.05, 0.5, 0.9, 0.95, 1.0]
    for case in range(300):
        count = int(rng.integers(1, 30))
        values, weights = rng.integers(0, 12, count).astype(float), rng.integers(1, 1 + case % 3 * 2 + 1, count) * 1.0
        cut = rng.random(count) < rng.choice([0.0, 0.2, 0.6, 1.0])
        assert Ranked(values, weights, cut).quantiles(shares) == [by_hand(values, weights, cut, one) for one in shares]


def test_gaps_are_found_in_chunks_of_any_order():
    rng = np.random.default_rng(2)
    table = pd.DataFrame({"request": np.repeat([70_000, 5, 9], 4), "time_s": rng.random(12).round(3),
                          "tokens": [1.0, 2.0, 0.0, 1.0] * 3})
    wanted = []
    for number, own in table.sort_values(["request", "time_s"]).groupby("request"):
        times, tokens = own["time_s"].tolist(), own["tokens"].tolist()
        wanted += [(number, after, after - before, count) for before, after, count in
                   zip(times, times[1:], tokens[1:], strict=False) if count]
    gaps = streams(table).gaps
    assert list(zip(gaps.request, gaps.time_s, gaps.gap_s, gaps.tokens, strict=True)) == wanted
    assert len(streams(table[:0]).gaps.gap_s) == 0


def held(test: str, file: str) -> str:
    return f"[{test}](../tests/{file})"


_WINDOW = held("test_whose_values_count_in_a_window_and_as_what", "metrics/test_definitions.py")
_RATES = held("test_rates_and_shares_of_a_window", "metrics/test_definitions.py")
_USERS = held("test_a_late_client_is_accounted_for_and_named", "metrics/test_occupancy.py")
_GOOD = held("test_goodput_is_of_requests_that_met_every_limit", "metrics/test_definitions.py")
HELD_BY = {name: {"users": _USERS, "number": _RATES}.get(one.kind, _WINDOW) for name, one in METRICS.items()} | {
    "goodput": _GOOD, "goodput_per_s": _GOOD}


def test_the_guide_holds_the_metrics_as_the_code_has_them():
    assert markdown(HELD_BY) in GUIDE.read_text(encoding="utf-8"), "write into the guide: markdown(HELD_BY)"


def test_every_metric_that_an_slo_may_name_is_one():
    assert set(get_args(Slo.model_fields["metric"].annotation)) <= set(METRICS)
