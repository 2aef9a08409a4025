"""The server's figures beside the client's: where they part, something between the two is in the numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from spoc_lib.core.stats import percentile
from spoc_lib.telemetry.series import counter_increase, histogram_increase

#: Tolerated client-minus-server mean TTFT: connection, HTTP, tokenisation of the prompt.
TTFT_SLACK_S, TTFT_RATIO = 0.050, 1.15
ITL_SLACK_S, ITL_RATIO = 0.002, 1.15
TOKENS_RATIO = 1.02
CACHED_SLACK = 0.02
#: Beyond the rung's ends, where nothing happens any more and the counters stand still.
SLACK_S = 2.0
COLUMNS = ("figure", "unit", "client", "server_low", "server", "server_high", "difference", "agrees", "sentence")


def reconcile(requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame, start_s: float,
              end_s: float) -> pd.DataFrame:
    """One row a figure: what the client measured, what the server says, whether they agree, and a sentence.

    Over the whole rung (start_s to end_s, the recorder running before and after it): both sides then count the same
    requests, and the counters stand still at the edges, so nothing depends on when a scrape fell. Means are compared (a
    histogram's sum and count are exact), percentiles against the histogram's bucket: `server_low` to `server_high` is
    all that it knows. A figure that the server does not export is left out.
    """
    span = (start_s - SLACK_S, end_s + SLACK_S)
    rows = [*_latency(requests, metrics, span), *_itl(chunks, metrics, span),
            *_tokens(requests, chunks, metrics, span)]
    return pd.DataFrame([row for row in rows if row], columns=list(COLUMNS))


def _row(figure: str, unit: str, client: float, server: float, low: float, high: float, agrees: bool,
         part: str) -> dict:
    sentence = f"{figure}: client {client:.4g}, server {server:.4g} {unit}" if math.isfinite(server) else \
        f"{figure}: client {client:.4g}, server between {low:.4g} and {high:.4g} {unit}"
    return dict(figure=figure, unit=unit, client=client, server_low=low, server=server, server_high=high,
                difference=client - server, agrees=bool(agrees), sentence=sentence + ("" if agrees else f": {part}"))


def _latency(requests: pd.DataFrame, metrics: pd.DataFrame, span: tuple[float, float]) -> list[dict]:
    histogram = histogram_increase(metrics, "vllm:time_to_first_token_seconds", *span)
    first = requests["first_token_s"].to_numpy(float, na_value=np.nan)
    inside = ~np.isnan(first)
    if histogram is None or not histogram.count or not inside.any():
        return []
    ours = first[inside] - requests["send_s"].to_numpy(float, na_value=np.nan)[inside]
    mean = float(ours.mean())
    late = "the network or the client adds delay that the server does not see"
    slow = "the server counts from an earlier moment than the client, or other clients load it"
    agrees = mean - histogram.mean <= TTFT_SLACK_S + (TTFT_RATIO - 1) * histogram.mean and \
        histogram.mean - mean <= TTFT_SLACK_S
    rows = [_row("mean TTFT", "s", mean, histogram.mean, histogram.mean, histogram.mean, agrees,
                 late if mean > histogram.mean else slow)]
    low, high = histogram.quantile_bounds(95)
    p95 = percentile(ours, 95)
    inside_bucket = low - TTFT_SLACK_S <= p95 <= high * TTFT_RATIO + TTFT_SLACK_S
    rows.append(_row("p95 TTFT", "s", p95, math.nan, low, high, inside_bucket,
                     "outside the server's bucket, beyond what its resolution explains"))
    return rows


def _itl(chunks: pd.DataFrame, metrics: pd.DataFrame, span: tuple[float, float]) -> list[dict]:
    histogram = histogram_increase(metrics, "vllm:inter_token_latency_seconds", *span)
    if histogram is None or not histogram.count or not len(chunks):
        return []
    ordered = chunks.sort_values(["request", "time_s"], kind="stable")
    request, time_s = ordered["request"].to_numpy(), ordered["time_s"].to_numpy(float)
    tokens = ordered["tokens"].to_numpy(float)
    later = np.flatnonzero(request[1:] == request[:-1]) + 1
    if not later.size or not tokens[later].sum():
        return []
    mean = float((time_s[later] - time_s[later - 1]).sum() / tokens[later].sum())
    agrees = abs(mean - histogram.mean) <= ITL_SLACK_S + (ITL_RATIO - 1) * histogram.mean
    return [_row("mean ITL", "s", mean, histogram.mean, histogram.mean, histogram.mean, agrees,
                 "chunks are delayed, merged or counted differently between the two")]


def _tokens(requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame,
            span: tuple[float, float]) -> list[dict]:
    rows = []
    generated = counter_increase(metrics, "vllm:generation_tokens_total", *span)
    if generated:
        ours = float(chunks["tokens"].sum())
        agrees = max(ours, generated) <= TOKENS_RATIO * min(ours, generated) + 50
        rows.append(_row("output tokens", "tokens", ours, generated, generated, generated, agrees,
                         "tokens were generated that no client read, or usage counts something else"))
    prompts = counter_increase(metrics, "vllm:prompt_tokens_total", *span)
    if prompts:
        answered = requests[requests["first_token_s"].notna()]
        ours = float(answered["prompt_tokens"].fillna(answered["intended_prompt_tokens"]).sum())
        agrees = max(ours, prompts) <= TOKENS_RATIO * min(ours, prompts) + 50
        rows.append(_row("prompt tokens", "tokens", ours, prompts, prompts, prompts, agrees,
                         "the server's template or tokenizer counts prompts differently, or others use it too"))
    hits = counter_increase(metrics, "vllm:prefix_cache_hits_total", *span)
    queries = counter_increase(metrics, "vllm:prefix_cache_queries_total", *span)
    counted = requests[requests["cached_tokens"].notna() & requests["prompt_tokens"].notna()]
    if hits is not None and queries and len(counted):
        ours = float(counted["cached_tokens"].sum() / max(counted["prompt_tokens"].sum(), 1))
        theirs = hits / queries
        rows.append(_row("cached share of prompt tokens", "", ours, theirs, theirs, theirs,
                         abs(ours - theirs) <= CACHED_SLACK, "usage and counters disagree about what was cached"))
    return rows
