"""Under tensor parallelism every GPU waits for the slowest in each collective: find the one that is waited
for.

The slow GPU looks busy with its own kernels, the waiting ones look busy in collectives, so activity does not
tell them apart; clocks and violations do. A GPU is a straggler while, for `PERSISTENCE_S`, its SM clock lies
`CLOCK_DEFICIT` below the median of its peers, or half of that with an alarming clock event (hardware or
thermal slowdown, power brake) or a growing thermal violation counter beside it. Peers that are capped
together are no stragglers; boards differ by a few per cent under a power cap, which is why the deficit is
not smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from spoc_lib.metrics import streams
from spoc_lib.telemetry import dcgm, gpus
from spoc_lib.telemetry.series import Series, cumulative

CLOCK_DEFICIT = 0.08
PERSISTENCE_S = 3.0
CLOCKS_EVENT_REASONS = "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"


@dataclass(frozen=True, slots=True)
class Straggler:
    """One GPU and the span in which it held its peers back. `detected_s`: when the rule first fired;
    clock_deficit_ratio: mean, against the median of its peers; itl_cost_ratio: median ITL in the span over
    the median outside it (None where it cannot be told); reasons: what DCGM says about it."""

    gpu: str
    start_s: float
    detected_s: float
    end_s: float
    clock_deficit_ratio: float
    temperature_c: float | None
    reasons: list[str]
    itl_cost_ratio: float | None
    sentence: str


@dataclass(frozen=True, slots=True)
class StragglerReport:
    """`gpus`: how many were watched (those at work); `notes`: what could not be seen."""

    gpus: int
    stragglers: list[Straggler] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_stragglers(metrics: pd.DataFrame, start_s: float, end_s: float,
                    chunks: pd.DataFrame | None = None) -> StragglerReport:
    """Stragglers between `start_s` and `end_s` (METRICS' clock); `chunks` (CHUNKS) gives their cost in
    ITL."""
    metrics = gpus.at_work(metrics[metrics["source"].to_numpy() == "dcgm"])
    clocks = gpus.by_gpu(metrics, "DCGM_FI_DEV_SM_CLOCK")
    if not clocks:
        return StragglerReport(0, notes=["no SM clocks were recorded: a GPU that holds the others back stays hidden"])
    if len(clocks) < 2:
        return StragglerReport(len(clocks), notes=["a single GPU has no peers to be compared with"])
    times = np.unique(np.concatenate([one.time_s for one in clocks.values()]))
    times = times[(times >= start_s) & (times <= end_s)]
    if not times.size:
        return StragglerReport(len(clocks), notes=["no SM clock was sampled in the window"])
    names = sorted(clocks)
    clock = np.array([_at(clocks[name], times) for name in names])
    events, heat, notes = _events(metrics, names, times)
    found = []
    for index, name in enumerate(names):
        peers = np.nanmedian(np.delete(clock, index, axis=0), axis=0)
        deficit = 1 - clock[index] / np.maximum(peers, 1.0)
        alarmed = (events[index] > 0) | heat[index]
        slow = (deficit >= CLOCK_DEFICIT) | ((deficit >= CLOCK_DEFICIT / 2) & alarmed)
        for first, fired, last in _spans(times, slow):
            found.append(_straggler(metrics, name, times, first, fired, last, deficit, events[index], heat[index],
                                    chunks, (start_s, end_s)))
    return StragglerReport(len(clocks), found, notes)


def _at(series: Series, times: np.ndarray) -> np.ndarray:
    """The last sample at or before each time; NaN before the first."""
    index = np.searchsorted(series.time_s, times, side="right") - 1
    return np.where(index >= 0, series.value[index.clip(min=0)], np.nan)


def _events(metrics: pd.DataFrame, names: list[str], times: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(alarming clock-event bits, thermal violation growing) by GPU and time, and what is missing."""
    notes = []
    bits, heat = np.zeros((len(names), times.size), np.int64), np.zeros((len(names), times.size), bool)
    reasons = gpus.by_gpu(metrics, CLOCKS_EVENT_REASONS)
    violations = gpus.by_gpu(metrics, "DCGM_FI_DEV_THERMAL_VIOLATION")
    if not reasons:
        notes.append("clock event reasons were not recorded: why a clock is low is not known")
    if not violations:
        notes.append("thermal violations were not recorded: time lost to heat is not counted")
    for index, name in enumerate(names):
        if name in reasons:
            bits[index] = np.nan_to_num(_at(reasons[name], times)).astype(np.int64) & dcgm.ALARMING_EVENTS
        if name in violations:
            rise = Series("", {}, violations[name].time_s, cumulative(violations[name].value))
            heat[index] = np.diff(np.nan_to_num(_at(rise, times)), prepend=np.nan) > 0
    return bits, heat, notes


def _spans(times: np.ndarray, slow: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, fired, last) indices of runs of `slow` that last `PERSISTENCE_S`; a single sample that looks
    fine in between does not end one."""
    spans, first, missed = [], None, 0
    last = -1
    for index, is_slow in enumerate([*slow, False, False]):
        if is_slow:
            first, last, missed = (index if first is None else first), index, 0
            continue
        missed += 1
        if first is not None and missed > 1:
            if times[last] - times[first] >= PERSISTENCE_S - 1e-9:
                fired = int(np.searchsorted(times, times[first] + PERSISTENCE_S - 1e-9))
                spans.append((first, fired, last))
            first = None
    return spans


def _straggler(metrics: pd.DataFrame, name: str, times: np.ndarray, first: int, fired: int, last: int,
               deficit: np.ndarray, events: np.ndarray, heat: np.ndarray, chunks: pd.DataFrame | None,
               window: tuple[float, float]) -> Straggler:
    span = slice(first, last + 1)
    union = int(np.bitwise_or.reduce(events[span]))
    reasons = [text for bit, text in dcgm.CLOCK_EVENTS.items() if union & bit]
    if heat[span].any():
        reasons.append("thermal violation counter grows")
    temperature = gpus.by_gpu(metrics, "DCGM_FI_DEV_GPU_TEMP").get(name)
    peak = float(np.nanmax(_at(temperature, times[span]))) if temperature is not None else None
    low = float(np.nanmean(deficit[span]))
    cost = _itl_cost(chunks, float(times[first]), float(times[last]), window)
    text = (f"GPU {name} runs {low:.0%} below the clock of its peers from {times[first] - window[0]:.0f} to "
            f"{times[last] - window[0]:.0f} s of the window")
    text += f" at up to {peak:.0f} °C" if peak is not None else ""
    text += f" ({', '.join(reasons)})" if reasons else ""
    text += f"; the median ITL is {cost:.2f} times as long meanwhile" if cost else ""
    return Straggler(name, float(times[first]), float(times[fired]), float(times[last]), low, peak, reasons, cost,
                     text + ".")


def _itl_cost(chunks: pd.DataFrame | None, start_s: float, end_s: float, window: tuple[float, float]) -> float | None:
    """Median ITL in the span over the median in the rest of the window."""
    if chunks is None or not len(chunks):
        return None
    itl = streams(chunks).gaps.between(*window).itl
    meanwhile = (itl.time_s >= start_s) & (itl.time_s < end_s)
    if min(meanwhile.sum(), (~meanwhile).sum()) < 100:
        return None
    return itl.where(meanwhile).percentile(50) / itl.where(~meanwhile).percentile(50)
