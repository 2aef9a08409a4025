"""Series of the METRICS table: gauges averaged, counters and histograms differenced at the edges of a
window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
import pandas as pd


@dataclass(frozen=True, slots=True)
class Series:
    """One metric with one set of labels: `time_s` ascending (monotonic seconds) and `value`, both
    (samples,)."""

    metric: str
    labels: dict[str, str]
    time_s: np.ndarray
    value: np.ndarray


def select(metrics: pd.DataFrame, metric: str) -> list[Series]:
    """All series of `metric`, by labels, in the order of the labels; empty when it was never sampled."""
    rows = metrics[metrics["metric"].to_numpy() == metric]
    found = []
    for labels, group in rows.groupby("labels", sort=True):
        time_s, value = group["time_s"].to_numpy(float), group["value"].to_numpy(float)
        order = np.argsort(time_s, kind="stable")
        found.append(Series(metric, orjson.loads(labels), time_s[order], value[order]))
    return found


def merged(series: Sequence[Series]) -> Series:
    """Several series of one meter as one: the longest, and of the others what lies outside its time. Where two
    exporters read a meter at once, their samples would not be in order, and a counter would seem to fall."""
    first, *others = sorted(series, key=lambda one: -one.time_s.size)
    if not others:
        return first
    time_s, value = first.time_s, first.value
    spans = [(time_s[0], time_s[-1])]
    for one in others:
        new = np.all([(one.time_s < begin) | (one.time_s > end) for begin, end in spans], axis=0)
        if new.any():
            time_s, value = np.append(time_s, one.time_s[new]), np.append(value, one.value[new])
            spans.append((one.time_s[new][0], one.time_s[new][-1]))
    order = np.argsort(time_s, kind="stable")
    return Series(first.metric, first.labels, time_s[order], value[order])


def cumulative(value: np.ndarray) -> np.ndarray:
    """A counter without its resets: where it falls, the server restarted and counts on from zero."""
    step = np.diff(value, prepend=value[:1])
    return np.cumsum(np.where(step < 0, value, step))


def resets(value: np.ndarray) -> int:
    """How often a counter fell back: its exporter restarted."""
    return int((np.diff(value) < 0).sum())


def increase(series: Series, start_s: float, end_s: float) -> float:
    """How far a counter rose in the window, resets accounted for.

    Between scrapes the counter is taken as linear, so that two scrapes beside an edge give the value at the
    edge; outside the scraped time it stands still. NaN with fewer than two samples.
    """
    kept = np.isfinite(series.value)
    if kept.sum() < 2:
        return float("nan")
    rise = cumulative(series.value[kept])
    at_start, at_end = np.interp([start_s, end_s], series.time_s[kept], rise)
    return float(at_end - at_start)


def counters(metrics: pd.DataFrame, metric: str) -> list[Series]:
    """`select`, each from zero where it appeared on a page that had been read before: a server may name a counter, or
    an engine, when it first counts."""
    found = select(metrics, metric)
    pages = metrics[metrics["source"].to_numpy() != "dcgm"] if found else metrics
    began = pages["time_s"].min()
    for index, one in enumerate(found):
        if one.time_s[0] > began:
            same = {text: all(orjson.loads(text).get(name) == one.labels.get(name) for name in ("instance", "pod"))
                    for text in pages["labels"].unique()}
            before = pages.loc[pages["labels"].map(same) & (pages["time_s"] < one.time_s[0]), "time_s"].max()
            if before == before:
                found[index] = Series(metric, one.labels, np.append(before, one.time_s), np.append(0.0, one.value))
    return found


def counter_increase(metrics: pd.DataFrame, metric: str, start_s: float, end_s: float) -> float | None:
    """Sum of the increases of all series of a counter; None when it was not sampled twice."""
    rises = [increase(one, start_s, end_s) for one in counters(metrics, metric)]
    rises = [rise for rise in rises if np.isfinite(rise)]
    return float(sum(rises)) if rises else None


def within(series: Series, start_s: float, end_s: float) -> np.ndarray:
    """The finite samples of a gauge in the window."""
    mask = (series.time_s >= start_s) & (series.time_s <= end_s) & np.isfinite(series.value)
    return series.value[mask]


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram's growth in a window. `bounds` ascending, the last +inf; `counts` a bucket (not
    cumulative)."""

    bounds: np.ndarray
    counts: np.ndarray
    sum: float

    @property
    def count(self) -> float:
        """Values in all."""
        return float(self.counts.sum())

    @property
    def mean(self) -> float:
        """Their mean; NaN of none."""
        return self.sum / self.count if self.count else float("nan")

    def quantile_bounds(self, q: float) -> tuple[float, float]:
        """The bucket (lower, upper] that holds the q % quantile: all that a histogram knows about it.

        The first bucket starts at 0, the last ends at +inf (so nothing is clamped). NaN when it is empty.
        """
        if not self.count:
            return float("nan"), float("nan")
        index = int(np.searchsorted(np.cumsum(self.counts), q / 100.0 * self.count - 1e-9))
        index = min(index, len(self.bounds) - 1)
        return (float(self.bounds[index - 1]) if index else 0.0), float(self.bounds[index])


def histogram_increase(metrics: pd.DataFrame, metric: str, start_s: float, end_s: float) -> Histogram | None:
    """The histogram `metric` (base name) differenced at the window's edges, all series added; None when
    absent."""
    by_bound: dict[float, float] = {}
    for one in counters(metrics, f"{metric}_bucket"):
        rise = increase(one, start_s, end_s)
        if np.isfinite(rise):
            bound = float(one.labels["le"])
            by_bound[bound] = by_bound.get(bound, 0.0) + rise
    if not by_bound:
        return None
    bounds = np.array(sorted(by_bound))
    cumulated = np.array([by_bound[bound] for bound in bounds])
    total = counter_increase(metrics, f"{metric}_sum", start_s, end_s)
    counts = np.diff(cumulated, prepend=0.0).clip(min=0.0)
    return Histogram(bounds, counts, float("nan") if total is None else total)
