"""Distributions as data: what a persona file may write for a size, a count or a time.

Every draw is the inverse of the cumulative distribution at a uniform number, restricted to [min, max]: a truncated
distribution is truly truncated (no mass piles up at its edges).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator
from scipy import special

from spoc_lib.core.yamlfile import Strict

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_GRID = (np.arange(20_000) + 0.5) / 20_000


class _Base(Strict):
    """Common part: truncation, mean and quantiles. `min` and `max` are in the unit of the field that holds it."""

    min: NonNegative | None = None
    max: Positive | None = None

    @model_validator(mode="after")
    def _ordered(self) -> _Base:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min:g}) is above max ({self.max:g}): swap them")
        low, high = self._mass
        if not high > low:
            raise ValueError("no value of this distribution lies between min and max: widen them")
        return self

    @abstractmethod
    def _inverse(self, u: np.ndarray) -> np.ndarray:
        """Values at cumulative probabilities, before truncation."""

    @abstractmethod
    def _cumulative(self, x: float) -> float:
        """Cumulative probability of `x`, before truncation."""

    @cached_property
    def _mass(self) -> tuple[float, float]:
        low = 0.0 if self.min is None else self._cumulative(self.min)
        high = 1.0 if self.max is None else self._cumulative(self.max)
        return low, high

    def ppf(self, u: np.ndarray | float) -> np.ndarray:
        """Values at the cumulative probabilities `u` in [0, 1), truncation included."""
        low, high = self._mass
        values = self._inverse(low + np.asarray(u, dtype=float) * (high - low))
        if self.min is not None or self.max is not None:
            values = np.clip(values, self.min, self.max)
        return values

    @cached_property
    def mean(self) -> float:
        """Mean of the truncated distribution (midpoint rule over 20 000 quantiles)."""
        return float(self.ppf(_GRID).mean())

    def quantile(self, q: float) -> float:
        """The value below which `q` percent of draws fall."""
        return float(self.ppf(min(q / 100.0, 1 - 1e-12)))


class Constant(_Base):
    """Always `value`."""

    distribution: Literal["constant"] = "constant"
    value: NonNegative

    def _inverse(self, u: np.ndarray) -> np.ndarray:
        return np.full(np.shape(u), float(self.value))

    def _cumulative(self, x: float) -> float:
        return float(x >= self.value)

    @cached_property
    def _mass(self) -> tuple[float, float]:
        return 0.0, 1.0


class Lognormal(_Base):
    """Log-normal by its `median` and `sigma` (standard deviation of the logarithm)."""

    distribution: Literal["lognormal"]
    median: Positive
    sigma: Positive

    def _inverse(self, u: np.ndarray) -> np.ndarray:
        return self.median * np.exp(self.sigma * special.ndtri(u))

    def _cumulative(self, x: float) -> float:
        return float(special.ndtr(math.log(x / self.median) / self.sigma)) if x > 0 else 0.0


class Gamma(_Base):
    """Gamma by its untruncated `mean_value` and `shape` (shape 1 is exponential; below 1 is burstier)."""

    distribution: Literal["gamma"]
    mean_value: Positive
    shape: Positive

    def _inverse(self, u: np.ndarray) -> np.ndarray:
        return special.gammaincinv(self.shape, u) * (self.mean_value / self.shape)

    def _cumulative(self, x: float) -> float:
        return float(special.gammainc(self.shape, x * self.shape / self.mean_value))


class Weibull(_Base):
    """Weibull by `scale` and `shape` (shape below 1: heavy tail)."""

    distribution: Literal["weibull"]
    scale: Positive
    shape: Positive

    def _inverse(self, u: np.ndarray) -> np.ndarray:
        return self.scale * (-np.log1p(-u)) ** (1 / self.shape)

    def _cumulative(self, x: float) -> float:
        return -math.expm1(-((x / self.scale) ** self.shape))


class Pareto(_Base):
    """Pareto: smallest value `scale`, tail index `alpha` (at most 1: the mean is infinite, so `max` is required)."""

    distribution: Literal["pareto"]
    scale: Positive
    alpha: Positive

    @model_validator(mode="after")
    def _finite(self) -> Pareto:
        if self.alpha <= 1 and self.max is None:
            raise ValueError("a Pareto with alpha of 1 or less has no mean: give a max")
        return self

    def _inverse(self, u: np.ndarray) -> np.ndarray:
        return self.scale * (1 - u) ** (-1 / self.alpha)

    def _cumulative(self, x: float) -> float:
        return 1 - (self.scale / x) ** self.alpha if x > self.scale else 0.0


class Quantiles(_Base):
    """An empirical distribution by its quantiles: `points` maps percent (0 and 100 included) to a value.

    Between points the logarithm of the value is interpolated (linearly where a value is 0).
    """

    distribution: Literal["quantiles"]
    points: dict[float, NonNegative]

    @model_validator(mode="before")
    @classmethod
    def _well_formed(cls, data: Any) -> Any:
        points = data.get("points") if isinstance(data, dict) else None
        if isinstance(points, dict):
            try:
                pairs = sorted((float(q), float(value)) for q, value in points.items())
            except (TypeError, ValueError):
                raise ValueError("points must map percentages to numbers, as in {0: 1, 50: 10, 100: 90}") from None
            if len(pairs) < 2 or pairs[0][0] != 0 or pairs[-1][0] != 100:
                raise ValueError("points must start at 0 and end at 100 percent")
            if any(later < earlier for (_, earlier), (_, later) in zip(pairs, pairs[1:], strict=False)):
                raise ValueError("the values of points must not fall as the percentages rise")
        return data

    def _inverse(self, u: np.ndarray) -> np.ndarray:
        at, value, log = _columns(tuple(sorted(self.points.items())))
        k = np.clip(np.searchsorted(at, u, side="right") - 1, 0, len(at) - 2)
        part = np.clip((u - at[k]) / (at[k + 1] - at[k]), 0, 1)
        geometric = np.exp(log[k] + part * (log[k + 1] - log[k]))
        return np.where(value[k] > 0, geometric, value[k] + part * (value[k + 1] - value[k]))

    def _cumulative(self, x: float) -> float:
        u = np.linspace(0, 1, 20_001)
        return float(np.interp(x, self._inverse(u), u))


@lru_cache(maxsize=512)
def _columns(points: tuple[tuple[float, float], ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cumulative probability, value, its logarithm) of the points of a `Quantiles`."""
    at, value = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    return at / 100, value, np.array([_log(v) for v in value])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else 0.0


def _number_is_constant(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"distribution": "constant", "value": value}
    return value


Distribution = Annotated[
    Annotated[Constant | Lognormal | Gamma | Weibull | Pareto | Quantiles, Field(discriminator="distribution")],
    BeforeValidator(_number_is_constant),
]
"""A distribution as a persona file writes it: a plain number, or a mapping with `distribution: lognormal` and so on."""
