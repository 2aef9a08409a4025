"""The interval of a percentile: nearest rank, blocks, and honesty about what few samples cannot show."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spoc_lib.core.stats import percentile
from spoc_lib.metrics import Samples
from spoc_lib.sweep.interval import estimate


def samples(values, users=None, times=None, weights=None) -> Samples:
    values = np.asarray(values, float)
    count = len(values)
    return Samples(values, np.ones(count) if weights is None else np.asarray(weights, float),
                   np.arange(count) if users is None else np.asarray(users),
                   np.linspace(0, 60, count) if times is None else np.asarray(times, float))


def correlated(rng, users=60, turns=12, spread=0.6):
    """Latencies with a user effect as strong as the noise within a user; lognormal, p95 known."""
    effect = np.repeat(rng.normal(0, spread, users), turns)
    values = np.exp(effect + rng.normal(0, spread, users * turns))
    return samples(values, np.repeat(np.arange(users), turns), rng.uniform(0, 60, users * turns))


def test_the_value_is_the_nearest_rank_percentile():
    rng = np.random.default_rng(1)
    values = rng.exponential(size=777)
    for q in (50, 90, 95, 99, 100):
        assert estimate(samples(values), q).value_s == percentile(values, q)


def test_weights_stand_for_so_many_tokens():
    values, weights = [0.1, 0.2, 0.3], [5, 4, 1]
    apart = samples(np.repeat(values, weights))
    for q in (50, 90, 91, 99):
        assert samples(values, weights=weights).percentile(q) == percentile(apart.value_s, q)


def test_the_interval_covers_the_truth_although_users_are_correlated():
    truth = math.exp(1.6449 * math.hypot(0.6, 0.6))
    covered, width, naive = 0, [], 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        found = estimate(correlated(rng), 95, 0.9)
        covered += found.low_s <= truth <= found.high_s
        width.append(found.high_s / found.low_s)
        alone = correlated(np.random.default_rng(seed))
        independent = estimate(samples(alone.value_s, times=np.random.default_rng(0).permutation(720)), 95, 0.9)
        naive += independent.low_s <= truth <= independent.high_s
    assert covered / 150 >= 0.85, covered
    assert naive < covered  # taking requests as independent is what it protects against
    assert np.median(width) < 2.2


def test_it_agrees_with_a_bootstrap_over_whole_users():
    rng = np.random.default_rng(3)
    one = correlated(rng, users=200, turns=10)
    found = estimate(one, 90, 0.9)
    by_user = one.value_s.reshape(200, 10)
    draws = [percentile(by_user[rng.integers(0, 200, 200)].ravel(), 90) for _ in range(400)]
    low, high = np.quantile(draws, [0.05, 0.95])
    assert found.low_s == pytest.approx(low, rel=0.1) and found.high_s == pytest.approx(high, rel=0.1)


def test_a_burst_that_delays_everybody_is_one_event_not_a_hundred():
    rng = np.random.default_rng(5)
    times = rng.uniform(0, 60, 2000)
    burst = (times > 30) & (times < 33)
    values = np.where(burst, 4.0, 0.5) + rng.uniform(0, 0.1, 2000)
    found = estimate(samples(values, rng.integers(0, 50, 2000), times), 95, 0.9)
    assert found.low_s < 1.0 and found.high_s > 4.0 and found.effective < 200


def test_few_samples_cannot_bound_a_high_percentile():
    found = estimate(samples(np.linspace(0.1, 1.0, 20)), 95, 0.9)
    assert found.high_s == math.inf and found.low_s < 0.9


def test_failures_are_infinite_and_never_nan():
    values = np.concatenate([np.linspace(0.1, 1.0, 900), np.full(100, np.inf)])
    rng = np.random.default_rng(2)
    order = rng.permutation(1000)
    found = estimate(samples(values[order]), 95, 0.9)
    assert found.value_s == math.inf and found.low_s == math.inf
    assert estimate(samples(values[order]), 50, 0.9).high_s < 1.0


def test_nothing_measured_is_said_as_nothing():
    nothing = estimate(samples([]), 95)
    assert math.isnan(nothing.value_s) and nothing.samples == 0 and nothing.high_s == math.inf
