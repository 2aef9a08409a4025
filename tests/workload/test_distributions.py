"""Distributions: known quantiles, true truncation, faults named."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import parse
from spoc_lib.workload.model.distributions import Distribution
from spoc_lib.workload.model.geometry import Level

ADAPTER = TypeAdapter(Distribution)


def make(**fields):
    return ADAPTER.validate_python(fields)


def test_known_quantiles():
    lognormal = make(distribution="lognormal", median=216, sigma=1.11)
    assert lognormal.quantile(50) == pytest.approx(216)
    assert lognormal.quantile(84.13447) == pytest.approx(216 * math.exp(1.11), rel=1e-5)
    assert make(distribution="weibull", scale=10, shape=1).quantile(50) == pytest.approx(10 * math.log(2))
    assert make(distribution="gamma", mean_value=6, shape=1).quantile(50) == pytest.approx(6 * math.log(2))
    assert make(distribution="pareto", scale=3, alpha=2).quantile(75) == pytest.approx(6)
    assert make(distribution="gamma", mean_value=6, shape=0.5).mean == pytest.approx(6, rel=2e-3)


def test_a_number_is_a_constant():
    assert ADAPTER.validate_python(7).quantile(50) == 7
    assert ADAPTER.validate_python(7).mean == 7


def test_quantiles_interpolate_the_logarithm():
    d = make(distribution="quantiles", points={0: 1, 50: 100, 100: 10_000})
    assert d.quantile(25) == pytest.approx(10)
    assert d.quantile(75) == pytest.approx(1000)


@given(st.sampled_from([
    {"distribution": "lognormal", "median": 50, "sigma": 2.0},
    {"distribution": "gamma", "mean_value": 60, "shape": 0.4},
    {"distribution": "weibull", "scale": 40, "shape": 0.6}, {"distribution": "pareto", "scale": 5, "alpha": 0.8},
    {"distribution": "quantiles", "points": {0: 0, 10: 3, 60: 40, 100: 900}}]),
    st.floats(6, 40), st.floats(45, 500), st.floats(0, 1, exclude_max=True))
def test_truncation_holds_and_is_not_clipping(fields, low, high, u):
    d = make(**fields, min=low, max=high)
    assert low <= d.ppf(u) <= high
    grid = d.ppf((np.arange(400) + 0.5) / 400)
    assert (np.diff(grid) >= 0).all()
    assert (grid == low).mean() < 0.02  # no mass piles up at the edge
    assert (grid == high).mean() < 0.02


@pytest.mark.parametrize(("fields", "said"), [
    ({"distribution": "lognormal", "median": 5, "sigma": 1, "min": 9, "max": 3}, "above max"),
    ({"distribution": "pareto", "scale": 1, "alpha": 0.9}, "give a max"),
    ({"distribution": "quantiles", "points": {0: 5, 100: 2}}, "must not fall"),
    ({"distribution": "quantiles", "points": {10: 5, 100: 9}}, "start at 0"),
    ({"distribution": "lognormal", "median": -5, "sigma": 1}, "greater than 0"),
    ({"distribution": "normal", "mean": 5}, "distribution"),
])
def test_faults_name_the_field(fields, said):
    with pytest.raises(InputError) as error:
        parse(Level, {"count": 1, "tokens": fields}, "a file")
    assert "tokens" in error.value.message and said in error.value.message
