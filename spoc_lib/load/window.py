"""Which part of a rung counts, by a stated rule; for both drivers, on the tables of requests and chunks.

The rule. Ramp and warm-up are cut first. On what is left until the rung stops sending, two series are formed in
equal bins: tokens a second and mean requests in flight. Each is truncated by MSER (White 1997: drop the first d
values, d at most half, such that the standard error of the mean of the rest is smallest); the window starts at the
later of both truncations. It is *steady* when enough requests started in it and, for both series, the two halves agree
and no quarter stands far from the whole (a rate that falls at the end, or rises and falls, has equal halves); else
*unresolved*, with the time that would be needed. An overloaded open loop has a steady token rate and a queue that
grows for ever: that is why both are asked. Latency belongs to requests by start time, throughput to tokens by their
own time; so neither warm-up requests nor the filling pipe leak in.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

BINS = 60
MIN_BIN_S = 0.25
#: Fewer started requests say nothing about a p95.
MIN_REQUESTS = 40
#: Halves of the window may differ by this share, or by this many standard errors, before it counts as moving. At
#: that, simulated steady loops of 20 users and more are called moving in 0 to 17 % of rungs of two minutes (the most
#: with half a minute between turns), in 0 to 8 % of five minutes; a queue that 1.5 times the capacity fills, in all.
HALVES_RATIO = 0.1
HALVES_SIGMA = 2.5
#: As correlated as this, two neighbouring bins say hardly more than one.
MOST_CORRELATED = 0.95
#: A quarter may differ from the whole by this share, or by this many standard errors. They are counted as if bins were
#: independent, which they are not where answers are long: hence five.
QUARTER_RATIO = 0.25
QUARTER_SIGMA = 5.0
#: Fewer bins make no quarters.
QUARTERS_FROM = 16


@dataclass(frozen=True, slots=True)
class Window:
    """[start_s, end_s) of a rung. verdict: steady | unresolved. `needed_s`: seconds a rung should last instead,
    from the start of its ramp; null when steady."""

    start_s: float
    end_s: float
    verdict: str
    reason: str
    needed_s: float | None = None

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "length_s": self.length_s}


def steady_window(requests: pd.DataFrame, chunks: pd.DataFrame, start_s: float, end_s: float, *,
                  settle_s: float = 0.0, min_requests: int = MIN_REQUESTS) -> Window:
    """The steady window of a rung that sent from `start_s` to `end_s`, `settle_s` being its ramp and warm-up.

    `requests` (REQUESTS: send_s, end_s) and `chunks` (CHUNKS: time_s, tokens). When unresolved, the window is all
    after `settle_s`, so that figures can be shown beside the verdict.
    """
    earliest = min(start_s + settle_s, end_s)
    whole = end_s - earliest
    bins = min(BINS, int(whole / MIN_BIN_S))
    if bins < 8 or requests.empty or chunks.empty:
        reason = "no request was answered" if chunks.empty else f"only {whole:.1f} s after ramp and warm-up"
        return Window(earliest, end_s, "unresolved", reason,
                      None if chunks.empty else settle_s + max(60.0, 4 * whole))
    edges = np.linspace(earliest, end_s, bins + 1)
    tokens = token_rate(chunks, edges)
    flight = mean_in_flight(requests, edges)
    cut = max(mser(tokens), mser(flight))
    begin = float(edges[cut])
    started = int(((requests["send_s"] >= begin) & (requests["send_s"] < end_s)).sum())
    if started < min_requests:
        rate = max(started, 1) / (end_s - begin)
        return Window(earliest, end_s, "unresolved",
                      f"{started} requests started in the window, {min_requests} are needed",
                      math.ceil(begin - start_s + 1.2 * min_requests / rate))
    for name, unit, series in (("token rate", "tokens/s", tokens), ("load", "requests in flight", flight)):
        drift = moving(series[cut:], unit)
        if drift is not None:
            return Window(earliest, end_s, "unresolved", f"the {name} is still moving: {drift}",
                          math.ceil(settle_s + 2.5 * whole))
    return Window(begin, end_s, "steady", f"MSER cut {begin - earliest:.1f} s after ramp and warm-up")


def mser(series: np.ndarray) -> int:
    """How many first values to drop (at most half): argmin over d of var(x[d:]) / (n - d)."""
    x = np.asarray(series, dtype=float)
    n = len(x)
    left = np.arange(n, 0, -1)
    sums, squares = np.cumsum(x[::-1])[::-1], np.cumsum((x**2)[::-1])[::-1]
    variance = np.maximum(squares / left - (sums / left) ** 2, 0.0)
    score = (variance / left)[: n // 2 + 1]
    tied = score <= score.min() * (1 + 1e-9) + 1e-12 * max(1.0, float(np.abs(x).max()) ** 2)
    return int(np.argmax(tied))


def moving(series: np.ndarray, unit: str) -> str | None:
    """A sentence when the halves of `series`, or a quarter and the whole, differ by more than the
    tolerance and the noise, else None."""
    half = len(series) // 2
    if half < 3:
        return None
    first, second = series[:half], series[half:]
    a, b = float(first.mean()), float(second.mean())
    if abs(a - b) > max(HALVES_RATIO * max(a, b), HALVES_SIGMA * halves_error(first, second)):
        return f"{a:.4g} {unit} in its first half, {b:.4g} in its second"
    if len(series) < QUARTERS_FROM:
        return None
    quarters, whole = np.array_split(series, 4), float(series.mean())
    within = math.sqrt(float(np.mean([quarter.var() for quarter in quarters])) / (len(series) / 4))
    furthest = max(range(4), key=lambda k: abs(float(quarters[k].mean()) - whole))
    rate = float(quarters[furthest].mean())
    if abs(rate - whole) <= max(QUARTER_RATIO * whole, QUARTER_SIGMA * within):
        return None
    return f"{rate:.4g} {unit} in quarter {furthest + 1} of 4, {whole:.4g} in the whole"


def halves_error(first: np.ndarray, second: np.ndarray) -> float:
    """Standard error of the difference of two halves' means. Neighbouring bins share answers, so it grows with their
    correlation r, as sqrt((1 + r) / (1 - r)); a trend inside a half is no noise and is taken out first."""
    if len(first) < 6:
        return math.sqrt(float(first.var()) / len(first) + float(second.var()) / len(second))
    rest = [half - np.polyval(np.polyfit(np.arange(len(half)), half, 1), np.arange(len(half)))
            for half in (first, second)]
    squares = sum(float((one**2).sum()) for one in rest)
    if squares == 0.0:
        return 0.0
    r = min(max(sum(float((one[1:] * one[:-1]).sum()) for one in rest) / squares, 0.0), MOST_CORRELATED)
    variance = squares / (len(first) + len(second) - 4) * (1 + r) / (1 - r)
    return math.sqrt(variance * (1 / len(first) + 1 / len(second)))


def token_rate(chunks: pd.DataFrame, edges: np.ndarray) -> np.ndarray:
    """Tokens a second in each bin."""
    counts, _ = np.histogram(chunks["time_s"].to_numpy(), bins=edges, weights=chunks["tokens"].to_numpy())
    return counts / np.diff(edges)


def mean_in_flight(requests: pd.DataFrame, edges: np.ndarray) -> np.ndarray:
    """Mean number of requests in flight in each bin, exact (the integral of the step function)."""
    sends = np.sort(requests["send_s"].to_numpy(dtype=float))
    ends = np.sort(requests["end_s"].fillna(edges[-1]).to_numpy(dtype=float))
    area = _ramps(sends, edges) - _ramps(ends, edges)
    return np.diff(area) / np.diff(edges)


def _ramps(times: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Sum of max(0, t - time) over `times` (ascending), for each t of `at`."""
    count = np.searchsorted(times, at)
    sums = np.concatenate([[0.0], np.cumsum(times)])
    return at * count - sums[count]
