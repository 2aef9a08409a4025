"""Counters, histograms and gauges of a window, with known answers."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import as_table
from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.series import counter_increase, histogram_increase
from spoc_lib.telemetry.timeline import grid, window_summary


def table(*series: tuple[str, dict, list[float], list[float]]) -> pd.DataFrame:
    """(metric, labels, times, values)… as METRICS."""
    rows = [dict(source="dcgm" if dcgm.is_dcgm(metric) else "vllm", metric=metric,
                 labels=json.dumps(labels, sort_keys=True), time_s=float(at), value=float(value))
            for metric, labels, times, values in series for at, value in zip(times, values, strict=True)]
    return as_table(rows, METRICS).to_pandas()


def test_a_counter_is_differenced_at_the_window_edges():
    times = np.arange(0, 11)
    metrics = table(("vllm:generation_tokens_total", {"engine": "0"}, times, times * 100))
    assert counter_increase(metrics, "vllm:generation_tokens_total", 2.0, 7.0) == pytest.approx(500)
    assert counter_increase(metrics, "vllm:generation_tokens_total", 2.5, 7.25) == pytest.approx(475)
    assert counter_increase(metrics, "vllm:generation_tokens_total", -5, 50) == pytest.approx(1000)
    assert counter_increase(metrics, "vllm:absent_total", 0, 5) is None


def test_a_counter_that_begins_anew_is_added_across_the_restart():
    metrics = table(("vllm:prompt_tokens_total", {}, [0, 1, 2, 3, 4], [100, 150, 20, 60, 90]))
    assert counter_increase(metrics, "vllm:prompt_tokens_total", 0, 4) == pytest.approx(50 + 20 + 40 + 30)


def test_a_counter_that_a_page_shows_when_it_first_counts_counts_from_zero():
    name = "vllm:request_success_total"
    gauge, times = "vllm:num_requests_running", range(10)
    one = {"instance": "a:1"}
    metrics = table((gauge, one, times, times), (name, one | {"finished_reason": "stop"}, [4, 9], [30, 80]),
                    (name, {"instance": "b:1"}, [6, 9], [5000, 5010]))  # a server that was not scraped before
    assert counter_increase(metrics, name, 0, 9) == pytest.approx(80 + 10)
    assert counter_increase(metrics, name, 5, 9) == pytest.approx(40 + 10)


def test_engines_of_several_servers_have_a_column_each():
    rows = [("vllm:kv_cache_usage_perc", {"instance": host, "engine": number, "model_name": "m"}, [0, 1], [0.1, 0.1])
            for host in ("a:1", "b:1") for number in "01"]
    assert len(grid(table(*rows), "vllm:kv_cache_usage_perc").columns) == 4
    alone = table(("vllm:kv_cache_usage_perc", {"engine": "1", "model_name": "m"}, [0], [0.1]))
    assert list(grid(alone, "vllm:kv_cache_usage_perc")) == ["1"]


def test_a_histogram_is_differenced_bucket_by_bucket():
    name, edges = "vllm:time_to_first_token_seconds", ["0.1", "1.0", "+Inf"]
    series = [(f"{name}_bucket", {"le": edge}, [0, 10], [before, after])
              for edge, before, after in zip(edges, [5, 9, 10], [5, 89, 110], strict=True)]
    metrics = table(*series, (f"{name}_sum", {}, [0, 10], [3.0, 63.0]), (f"{name}_count", {}, [0, 10], [10, 110]))
    found = histogram_increase(metrics, name, 0, 10)
    assert found.counts.tolist() == [0, 80, 20] and found.mean == pytest.approx(0.6)
    assert found.quantile_bounds(50) == (0.1, 1.0)
    assert found.quantile_bounds(95) == (1.0, math.inf)  # never clamped to the last finite edge


def test_the_window_summary_of_two_gpus_and_one_engine():
    times = np.arange(0.0, 21.0)
    metrics = table(
        ("vllm:kv_cache_usage_perc", {"engine": "0"}, times, times / 20),
        ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}, times, np.full(21, 3.0)),
        ("vllm:prefix_cache_queries_total", {}, times, times * 1000),
        ("vllm:prefix_cache_hits_total", {}, times, times * 250),
        ("DCGM_FI_PROF_SM_ACTIVE", {"gpu": "0", "UUID": "GPU-a"}, times, np.full(21, 0.4)),
        ("DCGM_FI_PROF_SM_ACTIVE", {"gpu": "1", "UUID": "GPU-b"}, times, np.full(21, 0.6)))
    summary = window_summary(metrics, 10.0, 20.0)
    assert summary["kv_usage_ratio"] == pytest.approx(0.75) and summary["kv_usage_ratio_max"] == 1.0
    assert summary["cached_ratio"] == pytest.approx(0.25) and summary["sm_active_ratio"] == pytest.approx(0.5)
    assert summary["waiting_by_reason"] == {"capacity": 3.0} and summary["gpus"] == 2
    assert "dram_active_ratio" in summary["missing"] and summary["dram_active_ratio"] is None


@pytest.mark.parametrize("value", [9223372036854775794, 9223372036854775792, 140737488355330.0, 2147483634, math.nan])
def test_values_that_mean_unsupported_are_never_shown(value):
    metrics = table(("DCGM_FI_PROF_SM_ACTIVE", {"UUID": "GPU-a"}, [0, 1, 2], [0.5, value, 0.5]),
                    ("DCGM_FI_PROF_DRAM_ACTIVE", {"UUID": "GPU-a"}, [0, 1, 2], [value] * 3))
    summary = window_summary(metrics, 0, 2)
    assert summary["sm_active_ratio"] == 0.5 and summary["sm_active_ratio_max"] == 0.5
    assert summary["dram_active_ratio"] is None and "dram_active_ratio" in summary["missing"]
    assert grid(metrics, "DCGM_FI_PROF_SM_ACTIVE")["GPU-a"].max() == 0.5


def test_the_grid_leaves_a_gap_a_gap():
    metrics = table(("vllm:num_requests_running", {"engine": "0"}, [0, 1, 2, 10, 11], [1, 2, 3, 4, 5]))
    values = grid(metrics, "vllm:num_requests_running").iloc[:, 0]
    assert values.loc[2.0] == 3 and math.isnan(values.loc[7.0]) and values.loc[10.0] == 4
