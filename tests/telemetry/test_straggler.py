"""Stragglers: 20 healthy runs without a false alarm, 20 throttled ones found within 10 s."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import as_table
from spoc_lib.telemetry.straggler import find_stragglers

SECONDS, GPUS = 120, 8


def run(seed: int, throttled: bool, *, events: bool = True) -> tuple[pd.DataFrame, int, float]:
    """DCGM at 1 s of eight boards under load: each has its own silicon (clocks differ by a few per cent under the
    power cap, which comes and goes), 15 MHz steps, scrape jitter, lost samples; one may be throttled from a moment
    on."""
    rng = np.random.default_rng(seed)
    victim, since = int(rng.integers(GPUS)), float(rng.uniform(20, 70))
    capped = np.convolve(rng.random(SECONDS) < 0.4, np.ones(8) / 8, "same") > 0.35
    rows = []

    def add(metric: str, gpu: int, at: np.ndarray, values: np.ndarray) -> None:
        labels = json.dumps({"UUID": f"GPU-{gpu}", "gpu": str(gpu)})
        rows.extend(dict(source="dcgm", metric=metric, labels=labels, time_s=float(t), value=float(v))
                    for t, v in zip(at, values, strict=True))

    factor = rng.uniform(0.55, 0.88)
    for gpu in range(GPUS):
        at = np.arange(SECONDS) + rng.normal(0, 0.02, SECONDS)
        kept = rng.random(SECONDS) > 0.03
        quality = rng.normal(0, 0.012)
        clock = np.where(capped, 1740 * (1 + quality) + rng.normal(0, 20, SECONDS), 1980.0)
        slow = (at >= since) & throttled & (gpu == victim)
        clock = np.where(slow, clock * factor, clock)
        heat = np.where(slow, 88.0, 62 + 4 * quality * 100 / 2 + rng.normal(0, 1, SECONDS))
        reasons = np.where(slow, 0x60, np.where(capped, 0x4, 0))
        add("DCGM_FI_DEV_SM_CLOCK", gpu, at[kept], (np.round(clock / 15) * 15)[kept])
        add("DCGM_FI_DEV_GPU_TEMP", gpu, at[kept], heat[kept])
        if events:
            add("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", gpu, at[kept], reasons[kept])
            add("DCGM_FI_DEV_THERMAL_VIOLATION", gpu, at[kept], np.cumsum(slow * 1e9)[kept])
    return as_table(rows, METRICS).to_pandas(), victim, since


@pytest.mark.parametrize("events", [True, False])
def test_twenty_healthy_runs_raise_no_alarm(events):
    for seed in range(20):
        metrics, _, _ = run(seed, throttled=False, events=events)
        report = find_stragglers(metrics, 0.0, SECONDS)
        assert report.gpus == GPUS and not report.stragglers, (seed, report.stragglers)
        assert events == (not report.notes)  # missing counters are said


@pytest.mark.parametrize("events", [True, False])
def test_twenty_throttled_runs_are_found_within_ten_seconds(events):
    for seed in range(20):
        metrics, victim, since = run(seed, throttled=True, events=events)
        report = find_stragglers(metrics, 0.0, SECONDS)
        assert {one.gpu for one in report.stragglers} == {f"GPU-{victim}"}, seed
        first = report.stragglers[0]
        assert first.start_s - since >= -1.0 and first.detected_s - since <= 10.0, (seed, since, first)
        if events:
            assert "software thermal slowdown" in first.reasons and "88 °C" in first.sentence


def test_the_cost_in_itl_is_told():
    metrics, victim, since = run(3, throttled=True)
    gaps = []
    for request in range(40):
        clock = float(request)
        while clock < SECONDS:
            gaps.append((request, clock, 1.0))
            clock += 0.03 if clock >= since else 0.02
    chunks = pd.DataFrame(gaps, columns=["request", "time_s", "tokens"])
    (found,) = find_stragglers(metrics, 0.0, SECONDS, chunks).stragglers
    assert found.itl_cost_ratio == pytest.approx(1.5, rel=0.02) and "1.50 times" in found.sentence


def test_peers_that_are_capped_together_are_no_stragglers():
    metrics, _, _ = run(1, throttled=False)
    slow = (metrics["metric"] == "DCGM_FI_DEV_SM_CLOCK") & (metrics["time_s"] > 60)
    metrics.loc[slow, "value"] *= 0.6
    assert not find_stragglers(metrics, 0.0, SECONDS).stragglers


def test_unsupported_and_missing_clocks_are_said():
    metrics, _, _ = run(1, throttled=True)
    metrics.loc[metrics["metric"] == "DCGM_FI_DEV_SM_CLOCK", "value"] = 9223372036854775794
    report = find_stragglers(metrics, 0.0, SECONDS)
    assert report.gpus == 0 and "hidden" in report.notes[0]
    alone = metrics[metrics["labels"].str.contains("GPU-0")].assign(value=1980.0)
    assert "no peers" in find_stragglers(alone, 0.0, SECONDS).notes[0]
