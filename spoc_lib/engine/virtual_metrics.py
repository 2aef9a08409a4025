"""METRICS of a run on the virtual clock: what a scraper with a 1 s interval would have read.

vLLM's gauges and counters by their names on /metrics, some of its histograms with its buckets, and DCGM's fields
derived from the step model (`gpu_counters`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pandas as pd

from spoc_lib.core.schemas import METRICS
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.gpu_counters import Activity, GpuCounters, activity
from spoc_lib.engine.runlog import RunLog, progress
from spoc_lib.metrics import Streams

_LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                    480.0, 960.0, 1920.0, 7680.0, np.inf)
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                 40.0, 80.0, 160.0, 640.0, 2560.0, np.inf)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, np.inf)
_ITERATION_BUCKETS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, np.inf)

Sample = tuple[str, str, dict[str, str], np.ndarray]  # source, metric, labels, values on the grid


def metrics_table(log: RunLog, engine, duration_s: float, interval_s: float = 1.0) -> pd.DataFrame:
    """METRICS on a grid of `interval_s`, from 0 to `duration_s`."""
    grid = np.arange(0.0, duration_s + 1e-9, interval_s)
    samples = [*_vllm(log, engine.model.name, grid), *_dcgm(log, engine, grid, interval_s)]
    rows = len(grid)
    values = np.concatenate([values for *_, values in samples])

    def repeated(parts: list[str]) -> pd.Categorical:
        names = list(dict.fromkeys(parts))
        codes = np.repeat([names.index(part) for part in parts], rows)
        return pd.Categorical.from_codes(codes, names)

    table = pd.DataFrame({
        "source": repeated([source for source, *_ in samples]),
        "metric": repeated([metric for _, metric, *_ in samples]),
        "labels": repeated([json.dumps(labels, sort_keys=True, separators=(",", ":")) for *_, labels, _ in samples]),
        "time_s": np.tile(grid, len(samples)),
        "value": values,
    }).astype({"source": object, "metric": object, "labels": object})
    return table[METRICS.names]


def _vllm(log: RunLog, model: str, grid: np.ndarray) -> Iterator[Sample]:
    labels = {"engine": "0", "model_name": model}
    steps, at = log.steps, progress(log)
    begun = np.searchsorted(steps["start_s"], grid, side="right")
    ended = np.searchsorted(steps["end_s"], grid, side="right")

    def gauge(column: str) -> np.ndarray:
        return np.append(0.0, steps[column])[begun]

    def counter(values: np.ndarray, index: np.ndarray) -> np.ndarray:
        return np.append(0.0, np.cumsum(values))[index]

    yield "vllm", "vllm:num_requests_running", labels, gauge("running")
    yield "vllm", "vllm:num_requests_waiting", labels, gauge("waiting")
    yield "vllm", "vllm:kv_cache_usage_perc", labels, gauge("kv_usage_ratio")
    yield "vllm", "vllm:num_preemptions_total", labels, counter(steps["preempted"], begun)
    yield "vllm", "vllm:prefix_cache_queries_total", labels, counter(steps["prefix_queries"], begun)
    yield "vllm", "vllm:prefix_cache_hits_total", labels, counter(steps["prefix_hits"], begun)
    delivered = np.bincount(log.token_step, minlength=len(steps["end_s"])) if len(steps["end_s"]) else np.zeros(0)
    yield "vllm", "vllm:generation_tokens_total", labels, counter(delivered, ended)
    prompts = np.array([turn.prompt_tokens for turn in log.turns], dtype=float)
    yield "vllm", "vllm:prompt_tokens_total", labels, _cumulated(at.first_s, prompts, grid)
    for reason, error in (("max_num_queued_reqs", "queue_full"), ("max_num_queued_tokens", "queue_tokens_full")):
        refused = np.array([log.send_s[number] for number, (name, _) in log.refusals.items() if name == error])
        yield ("vllm", "vllm:admission_rejections_total", labels | {"reason": reason},
               _cumulated(refused, np.ones(len(refused)), grid))
    done = np.where(log.state == 1, at.last_s, np.nan)
    yield ("vllm", "vllm:request_success_total", labels | {"finished_reason": "length"},
           _cumulated(done, np.ones(len(done)), grid))
    send = np.array(log.send_s, dtype=float)
    admitted = np.where(log.admit_step >= 0, np.append(steps["start_s"], np.nan)[
        np.minimum(log.admit_step, len(steps["start_s"]))], np.nan)
    gaps, gap_ends = _token_gaps(log)
    for metric, value, when, buckets in (
        ("time_to_first_token_seconds", at.first_s - send, at.first_s, _TTFT_BUCKETS),
        ("inter_token_latency_seconds", gaps, gap_ends, _ITL_BUCKETS),
        ("e2e_request_latency_seconds", done - send, done, _LATENCY_BUCKETS),
        ("request_queue_time_seconds", admitted - send, at.first_s, _LATENCY_BUCKETS),
        ("request_prefill_time_seconds", at.first_s - admitted, at.first_s, _LATENCY_BUCKETS),
        ("iteration_tokens_total", steps["tokens"], np.where(steps["tokens"] > 0, steps["end_s"], np.nan),
         _ITERATION_BUCKETS),
    ):
        yield from _histogram(f"vllm:{metric}", labels, value, when, buckets, grid)


def _token_gaps(log: RunLog) -> tuple[np.ndarray, np.ndarray]:
    """Seconds between consecutive tokens of a request, and when each gap ended."""
    when = log.steps["end_s"][log.token_step]
    gaps = Streams.of(log.token_request, when, np.ones(len(when))).gaps
    return gaps.gap_s, gaps.time_s


def _cumulated(when: np.ndarray, weight: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Sum of the weights of events up to each grid point; events without a time (NaN) never happened."""
    known = ~np.isnan(when)
    place = np.searchsorted(grid, when[known], side="left")
    return np.bincount(place, weights=weight[known], minlength=len(grid) + 1)[: len(grid)].cumsum()


def _histogram(metric: str, labels: dict[str, str], value: np.ndarray, when: np.ndarray, buckets: tuple[float, ...],
               grid: np.ndarray) -> Iterator[Sample]:
    known = ~np.isnan(when) & ~np.isnan(value)
    value, when = value[known], when[known]
    columns = len(grid) + 1
    cell = np.searchsorted(buckets, value, side="left") * columns + np.searchsorted(grid, when, side="left")
    counts = np.bincount(cell, minlength=len(buckets) * columns).reshape(len(buckets), columns)
    counts = counts[:, : len(grid)].cumsum(axis=1).cumsum(axis=0).astype(float)
    for bound, row in zip(buckets, counts, strict=True):
        yield "vllm", f"{metric}_bucket", labels | {"le": "+Inf" if bound == np.inf else str(bound)}, row
    yield "vllm", f"{metric}_sum", labels, _cumulated(when, value, grid)
    yield "vllm", f"{metric}_count", labels, counts[-1]


def _dcgm(log: RunLog, engine, grid: np.ndarray, interval_s: float) -> Iterator[Sample]:
    windows = len(grid)
    sums = step_activity(log, engine).per_window(log.steps["end_s"], -interval_s, interval_s, windows)
    used = min(engine.gpu.memory_gib * engine.flags.gpu_memory_utilization, engine.gpu.memory_gib)
    counters = GpuCounters(engine.gpu, engine.gpu_count, used)
    for field, values in counters.advance(sums, interval_s, -interval_s).items():
        for gpu in range(engine.gpu_count):
            labels = {"UUID": f"GPU-sim-{gpu}", "gpu": str(gpu), "modelName": engine.gpu.title}
            yield "dcgm", field, labels, values[:, gpu]


def step_activity(log: RunLog, engine) -> Activity:
    """What one GPU did in each step of the log."""
    batches = Batch._make(log.steps[name] for name in Batch._fields)
    return activity(engine.step_time.components_of(batches), batches, engine.model, engine.gpu, engine.gpu_count)
