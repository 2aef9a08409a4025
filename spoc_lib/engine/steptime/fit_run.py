"""Parameters from a real run: its `requests.parquet` and `metrics.parquet` instead of a published benchmark.

A request's decode time is the sum of the steps that it lived through: one a token, each with the batch that ran at
that time, plus what other requests' prompts added to the steps that they came in. So

    end − first token = (tokens − 1) · decode step(mean batch) + Σ others' prompts in between · (mixed − decode step)
    TTFT              = front end + 1.5 decode steps + own prompt's steps      (nobody else's prompt in between)

with batches counted from the requests themselves. The server's own gauge must agree with that count: requests that
the table does not know would be blamed on the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.core.schemas import METRICS, REQUESTS
from spoc_lib.core.tables import read_table
from spoc_lib.engine.steptime.compiled import COEFFICIENTS
from spoc_lib.engine.steptime.fit import CAUCHY_SCALE, secant_least_squares
from spoc_lib.engine.steptime.model import StepTimeModel
from spoc_lib.engine.steptime.parameters import Parameters, scaled

#: What a run can tell apart, and the tolerance of each (standard deviation of the logarithm).
TOLERANCE = {
    "gap_us": 0.7, "gap_request_us": 0.7, "gap_prefill_us": 0.7, "expert_unpack_tb_per_s": 0.2,
    "expert_compute_efficiency": 0.3, "decode_read_tb_per_s": 0.05, "frontend_us": 0.5,
}
NOISE = np.array([0.15, 0.05])  # relative, one request: TTFT, decode time
MOST_TRAFFIC_GAP = 0.1
GRID = 4000


@dataclass(frozen=True)
class Run:
    """Arrays over completed requests, and means over each one's decode time.

    first_s, end_s, ttft_s; prompt, cached, output (tokens); decodes, context, window: mean over its decode time of
    requests decoding and of their attended tokens; at_first: requests decoding when its prompt came in;
    alone: nobody else's first token lies between its sending and its own.
    """

    first_s: np.ndarray
    end_s: np.ndarray
    ttft_s: np.ndarray
    prompt: np.ndarray
    cached: np.ndarray
    output: np.ndarray
    decodes: np.ndarray
    context: np.ndarray
    window: np.ndarray
    at_first: np.ndarray
    alone: np.ndarray
    batched_tokens: int

    def __len__(self) -> int:
        return len(self.first_s)


def read_run(requests_path: str | Path, metrics_path: str | Path, model: ModelSpec, batched_tokens: int) -> Run:
    """The completed requests of a run; InputError when they are too few or the server served others too."""
    table = read_table(requests_path, REQUESTS)
    needed = ["send_s", "first_token_s", "end_s", "prompt_tokens", "output_tokens"]
    rows = table[(table["outcome"] == "completed") & table[needed].notna().all(axis=1)
                 & (table["output_tokens"] > 1) & (table["end_s"] > table["first_token_s"])
                 ].sort_values("first_token_s")  # an answer that came in one piece has no decode time
    if len(rows) < 20:
        raise InputError("too-few-requests", f"{requests_path} holds {len(rows)} completed requests with tokens "
                         f"counted by the server: at least 20 are needed")
    run = _run(rows, model, batched_tokens)
    _check_traffic(table, read_table(metrics_path, METRICS), requests_path)
    return run


def _run(rows: pd.DataFrame, model: ModelSpec, batched_tokens: int) -> Run:
    send, first, end, prompt, output = (rows[name].to_numpy(float) for name in (
        "send_s", "first_token_s", "end_s", "prompt_tokens", "output_tokens"))
    cached = rows["cached_tokens"].fillna(0).to_numpy(float)
    grid = np.linspace(first.min(), end.max(), GRID)
    count, context, window = np.zeros((3, GRID))
    cap = model.sliding_window or model.max_model_len
    for begin, finish, tokens, new in zip(first, end, prompt, output, strict=True):
        low, high = np.searchsorted(grid, [begin, finish])
        seen = tokens + new * (grid[low:high] - begin) / max(finish - begin, 1e-9)
        count[low:high] += 1
        context[low:high] += seen
        window[low:high] += np.minimum(seen, cap)
    decodes, context, window = (_mean_between(grid, one, first, end) for one in (count, context, window))
    before = np.searchsorted(first, send, side="right")
    return Run(first, end, first - send, prompt, cached, output, np.maximum(decodes, 1), context, window,
               np.maximum(np.interp(first, grid, count) - 1, 0), before == np.arange(len(first)), batched_tokens)


def _mean_between(grid: np.ndarray, values: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    integral = np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2 * np.diff(grid))])
    return (np.interp(end, grid, integral) - np.interp(start, grid, integral)) / np.maximum(end - start, 1e-9)


def _check_traffic(table: pd.DataFrame, metrics: pd.DataFrame, path: str | Path) -> None:
    gauge = metrics[metrics["metric"] == "vllm:num_requests_running"].groupby("time_s")["value"].sum()
    send, end = table["send_s"].to_numpy(float), table["end_s"].to_numpy(float)
    times = gauge.index.to_numpy(float)
    inside = (times >= np.nanmin(send)) & (times <= np.nanmax(end))
    if not inside.any():
        raise InputError("no-metric", "the metrics hold no vllm:num_requests_running during the run: record the "
                         "server's /metrics beside the requests")
    served = gauge.to_numpy(float)[inside].mean()
    known = np.mean([np.sum((send <= t) & ~(end < t)) for t in times[inside]])
    if served > known * (1 + MOST_TRAFFIC_GAP) + 0.5:
        raise InputError("other-traffic", f"the server ran {served:.1f} requests on average, {path} knows "
                         f"{known:.1f}: others used it, so its times say nothing about this load")


def predict_run(run: Run, step_time: StepTimeModel) -> np.ndarray:
    """(requests, 2): TTFT (where `alone`, else NaN) and decode time in seconds."""
    decode = _steps(run, step_time, run.decodes, run.context, run.window)
    share = run.at_first / run.decodes
    base = _steps(run, step_time, run.at_first, run.context * share, run.window * share)
    base = np.where(run.at_first > 0, base, 0.0)
    prompt = _prompt_seconds(run, step_time, run.at_first, run.context * share, run.window * share)
    added = np.concatenate([[0.0], np.cumsum(np.maximum(prompt - base * _chunks(run), 0))])
    between = (added[np.searchsorted(run.first_s, run.end_s, side="right")] - added[np.arange(len(run)) + 1])
    front = step_time.parameters.frontend_us * 1e-6 + step_time.parameters.frontend_token_us * 1e-6 * run.prompt
    ttft = np.where(run.alone, front + 1.5 * base + prompt, np.nan)
    return np.stack([ttft, (run.output - 1) * decode + between], axis=1)


def _chunks(run: Run) -> np.ndarray:
    return np.ceil(np.maximum(run.prompt - run.cached, 1) / run.batched_tokens)


def _steps(run: Run, step_time: StepTimeModel, decodes, context, window, *, chunk=0.0, before=0.0):
    """Seconds of a step of mean sizes, which need not be whole numbers; arrays over requests."""
    step = step_time.compiled(max(8192, run.batched_tokens + 2048))
    c = dict(zip(COEFFICIENTS, step.coeffs, strict=True))
    axis = np.arange(step.max_tokens + 1)
    mixed = np.asarray(chunk) > 0
    cap = step_time.model.sliding_window or step_time.model.max_model_len
    seconds = (np.interp(decodes + chunk, axis, step.table[0]) + np.interp(decodes + mixed, axis, step.table[1])
               + c["step"] + c["gap_step"] + c["gap_request"] * (decodes + mixed) + c["decodes"] * decodes
               + c["decode_context"] * context + c["decode_window"] * window)
    return seconds + mixed * (
        c["mixed"] + c["gap_mixed"] + c["prefill_tokens"] * chunk + c["prefill_context"] * before
        + c["prefill_pairs"] * chunk * (before + chunk / 2)
        + c["prefill_window_pairs"] * chunk * np.minimum(before + chunk / 2, cap))


def _prompt_seconds(run: Run, step_time: StepTimeModel, decodes, context, window) -> np.ndarray:
    """Seconds of the steps that bring each request's prompt in, its chunks taken equal."""
    chunks = _chunks(run)
    new = np.maximum(run.prompt - run.cached, 1) / chunks
    middle = run.cached + new * (chunks - 1) / 2
    return chunks * _steps(run, step_time, decodes, context, window, chunk=new, before=middle)


def run_errors(run: Run, step_time: StepTimeModel) -> np.ndarray:
    """(requests, 2): relative errors of TTFT (NaN where not alone) and of decode time."""
    return predict_run(run, step_time) / np.stack([run.ttft_s, run.end_s - run.first_s], axis=1) - 1


def fit_run(run: Run, model: ModelSpec, gpu: GpuSpec, gpu_count: int, start: Parameters,
            chosen: np.ndarray | None = None) -> Parameters:
    """Maximum a posteriori parameters around `start` from the `chosen` requests (bool; default: all)."""
    fitted = [name for name in TOLERANCE if getattr(start, name) > 0]
    tolerance = np.array([TOLERANCE[name] for name in fitted])

    def at(x: np.ndarray) -> Parameters:
        return scaled(start, dict(zip(fitted, np.exp(x), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = run_errors(run, StepTimeModel(model, gpu, gpu_count, at(x)))
        logs = np.nan_to_num(np.log1p(np.maximum(errors, -0.99)) / NOISE)
        if chosen is not None:
            logs = logs[chosen]
        robust = np.sign(logs) * CAUCHY_SCALE * np.sqrt(np.log1p((logs / CAUCHY_SCALE) ** 2))
        return np.concatenate([robust.ravel(), x / tolerance])

    return at(secant_least_squares(residuals, np.zeros(len(fitted)), 40))
