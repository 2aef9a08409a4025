"""The run as one story on one clock: phases of the load, client percentiles, the engine's gauges, the GPUs, and when
they were throttled. Data for a figure; drawing is the report's business."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.metrics import Measured
from spoc_lib.telemetry import dcgm, gpus
from spoc_lib.telemetry.timeline import grid

#: (panel, metric, factor to the panel's unit): what is drawn of the engine and of the GPUs.
GAUGES = (("requests", "vllm:num_requests_running", 1.0), ("requests", "vllm:num_requests_waiting", 1.0),
          ("KV in use (%)", "vllm:kv_cache_usage_perc", 100.0),
          ("SM active (%)", "DCGM_FI_PROF_SM_ACTIVE", 100.0), ("DRAM active (%)", "DCGM_FI_PROF_DRAM_ACTIVE", 100.0),
          ("tensor active (%)", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 100.0),
          ("SM clock (MHz)", "DCGM_FI_DEV_SM_CLOCK", 1.0), ("temperature (°C)", "DCGM_FI_DEV_GPU_TEMP", 1.0))
#: Seconds of sending that one point of the client's percentiles stands for.
BIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Story:
    """Times in seconds from the rung's start.

    series: panel, series, time_s, value (long form; a panel of GPUs has one series a GPU);
    phases: phase, start_s, end_s; events: gpu, start_s, end_s, what (clock events other than the power cap);
    alignment_error_s: how far server and client stamps may lie apart; clock_events_known: some GPU reported whether
    there were events.
    """

    series: pd.DataFrame
    phases: pd.DataFrame
    events: pd.DataFrame
    alignment_error_s: float
    clock_events_known: bool = False


def build(requests: pd.DataFrame, metrics: pd.DataFrame, window: tuple[float, float],
          alignment_error_s: float = 0.0) -> Story:
    """The story of one rung from its REQUESTS and METRICS; `window` is its steady part, on the same clock."""
    origin = float(min(requests["send_s"].min(), window[0])) if len(requests) else float(window[0])
    ends = requests["end_s"].max() if len(requests) else window[1]
    end_s = float(np.nanmax([ends, window[1]]))
    parts = [_client(requests, origin, end_s)]
    metrics = gpus.at_work(metrics)
    for panel, metric, factor in GAUGES:
        values = grid(metrics, metric)
        for name in values:
            label = metric.removeprefix("vllm:num_requests_") if panel == "requests" else str(name)
            known = values[name].dropna()
            parts.append(pd.DataFrame(dict(panel=panel, series=label, time_s=known.index.to_numpy() - origin,
                                           value=known.to_numpy() * factor)))
    last = end_s - origin
    start, stop = window[0] - origin, window[1] - origin
    phases = [("cold start and warm-up", 0.0, start), ("measured", start, stop), ("drain", stop, last)]
    return Story(
        pd.concat([part for part in parts if len(part)], ignore_index=True) if any(map(len, parts)) else parts[0],
        pd.DataFrame([phase for phase in phases if phase[2] > phase[1]], columns=["phase", "start_s", "end_s"]),
        throttle_events(metrics, origin), alignment_error_s, any(_clock_events(metrics)))


def _client(requests: pd.DataFrame, origin: float, end_s: float) -> pd.DataFrame:
    """TTFT p50 and p95 of the requests sent in each `BIN_S`; a percentile of +inf is left out of the line (it has no
    place on an axis)."""
    rows = []
    waits = Measured(requests, None, (-np.inf, np.inf), end_s).samples("ttft")
    bins = ((waits.time_s - origin) // BIN_S).astype(int)
    for index in np.unique(bins):
        found = waits.where(bins == index).percentiles((50, 95))
        rows += [("TTFT (s)", name, (index + 0.5) * BIN_S, value) for name, value in found.items()]
    table = pd.DataFrame(rows, columns=["panel", "series", "time_s", "value"])
    return table[np.isfinite(table["value"].to_numpy(float))]


def throttle_events(metrics: pd.DataFrame, origin: float) -> pd.DataFrame:
    """Spans in which a GPU reports a clock event that slows it down, the power cap left out: gpu, start_s, end_s, what
    (seconds from `origin`)."""
    rows = []
    for gpu, time_s, reasons in _clock_events(metrics):
        bits = reasons & dcgm.ALARMING_EVENTS
        edges = np.flatnonzero(np.diff((bits > 0).astype(int), prepend=0, append=0))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            union = int(np.bitwise_or.reduce(bits[begin:end]))
            what = ", ".join(text for bit, text in dcgm.CLOCK_EVENTS.items() if union & bit)
            rows.append((gpu, time_s[begin] - origin, time_s[end - 1] - origin, what))
    return pd.DataFrame(rows, columns=["gpu", "start_s", "end_s", "what"])


def _clock_events(metrics: pd.DataFrame) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(GPU, times, clock event reasons as bits) of each GPU that reports any, whatever its field is called."""
    for name, one in gpus.by_gpu(metrics, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS").items():
        yield name, one.time_s, one.value.astype(np.int64)
