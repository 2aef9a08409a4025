"""A percentile and how sure it is, when the samples are not independent.

Requests of one user resemble each other (long conversations are long for hours) and requests of one moment
resemble each other (a burst delays everybody). Taken as independent, their interval comes out far too narrow.
So "is the q-th percentile at most c?" is asked as "is the share of samples beyond c at most 1 - q?", whose
variance is taken over blocks both ways (users, and slices of time; Cameron, Gelbach & Miller 2011) and
turned into an effective number of independent samples and an exact binomial bound (Korn & Graubard 1998).
The interval holds every c that the answer cannot exclude (Woodruff 1952). Where users are many it is what a
bootstrap over whole users gives; unlike the bootstrap it also knows what lies beyond the largest sample:
with too few samples for a p99 the upper end is +inf, not the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

from spoc_lib.metrics import Samples

#: Slices of time that a window is cut into for the second kind of block.
TIME_BLOCKS = 12
#: Order statistics tried as an interval's end on either side of the percentile.
CANDIDATES = 40


@dataclass(frozen=True, slots=True)
class Estimate:
    """`value_s` (nearest rank) within `low_s`..`high_s` at the level asked for; share of the weight `beyond` the
    limit, within `beyond_low`..`beyond_high` (NaN, 0, 1 without a limit); `effective` independent samples there."""

    value_s: float
    low_s: float
    high_s: float
    samples: int
    effective: float
    beyond: float = math.nan
    beyond_low: float = 0.0
    beyond_high: float = 1.0


def estimate(samples: Samples, q: float, level: float = 0.9, limit_s: float | None = None) -> Estimate:
    """The q-th percentile (nearest rank, failures +inf) with its interval at `level`, blocks by user and
    time; and the share of samples beyond `limit_s`, where one is given."""
    if len(samples) == 0:
        return Estimate(math.nan, 0.0, math.inf, 0, 0.0)
    fraction, steps = q / 100.0, np.linspace(0.0, 1.0, CANDIDATES)
    fractions = np.concatenate([fraction - fraction * steps[::-1] ** 2, fraction + (1 - fraction) * steps**1.5])
    values = samples.ranked().quantiles(list(fractions))
    value, thresholds = values[CANDIDATES], values if limit_s is None else [*values, limit_s]
    candidates = np.unique(thresholds)
    blocks = Blocks(samples, candidates)
    tail = (1 - level) / 2
    low_s, high_s = 0.0, math.inf
    for index, candidate in enumerate(candidates):
        if candidate <= value and blocks.share_bounds(index, at_or_beyond=True, tail=tail)[0] > 1 - fraction:
            low_s = float(candidate)
        if candidate >= value and blocks.share_bounds(index, at_or_beyond=False, tail=tail)[1] <= 1 - fraction:
            high_s = float(candidate)
            break
    if limit_s is None:
        effective = blocks.effective(int(np.searchsorted(candidates, value)), at_or_beyond=True)
        return Estimate(value, low_s, high_s, len(samples), effective)
    index = int(np.searchsorted(candidates, limit_s))
    return Estimate(value, low_s, high_s, len(samples), blocks.effective(index, at_or_beyond=False),
                    blocks.share(index), *blocks.share_bounds(index, at_or_beyond=False, tail=tail))


def shares_beyond(samples: Samples, limits_s: Sequence[float], level: float = 0.9) -> list[Estimate]:
    """`estimate` at several limits at once, of the shares alone (value_s NaN): how the share falls with the limit."""
    if len(samples) == 0:
        return [Estimate(math.nan, 0.0, math.inf, 0, 0.0)] * len(limits_s)
    candidates = np.unique(np.asarray(limits_s, dtype=float))
    blocks = Blocks(samples, candidates)
    found = []
    for index in np.searchsorted(candidates, limits_s):
        low, high = blocks.share_bounds(int(index), at_or_beyond=False, tail=(1 - level) / 2)
        found.append(Estimate(math.nan, 0.0, math.inf, len(samples), blocks.effective(int(index), at_or_beyond=False),
                              blocks.share(int(index)), low, high))
    return found


class Blocks:
    """Weight at or beyond each candidate threshold, by user and slice of time."""

    def __init__(self, samples: Samples, candidates: np.ndarray) -> None:
        users = np.unique(samples.user, return_inverse=True)[1]
        slices = _slices(samples.time_s)
        self.users, self.slices = int(users.max()) + 1, int(slices.max()) + 1
        cell = users * self.slices + slices
        bins = len(candidates) + 1
        left = np.searchsorted(candidates, samples.value_s, side="right")  # candidates at or below the value
        below = np.searchsorted(candidates, samples.value_s, side="left")  # candidates below it
        shape = (self.users * self.slices, bins)
        size = shape[0] * bins

        def table(index: np.ndarray) -> np.ndarray:
            """(cells, bins): weight whose value lies at or beyond (beyond) candidate `bin` - 1."""
            counts = np.bincount(cell * bins + index, weights=samples.weight, minlength=size).reshape(shape)
            return np.cumsum(counts[:, ::-1], axis=1)[:, ::-1]

        self.at_or_beyond, self.beyond = table(left), table(below)
        self.weight = self.beyond[:, 0]
        self.total = float(self.weight.sum())
        self.cells = int((self.weight > 0).sum())
        self.independent = self.total**2 / float((samples.weight**2).sum())
        self._level_quantiles: dict[float, float] = {}

    def share_bounds(self, index: int, *, at_or_beyond: bool, tail: float) -> tuple[float, float]:
        """Bounds on the true share of weight at or beyond (or: beyond) candidate `index`, `tail` on either
        side."""
        beyond = (self.at_or_beyond if at_or_beyond else self.beyond)[:, index + 1]
        share = float(beyond.sum() / self.total)
        size, blocks = self._effective(beyond, share)
        if 0 < share < 1:
            if tail not in self._level_quantiles:
                self._level_quantiles[tail] = (stats.norm.ppf(tail) / stats.t.ppf(tail, blocks - 1)) ** 2 \
                    if blocks > 1 else 0.0
            size *= self._level_quantiles[tail]
        hits = share * size
        low = float(special.betaincinv(hits, size - hits + 1, tail)) if hits > 0 else 0.0
        high = float(special.betaincinv(hits + 1, size - hits, 1 - tail)) if size - hits > 0 else 1.0
        return low, high

    def share(self, index: int) -> float:
        """Share of the weight beyond candidate `index`."""
        return float(self.beyond[:, index + 1].sum() / self.total)

    def effective(self, index: int, *, at_or_beyond: bool) -> float:
        """How many independent samples would tell as much about the share at or beyond (or: beyond) a
        candidate."""
        beyond = (self.at_or_beyond if at_or_beyond else self.beyond)[:, index + 1]
        return self._effective(beyond, float(beyond.sum() / self.total))[0]

    def _effective(self, beyond: np.ndarray, share: float) -> tuple[float, int]:
        """(effective samples, blocks that the variance was taken over)."""
        blocks = min((count for count in (self.users, self.slices) if count > 1), default=1)
        if not 0 < share < 1:  # all alike, no correlation to be measured: one sample a user and slice
            return float(self.cells), blocks
        residual = (beyond - share * self.weight).reshape(self.users, self.slices)
        by_user, by_time, by_both = (
            _block_variance(residual.sum(axis=1)), _block_variance(residual.sum(axis=0)),
            float((residual**2).sum()) * self.cells / max(self.cells - 1, 1))
        variance = max(by_user, by_time, by_user + by_time - by_both) / self.total**2
        if variance <= 0:
            return float(self.cells), blocks
        return float(min(self.independent, share * (1 - share) / variance)), blocks


def _block_variance(sums: np.ndarray) -> float:
    """Variance of a sum of independent blocks whose residuals are `sums`; 0 for a single block."""
    return float((sums**2).sum()) * len(sums) / (len(sums) - 1) if len(sums) > 1 else 0.0


def _slices(time_s: np.ndarray) -> np.ndarray:
    span = float(time_s.max() - time_s.min())
    if span <= 0:
        return np.zeros(len(time_s), dtype=np.int64)
    return np.minimum((time_s - time_s.min()) / span * TIME_BLOCKS, TIME_BLOCKS - 1).astype(np.int64)
