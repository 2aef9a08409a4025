"""One timeline: what the server's gauges, its counters and the GPUs' counters say about a window of a
rung."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.series import Series, counter_increase, histogram_increase, resets, select, within

#: {key of the summary: (metric, how the series of one instant are joined: several engines or GPUs)}
GAUGES = {
    "kv_usage_ratio": ("vllm:kv_cache_usage_perc", "mean"),
    "running": ("vllm:num_requests_running", "sum"),
    "waiting": ("vllm:num_requests_waiting", "sum"),
    "sm_active_ratio": ("DCGM_FI_PROF_SM_ACTIVE", "mean"),
    "gpu_busy_ratio": ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "mean"),
    "dram_active_ratio": ("DCGM_FI_PROF_DRAM_ACTIVE", "mean"),
    "tensor_active_ratio": ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "mean"),
    "sm_clock_mhz": ("DCGM_FI_DEV_SM_CLOCK", "mean"),
    "power_w": ("DCGM_FI_DEV_POWER_USAGE", "mean"),
    "temperature_c": ("DCGM_FI_DEV_GPU_TEMP", "mean"),
    "nvlink_tx_bytes_per_s": ("DCGM_FI_PROF_NVLINK_TX_BYTES", "mean"),
}
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_queries_tokens": "vllm:prefix_cache_queries_total",
    "prefix_hits_tokens": "vllm:prefix_cache_hits_total",
    "rejections": "vllm:admission_rejections_total",
    "energy_mj": "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
}
#: What the embedded engine says of its real-time clock; other servers have none, and lack nothing by it.
CLOCK_RESETS, STEP_LAG = "spoc:clock_resets_total", "spoc:step_lag_seconds"
#: {key prefix: histogram}: means (and bucket bounds of the 95 %) of what the server measured itself
HISTOGRAMS = {
    "server_ttft": "vllm:time_to_first_token_seconds",
    "server_itl": "vllm:inter_token_latency_seconds",
    "server_queue": "vllm:request_queue_time_seconds",
    "server_prefill": "vllm:request_prefill_time_seconds",
    "iteration_tokens": "vllm:iteration_tokens_total",
}


def window_summary(metrics: pd.DataFrame, start_s: float, end_s: float) -> dict:
    """The window's figures, one flat dictionary; what was not sampled is None and listed under `missing`.

    Gauges: mean over the samples in the window (`running`, `kv_usage_ratio`, …) and `…_max`; several engines
    are added, several GPUs averaged. Counters and histograms: differenced at the window's edges, resets
    accounted for. `clock_resets`, `step_lag_p95_s` (lower edge of its bucket): the embedded engine's, else None.
    `waiting_by_reason`: mean a reason. `gpus`: number of GPUs seen. `resets`: restarts of the
    server in the window. `ratio` keys are 0..1; `…_bounds_s` are the edges of the histogram's bucket that
    holds the percentile.
    """
    summary: dict = {"start_s": start_s, "end_s": end_s}
    for key, (metric, how) in GAUGES.items():
        summary[key], summary[f"{key}_max"] = _gauge(select(metrics, metric), start_s, end_s, how)
    for key, metric in COUNTERS.items():
        summary[key] = counter_increase(metrics, metric, start_s, end_s)
    summary["cached_ratio"] = _ratio(summary["prefix_hits_tokens"], summary["prefix_queries_tokens"])
    for key, metric in HISTOGRAMS.items():
        histogram = histogram_increase(metrics, metric, start_s, end_s)
        unit = "" if key == "iteration_tokens" else "_s"
        filled = histogram if histogram is not None and histogram.count > 0 else None
        summary[f"{key}_mean{unit}"] = None if filled is None else filled.mean
        summary[f"{key}_p95_bounds{unit}"] = None if filled is None else filled.quantile_bounds(95)
        summary[f"{key}_count"] = histogram.count if histogram is not None else None
    summary["clock_resets"] = counter_increase(metrics, CLOCK_RESETS, start_s, end_s)
    lag = histogram_increase(metrics, STEP_LAG, start_s, end_s)
    summary["step_lag_p95_s"] = None if lag is None or not lag.count else lag.quantile_bounds(95)[0]
    summary["waiting_by_reason"] = {
        series.labels.get("reason", "?"): float(values.mean())
        for series in select(metrics, "vllm:num_requests_waiting_by_reason")
        if (values := within(series, start_s, end_s)).size
    }
    summary["gpus"] = len({dcgm.gpu_of(series.labels) for series in select(metrics, "DCGM_FI_PROF_SM_ACTIVE")
                           or select(metrics, "DCGM_FI_DEV_SM_CLOCK")})
    summary["resets"] = sum(resets(one.value) for one in select(metrics, COUNTERS["generation_tokens"]))
    summary["missing"] = sorted(
        [key for key in (*GAUGES, *COUNTERS) if summary[key] is None]
        + [key for key, metric in HISTOGRAMS.items() if summary[f"{key}_count"] is None]
    )
    return summary


def _gauge(series: list[Series], start_s: float, end_s: float, how: str) -> tuple[float | None, float | None]:
    """Mean and maximum in the window. `sum` adds the series' means (their maxima need not coincide: an upper
    bound); `mean` averages them."""
    means, peaks = [], []
    for one in series:
        values = within(one, start_s, end_s)
        if dcgm.is_dcgm(one.metric):
            values = values[~dcgm.unsupported(values)]
        if not values.size:
            continue
        means.append(float(values.mean()))
        peaks.append(float(values.max()))
    if not means:
        return None, None
    return (sum(means), sum(peaks)) if how == "sum" else (float(np.mean(means)), max(peaks))


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def grid(metrics: pd.DataFrame, metric: str, step_s: float = 1.0) -> pd.DataFrame:
    """A metric on a regular grid for figures: rows are times (s), a column a series (GPU UUID, engine or
    label set); a grid point holds the last sample at or before it, at most two steps old, else NaN (a gap
    stays a gap)."""
    columns = {}
    found = select(metrics, metric)
    if not found:
        return pd.DataFrame()
    first = min(one.time_s[0] for one in found)
    last = max(one.time_s[-1] for one in found)
    times = np.arange(first, last + step_s, step_s)
    for one in found:
        index = np.searchsorted(one.time_s, times, side="right") - 1
        value = one.value[index.clip(min=0)].astype(float)
        age = times - one.time_s[index.clip(min=0)]
        bad = (index < 0) | (age > 2 * step_s)
        if dcgm.is_dcgm(metric):
            bad |= dcgm.unsupported(value)
        value[bad] = np.nan
        columns[_column(one)] = value
    return pd.DataFrame(columns, index=pd.Index(times, name="time_s"))


def _column(series: Series) -> str:
    if dcgm.is_dcgm(series.metric):
        return dcgm.gpu_of(series.labels)
    kept = {key: value for key, value in series.labels.items() if key not in ("model_name", "engine")}
    return ", ".join(f"{key}={value}" for key, value in kept.items()) or series.labels.get("engine", "0")
