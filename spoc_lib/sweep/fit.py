"""From rungs to a capacity: a monotone curve through each SLO's margin, and where it crosses the limit.

Margin of an SLO at a rung: log-odds of the share of samples beyond the limit, less those of the share that
the percentile allows; at or below 0 it is met. (Not the percentile itself: ITL has two kinds of gaps, with
and without a prompt chunk in the step, so its p95 leaps from one to the other while the share climbs
steadily.) More users never make a server faster, so the true margin never falls with users and the fit is
isotonic: it assumes nothing else, so a cliff is as welcome as a slope. The crossing lies between the last
rung at or below 0 and the first above it, and the monotone curve cannot say where between them: the whole
bracket goes into the interval. The rungs' own noise is put on top by drawing every margin anew from its
interval and fitting again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from spoc_lib.config import slo_name

#: Log-odds are cut here: a share of all or nothing has none.
EXTREME = 7.0
#: A margin that climbs more than this from one rung to the next (the odds of a miss twelvefold) is a cliff.
CLIFF = 2.5
REPLICATES = 2000


@dataclass(frozen=True, slots=True)
class Margins:
    """One SLO at every valid rung: arrays (rungs,), users ascending. `down`, `up`: standard errors on either
    side, of the log-odds; `name`: the SLO's."""

    name: str
    users: np.ndarray
    margin: np.ndarray
    down: np.ndarray
    up: np.ndarray


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the SLA is met up to: `users` (0: nowhere, inf: everywhere tried), `low`..`high` at `level`, the
    neighbouring rungs (`bracket`), and the SLO that crosses first. `by_slo`: crossing of each SLO alone."""

    users: float
    low: float
    high: float
    level: float
    bracket: tuple[float, float]
    binding: str | None
    by_slo: dict[str, float]

    @property
    def relative_width(self) -> float:
        """Width of the interval over the capacity; inf where it is not bounded."""
        return (self.high - self.low) / self.users if 0 < self.users < math.inf else math.inf


def margins(verdicts: pd.DataFrame, level: float) -> list[Margins]:
    """One `Margins` an SLO from SLO_VERDICTS rows of valid rungs, whose intervals are at `level`.

    Rows without samples are left out.
    """
    z = stats.norm.ppf(0.5 + level / 2)
    found = []
    for (persona, metric, percentile, limit_s), rows in verdicts[verdicts["samples"] > 0].groupby(
            ["persona", "metric", "percentile", "limit_s"], sort=False):
        rows = rows.sort_values("users", kind="stable")
        size = rows["effective"].to_numpy(float)
        share = rows["beyond_ratio"].to_numpy(float)
        share = np.clip(share, 0.5 / (size + 1), (size + 0.5) / (size + 1))  # none of n: taken as half a sample
        centre = _log_odds(share)
        low, high = (_log_odds(rows[name].to_numpy(float)) for name in ("beyond_low_ratio", "beyond_high_ratio"))
        down, up = (centre - low) / z, (high - centre) / z
        down = np.where(low <= -EXTREME, np.maximum(down, up), down)  # nothing seen beyond: no error below zero either
        up = np.where(high >= EXTREME, np.maximum(down, up), up)
        least = 1e-3
        found.append(Margins(
            slo_name(persona, metric, percentile, limit_s), rows["users"].to_numpy(float),
            centre - float(_log_odds(np.array(1 - percentile / 100))),
            np.clip(down, least, EXTREME), np.clip(up, least, EXTREME)))
    return found


def _log_odds(share: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.clip(np.log(share) - np.log1p(-share), -EXTREME, EXTREME)


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The non-decreasing curve nearest to each row of `values` (replicates, rungs), in weighted least squares.

    The max-min formula: at i, the largest over a <= i of the smallest over b >= i of the mean of a..b.
    """
    count = values.shape[1]
    sums = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values * weights, axis=1)], axis=1)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    fitted = np.full(values.shape, -np.inf)
    for first in range(count):
        means = (sums[:, first + 1:] - sums[:, [first]]) / (total[first + 1:] - total[first])
        smallest = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
        fitted[:, first:] = np.maximum(fitted[:, first:], smallest)
    return fitted


def monotone(users: np.ndarray, values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(users without repeats, isotonic fit there of each row of `values`): rungs of equally many users are one point,
    at their weighted mean. `users` (rungs,) ascending, `values` (replicates, rungs)."""
    points, index = np.unique(users, return_inverse=True)
    total = np.bincount(index, weights=weights)
    sums = np.stack([np.bincount(index, weights=row) for row in values * weights])
    return points, isotonic(sums / total, total)


def cross(all_margins: list[Margins], level: float = 0.9, *, shared_noise: bool = False, seed: int = 0) -> Crossing:
    """The largest number of users at which every SLO is met, with its interval at `level`.

    shared_noise: the rungs played the same users' sizes, so that their errors are one error: it does not
    average out.
    """
    if not all_margins or not any(one.users.size for one in all_margins):
        return Crossing(0.0, 0.0, math.inf, level, (0.0, math.inf), None, {})
    all_margins = [inflated(one) for one in all_margins]
    points, brackets = {}, {}
    for one in all_margins:
        points[one.name], brackets[one.name] = _point(one, _weights(one))
    binding = min(points, key=lambda name: points[name])
    users = points[binding]
    lows, highs = draw(all_margins, shared_noise=shared_noise, seed=seed)
    tail = (1 - level) / 2
    low = float(np.quantile(lows, tail, method="inverted_cdf"))
    high = float(np.quantile(highs, 1 - tail, method="inverted_cdf"))
    return Crossing(users, min(low, users), max(high, users), level, brackets[binding],
                    binding if math.isfinite(users) else None, points)


def draw(all_margins: list[Margins], *, shared_noise: bool = False, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Brackets of the crossing in `REPLICATES` fits through margins drawn anew: last users at which every SLO is met,
    first at which one is missed."""
    random = np.random.default_rng(seed)
    lows, highs = [], []
    for one in map(inflated, all_margins):
        noise = random.standard_normal((REPLICATES, 1 if shared_noise else one.users.size))
        drawn = one.margin + noise * np.where(noise < 0, one.down, one.up)
        low, high = _brackets(*monotone(one.users, drawn, _weights(one)))
        lows.append(low)
        highs.append(high)
    return np.min(lows, axis=0), np.min(highs, axis=0)


def inflated(one: Margins) -> Margins:
    """`one` with its errors raised where rungs contradict each other by more than their errors allow.

    At a cliff, which side a rung falls on depends on who its users are, and no rung's own interval knows that; rungs
    in which more users do better than fewer show it. Within each run of rungs that the monotone fit had to pool,
    errors grow by the Birge ratio, sqrt(chi2 / (n - 1)), where it exceeds 1.
    """
    if one.users.size < 2:
        return one
    users, curve = monotone(one.users, one.margin[None, :], _weights(one))
    fitted = curve[0][np.searchsorted(users, one.users)]
    pooled = np.concatenate([[0], np.cumsum(np.diff(fitted) > 1e-9)])
    residual = (one.margin - fitted) / np.where(one.margin < fitted, one.up, one.down)
    counts = np.bincount(pooled)
    ratio = np.sqrt(np.bincount(pooled, weights=residual**2) / np.maximum(counts - 1, 1))
    grown = np.where(counts > 1, np.maximum(ratio, 1.0), 1.0)[pooled]
    return Margins(one.name, one.users, one.margin, one.down * grown, one.up * grown)


def _weights(one: Margins) -> np.ndarray:
    """All rungs weigh the same: they last equally long, and a rung that saw no burst looks more certain than it is."""
    return np.ones(one.users.size)


def _point(one: Margins, weights: np.ndarray) -> tuple[float, tuple[float, float]]:
    """(crossing of the fit, neighbouring rungs): linear between them where the margin climbs gently. At a
    cliff, where it climbs by more than `CLIFF`, a straight line means nothing and the lower rung is the
    answer."""
    users, fitted = monotone(one.users, one.margin[None, :], weights)
    low, high = _brackets(users, fitted)
    bracket = float(low[0]), float(high[0])
    if not math.isfinite(bracket[1]):
        return math.inf, bracket
    index = int(np.argmax(fitted[0] > 0))
    if index == 0:
        return 0.0, bracket
    before, after = fitted[0, index - 1], fitted[0, index]
    if after - before > CLIFF:
        return bracket[0], bracket
    return bracket[0] + (bracket[1] - bracket[0]) * float(-before / (after - before)), bracket


def _brackets(users: np.ndarray, fitted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Last rung at or below 0 (0 where there is none) and first above it (inf where there is none), a
    replicate."""
    over = fitted > 0
    index = np.where(over.any(axis=1), over.argmax(axis=1), len(users))
    padded = np.concatenate([[0.0], users, [math.inf]])
    return padded[index], padded[index + 1]
