"""Percentiles, from raw values only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


class Ranked:
    """Values (n,) ready to be asked for their nearest-rank quantiles; +inf is a value like any other.

    weights (n,): how much each stands for, where that differs. cut (n,): values of which only that is known that they
    are at least so large (a wait whose end nobody saw). Their weight goes to the larger ones in proportion, which is
    the product-limit estimate (Kaplan and Meier 1958); beyond the largest value, what is left counts as +inf.
    """

    def __init__(self, values: np.ndarray, weights: np.ndarray | None = None, cut: np.ndarray | None = None) -> None:
        if np.isnan(values).any():
            raise ValueError("percentile of NaN: a failed request is +inf, an absent one is left out")
        if weights is None or not len(weights) or (weights == weights[0]).all():
            weights = None
        self.total = float(len(values) if weights is None else weights.sum())
        whole = np.ones(len(values), bool) if cut is None else ~cut
        self._mass: np.ndarray | None = None
        if weights is None and whole.all():
            self._values, self._ranks = values, None
        elif weights is None:
            self._values, self._ranks = np.sort(values[whole]), None
        else:
            order = np.argsort(values[whole])
            self._values, self._ranks = values[whole][order], np.cumsum(weights[whole][order])
        if not whole.all():
            order = np.argsort(values[~whole])
            lost = np.ones(len(order)) if weights is None else weights[~whole][order]
            ended = np.searchsorted(self._values, values[~whole][order], side="right")  # at or below each that was cut
            below = ended.astype(float) if self._ranks is None else np.append(0.0, self._ranks)[ended]
            left = self.total - below - np.cumsum(lost) + lost
            heavier = np.cumprod(np.append(1.0, left / np.maximum(left - lost, 1e-300)))
            self._weight = np.concatenate([[0.0], below, [self.total - lost.sum()]])
            self._mass = np.append(0.0, np.cumsum(np.diff(self._weight) * heavier))

    def quantiles(self, fractions: Sequence[float]) -> list[float]:
        """For each fraction in (0, 1] the smallest value with at least that share of the weight at or below it; NaN
        where there are no values."""
        if not self.total:
            return [math.nan] * len(fractions)
        ranks, slack = np.asarray(fractions) * self.total, 1e-9 if self._ranks is None else 1e-9 * self.total
        if self._mass is not None:
            beyond = ranks > self._mass[-1] * (1 + 1e-9)
            ranks = np.where(beyond, np.inf, np.interp(ranks, self._mass, self._weight))
        if self._ranks is None:
            places = np.minimum(np.maximum(np.ceil(ranks - slack), 1) - 1, len(self._values)).astype(int)
            known = sorted({place for place in places.tolist() if place < len(self._values)})
            placed = np.partition(self._values, known) if self._mass is None else self._values
        else:
            places, placed = np.searchsorted(self._ranks, ranks - slack), self._values
        return [float(placed[place]) if place < len(placed) else math.inf for place in places]

    def percentiles(self, qs: Sequence[float] = (50, 95, 99)) -> dict[str, float]:
        """{'p50': …, 'p95': …, 'p99': …}, in the unit of the values."""
        found = self.quantiles([q / 100.0 for q in qs])
        return {f"p{q:g}": value for q, value in zip(qs, found, strict=True)}


def percentile(values: Iterable[float] | np.ndarray, q: float) -> float:
    """Nearest-rank percentile: the smallest value with at least q % of the values at or below it.

    Failures belong in `values` as +inf: no interpolation, so an infinite tail never becomes NaN.
    `q` in (0, 100]; NaN when there are no values.
    """
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    return Ranked(array).quantiles([q / 100.0])[0]
