"""Percentiles, from raw values only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


def percentile(values: Iterable[float] | np.ndarray, q: float) -> float:
    """Nearest-rank percentile: the smallest value with at least q % of the values at or below it.

    Failures belong in `values` as +inf: no interpolation, so an infinite tail never becomes NaN.
    `q` in (0, 100]; NaN when there are no values.
    """
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    if array.size == 0:
        return math.nan
    if np.isnan(array).any():
        raise ValueError("percentile of NaN: a failed request is +inf, an absent one is left out")
    rank = max(1, math.ceil(q / 100.0 * array.size - 1e-9))
    return float(np.partition(array, rank - 1)[rank - 1])


def percentiles(values: Iterable[float] | np.ndarray, qs: Sequence[float] = (50, 95, 99)) -> dict[str, float]:
    """{'p50': …, 'p95': …, 'p99': …} by nearest rank, in the unit of `values`."""
    array = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    return {f"p{q:g}": percentile(array, q) for q in qs}
