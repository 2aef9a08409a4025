"""Shapes of a fit: groups of alike sessions, quantiles in few points, censored lengths, parametric families."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import special, stats

from spoc_lib.workload.traces.sessions import Session

#: Percentages at which an empirical distribution is read, before it is simplified.
POINTS = (0, *range(1, 100), 99.5, 99.9, 100)
#: Context windows of today's models, in tokens.
WINDOWS = (32_000, 200_000, 1_000_000)
#: A prompt that shrinks below this part of the one before was compacted.
COMPACTED_RATIO = 0.7
_FEWEST = 15
_FAMILIES = ("lognormal", "gamma", "weibull", "pareto")


def grouped(sessions: list[Session], most: int, windows: tuple[int, ...]) -> list[list[Session]]:
    """Groups of alike sessions: by context window, by compaction, then by the size of the first prompt."""
    edges = sorted(windows)
    by_window: dict[int, list[Session]] = {}
    for session in sessions:
        longest = max(request.prompt_tokens for request in session.requests)
        by_window.setdefault(int(np.searchsorted(edges, longest)), []).append(session)
    few = [window for window, group in by_window.items() if len(group) < _FEWEST and len(by_window) > 1]
    for window in few:  # too few to be a persona: to the nearest window
        nearest = min((w for w in by_window if w != window), key=lambda w: abs(w - window))
        by_window[nearest] += by_window.pop(window)
    return [group for window in sorted(by_window) for part in _by_compaction(by_window[window])
            for group in _split(part, most)]


def compacted(session: Session) -> bool:
    """Whether the context of a session was cut back at some step."""
    return any(later.prompt_tokens < COMPACTED_RATIO * earlier.prompt_tokens
               for earlier, later in zip(session.requests, session.requests[1:], strict=False))


def _by_compaction(sessions: list[Session]) -> list[list[Session]]:
    parts = [[s for s in sessions if not compacted(s)], [s for s in sessions if compacted(s)]]
    return parts if min(map(len, parts)) >= _FEWEST else [sessions]


def _split(sessions: list[Session], most: int) -> list[list[Session]]:
    points = np.log([session.requests[0].prompt_tokens for session in sessions])
    for count in range(min(most, len(sessions) // _FEWEST), 1, -1):
        labels = _k_means(points, count)
        if np.bincount(labels, minlength=count).min() >= _FEWEST:
            order = np.argsort([np.median(points[labels == k]) for k in range(count)])
            return [[s for s, label in zip(sessions, labels, strict=True) if label == k] for k in order]
    return [sessions]


def _k_means(points: np.ndarray, count: int) -> np.ndarray:
    centres = np.quantile(points, (np.arange(count) + 0.5) / count)
    labels = np.zeros(len(points), dtype=int)
    for _ in range(100):
        new = np.abs(points[:, None] - centres[None]).argmin(axis=1)
        centres = np.array([points[new == k].mean() if (new == k).any() else centres[k] for k in range(count)])
        if (new == labels).all():
            break
        labels = new
    return labels


def survived(ended: Mapping[int, float], cut: Mapping[int, float]) -> np.ndarray:
    """Lengths at 4000 even quantiles by Kaplan and Meier's estimate; `cut`: lengths that went on unseen."""
    at_risk, survival, lengths, reached = sum(ended.values()) + sum(cut.values()), 1.0, [], []
    for length in sorted({*ended, *cut}):
        survival *= 1 - ended.get(length, 0.0) / at_risk
        at_risk -= ended.get(length, 0.0) + cut.get(length, 0.0)
        lengths.append(length)
        reached.append(1 - survival)
    index = np.minimum(np.searchsorted(reached, (np.arange(4000) + 0.5) / 4000), len(lengths) - 1)
    return np.asarray(lengths, dtype=float)[index]


def quantiles(values: np.ndarray, default: float = 1.0, *, exact: tuple[float, ...] | None = None) -> Any:
    """A `quantiles` distribution of the values; a plain number where there is none or only one value.

    exact: the percentages that `values` are the quantiles of; without it they are a sample.
    """
    values = np.asarray(values, dtype=float)
    if not len(values):
        return default
    if values.min() == values.max():
        return float(values[0])
    table = list(zip(exact, map(float, values), strict=True)) if exact else [
        (q, float(np.percentile(values, q))) for q in POINTS]
    return {"distribution": "quantiles",
            "points": {q: round(v, 2) if v < 1000 else round(v) for q, v in _simplified(table)}}


def _simplified(table: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The fewest of the points from which the others follow within 2 % (recursive end-point fit, logarithms)."""
    (first, low), (last, high) = table[0], table[-1]
    worst, at = 0.02, 0
    for k, (q, value) in enumerate(table[1:-1], 1):
        part = (q - first) / (last - first)
        drawn = math.exp((1 - part) * math.log(low) + part * math.log(high)) if low > 0 else low + part * (high - low)
        error = abs(drawn - value) / max(1e-9, value)
        if error > worst:
            worst, at = error, k
    if not at:
        return [table[0], table[-1]]
    return _simplified(table[: at + 1])[:-1] + _simplified(table[at:])


def families(measured: dict[str, np.ndarray]) -> pd.DataFrame:
    """Parametric families fitted by maximum likelihood to the positive values, and their distance from them."""
    rows = []
    for name, values in measured.items():
        positive = values[values > 0]
        if len(positive) < 20 or positive.min() == positive.max():
            continue
        sample = np.sort(positive)[np.linspace(0, len(positive) - 1, min(len(positive), 4000)).astype(int)]
        for family in _FAMILIES:
            parameters, cumulative = _fit_family(family, sample)
            at = cumulative(sample)
            steps = np.arange(len(sample)) / len(sample)
            distance = float(max(np.max(at - steps), np.max(steps + 1 / len(sample) - at)))
            rows.append({"quantity": name, "family": family, "distance": distance, **parameters})
    return pd.DataFrame(rows)


def _fit_family(family: str, x: np.ndarray) -> tuple[dict[str, float], Callable[[np.ndarray], np.ndarray]]:
    """({parameter: value}, cumulative function) in the terms of `distributions`."""
    if family == "lognormal":
        mean, sigma = float(np.log(x).mean()), float(np.log(x).std())
        return {"median": math.exp(mean), "sigma": sigma}, lambda v: special.ndtr((np.log(v) - mean) / sigma)
    if family == "gamma":
        shape, _, scale = stats.gamma.fit(x, floc=0)
        return {"mean_value": shape * scale, "shape": shape}, lambda v: special.gammainc(shape, v / scale)
    if family == "weibull":
        shape, _, scale = stats.weibull_min.fit(x, floc=0)
        return {"scale": scale, "shape": shape}, lambda v: -np.expm1(-((v / scale) ** shape))
    low = float(x.min())
    alpha = len(x) / float(np.log(x / low).sum())
    return {"scale": low, "alpha": alpha}, lambda v: 1 - (low / v) ** alpha
