"""One timeline: what the server's gauges, its counters and the GPUs' counters say about a window of a
rung."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spoc_lib.telemetry import dcgm, gpus
from spoc_lib.telemetry.series import Series, counter_increase, histogram_increase, increase, resets, select, within

#: {key of the summary: metric}: of the engine (one an engine), and of the GPUs (one a board, or a MIG instance).
ENGINE_GAUGES = {
    "kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
}
GPU_GAUGES = {
    "sm_active_ratio": "DCGM_FI_PROF_SM_ACTIVE",
    "gpu_busy_ratio": "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
    "dram_active_ratio": "DCGM_FI_PROF_DRAM_ACTIVE",
    "tensor_active_ratio": "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
    "sm_clock_mhz": "DCGM_FI_DEV_SM_CLOCK",
    "power_w": "DCGM_FI_DEV_POWER_USAGE",
    "temperature_c": "DCGM_FI_DEV_GPU_TEMP",
    "nvlink_tx_bytes_per_s": "DCGM_FI_PROF_NVLINK_TX_BYTES",
}
GAUGES = {**ENGINE_GAUGES, **GPU_GAUGES}
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_queries_tokens": "vllm:prefix_cache_queries_total",
    "prefix_hits_tokens": "vllm:prefix_cache_hits_total",
    "rejections": "vllm:admission_rejections_total",
}
ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
#: Labels that tell processes or causes within one engine apart, not engines.
WITHIN_ENGINE = ("pid", "reason", "finished_reason")
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
#: Every key that `missing` may name.
FIGURES = (*GAUGES, *COUNTERS, "energy_mj", *HISTOGRAMS)


def window_summary(metrics: pd.DataFrame, start_s: float, end_s: float) -> dict:
    """The window's figures, one flat dictionary; what was not sampled is None and listed under `missing`.

    Gauges: mean over the samples in the window (`running`, `kv_usage_ratio`, …) and `…_max`; of several engines
    requests are added and KV usage is averaged (`by_engine` has each: engine, running, waiting, kv_usage_ratio,
    kv_usage_ratio_max, preemptions); GPUs that work for the engine are averaged, one meter counted once. Counters and
    histograms: differenced series by series at the window's edges, resets accounted for, then added. `clock_resets`,
    `step_lag_p95_s` (lower edge of its bucket): the embedded engine's, else None. `waiting_by_reason`: mean a reason.
    `gpus`: number of boards at work. `resets`: restarts of the server in the window. `ratio` keys are 0..1;
    `…_bounds_s` are the edges of the histogram's bucket that holds the percentile.
    """
    summary: dict = {"start_s": start_s, "end_s": end_s, "by_engine": by_engine(metrics, start_s, end_s)}
    for key, metric in ENGINE_GAUGES.items():
        series = _by_engine(metrics, metric).values() if key == "kv_usage_ratio" else [
            [one] for one in select(metrics, metric)]
        found = [pair for group in series if (pair := _gauge(group, start_s, end_s))]
        join = np.mean if key == "kv_usage_ratio" else np.sum
        summary[key] = float(join([mean for mean, _ in found])) if found else None
        peaks = [peak for _, peak in found]  # of a sum an upper bound: the peaks need not coincide
        summary[f"{key}_max"] = (max if key == "kv_usage_ratio" else sum)(peaks) if found else None
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
    reasons: dict[str, float] = {}
    for one in select(metrics, "vllm:num_requests_waiting_by_reason"):
        if (values := within(one, start_s, end_s)).size:
            reason = one.labels.get("reason", "?")
            reasons[reason] = reasons.get(reason, 0.0) + float(values.mean())
    summary["waiting_by_reason"] = reasons
    _gpus(summary, gpus.at_work(metrics[metrics["source"].to_numpy() == "dcgm"]), start_s, end_s)
    summary["resets"] = max((resets(one.value[(one.time_s >= start_s) & (one.time_s <= end_s)])
                             for one in select(metrics, COUNTERS["generation_tokens"])), default=0)
    summary["missing"] = sorted(
        key for key in FIGURES if summary[f"{key}_count" if key in HISTOGRAMS else key] is None)
    return summary


def _gpus(summary: dict, metrics: pd.DataFrame, start_s: float, end_s: float) -> None:
    """The boards' and instances' figures of the window, into `summary`."""
    for key, metric in GPU_GAUGES.items():
        found = [pair for one in gpus.by_gpu(metrics, metric).values() if (pair := _gauge([one], start_s, end_s))]
        summary[key] = float(np.mean([mean for mean, _ in found])) if found else None
        summary[f"{key}_max"] = max(peak for _, peak in found) if found else None
    rises = [increase(one, start_s, end_s) for one in gpus.by_gpu(metrics, ENERGY).values()]
    rises = [rise for rise in rises if np.isfinite(rise)]
    summary["energy_mj"] = float(sum(rises)) if rises else None
    summary["gpus"] = len({name.partition(" MIG ")[0] for name in gpus.by_gpu(metrics, "DCGM_FI_PROF_SM_ACTIVE")
                           or gpus.by_gpu(metrics, "DCGM_FI_DEV_SM_CLOCK")})


def by_engine(metrics: pd.DataFrame, start_s: float, end_s: float) -> list[dict]:
    """Each engine's own queue, KV usage and preemptions in the window; what one does not report is None."""
    found: dict[str, dict] = {}
    for key, metric in ENGINE_GAUGES.items():
        for name, series in _by_engine(metrics, metric).items():
            pair = _gauge(series, start_s, end_s) if key == "kv_usage_ratio" else None
            means = [one[0] for each in series if (one := _gauge([each], start_s, end_s))]
            row = found.setdefault(name, {"engine": name})
            row[key] = (pair[0] if pair else None) if key == "kv_usage_ratio" else sum(means) if means else None
            if key == "kv_usage_ratio":
                row["kv_usage_ratio_max"] = pair[1] if pair else None
    for name, series in _by_engine(metrics, COUNTERS["preemptions"]).items():
        rises = [rise for one in series if np.isfinite(rise := increase(one, start_s, end_s))]
        found.setdefault(name, {"engine": name})["preemptions"] = float(sum(rises)) if rises else None
    return [found[name] for name in sorted(found, key=lambda name: (len(name), name))]


def _by_engine(metrics: pd.DataFrame, metric: str) -> dict[str, list[Series]]:
    """The series of a metric by engine: what its labels say besides the model (`engine`, the instance of a replica);
    processes of one engine (`pid`) stand together."""
    found: dict[str, list[Series]] = {}
    for one in select(metrics, metric):
        own = {key: value for key, value in one.labels.items() if key not in ("model_name", *WITHIN_ENGINE)}
        number = own.pop("engine", own.pop("engine_index", None))
        where = own.get("instance") or ", ".join(f"{key}={value}" for key, value in own.items())
        name = " of ".join(part for part in (number, where) if part) or "0"
        found.setdefault(name, []).append(one)
    return found


def _gauge(series: list[Series], start_s: float, end_s: float) -> tuple[float, float] | None:
    """(mean, peak) in the window of one gauge; of several processes that report the same one, the highest."""
    inside = [values for one in series if (values := within(one, start_s, end_s)).size]
    if not inside:
        return None
    return max(float(values.mean()) for values in inside), max(float(values.max()) for values in inside)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def grid(metrics: pd.DataFrame, metric: str, step_s: float = 1.0) -> pd.DataFrame:
    """A metric on a regular grid for figures: rows are times (s), a column a series (GPU UUID, engine or
    label set); a grid point holds the last sample at or before it, at most two steps old, else NaN (a gap
    stays a gap)."""
    columns = {}
    found = gpus.by_gpu(metrics, metric) if dcgm.is_dcgm(metric) else {
        _column(one): one for one in select(metrics, metric)}
    if not found:
        return pd.DataFrame()
    first = min(one.time_s[0] for one in found.values())
    last = max(one.time_s[-1] for one in found.values())
    times = np.arange(first, last + step_s, step_s)
    for name, one in found.items():
        index = np.searchsorted(one.time_s, times, side="right") - 1
        value = one.value[index.clip(min=0)].astype(float)
        value[(index < 0) | (times - one.time_s[index.clip(min=0)] > 2 * step_s)] = np.nan
        columns[name] = value
    return pd.DataFrame(columns, index=pd.Index(times, name="time_s"))


def _column(series: Series) -> str:
    kept = {key: value for key, value in series.labels.items() if key != "model_name"}
    return kept.get("engine", "0") if len(kept) < 2 and kept.keys() <= {"engine"} else ", ".join(
        f"{key}={value}" for key, value in kept.items())
