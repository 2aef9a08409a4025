"""The server's figures beside the client's: where they part, something between the two is in the numbers."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from spoc_lib.core.stats import percentile
from spoc_lib.metrics import Measured
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

    The server's histograms know nothing of who is still waiting or failed, so here, other than in a rung's own figures,
    the client's side is over what the server counts: TTFT over all requests whose first token came, however they ended;
    ITL over all gaps between tokens that came.
    """
    span = (start_s - SLACK_S, end_s + SLACK_S)
    seen = Measured(requests, chunks, (-math.inf, math.inf), end_s)
    rows = [*_latency(seen, metrics, span), *_itl(seen, metrics, span), *_tokens(seen, metrics, span)]
    return pd.DataFrame([row for row in rows if row], columns=list(COLUMNS))


def _row(figure: str, unit: str, client: float, server: float, low: float, high: float, agrees: bool,
         part: str) -> dict:
    sentence = f"{figure}: client {client:.4g}, server {server:.4g} {unit}" if math.isfinite(server) else \
        f"{figure}: client {client:.4g}, server between {low:.4g} and {high:.4g} {unit}"
    return dict(figure=figure, unit=unit, client=client, server_low=low, server=server, server_high=high,
                difference=client - server, agrees=bool(agrees), sentence=sentence + ("" if agrees else f": {part}"))


def _latency(seen: Measured, metrics: pd.DataFrame, span: tuple[float, float]) -> list[dict]:
    histogram = histogram_increase(metrics, "vllm:time_to_first_token_seconds", *span)
    ours = seen.records.ttft_s[~np.isnan(seen.records.ttft_s)]
    if histogram is None or not histogram.count or not len(ours):
        return []
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


def _itl(seen: Measured, metrics: pd.DataFrame, span: tuple[float, float]) -> list[dict]:
    histogram = histogram_increase(metrics, "vllm:inter_token_latency_seconds", *span)
    itl = seen.gaps.itl
    if histogram is None or not histogram.count or not len(itl):
        return []
    mean = float(np.average(itl.value_s, weights=itl.weight))
    agrees = abs(mean - histogram.mean) <= ITL_SLACK_S + (ITL_RATIO - 1) * histogram.mean
    return [_row("mean ITL", "s", mean, histogram.mean, histogram.mean, histogram.mean, agrees,
                 "chunks are delayed, merged or counted differently between the two")]


def _tokens(seen: Measured, metrics: pd.DataFrame, span: tuple[float, float]) -> list[dict]:
    rows = []
    generated = counter_increase(metrics, "vllm:generation_tokens_total", *span)
    if generated:
        ours = float(seen.chunks["tokens"].sum())
        agrees = max(ours, generated) <= TOKENS_RATIO * min(ours, generated) + 50
        rows.append(_row("output tokens", "tokens", ours, generated, generated, generated, agrees,
                         "tokens were generated that no client read, or usage counts something else"))
    prompts = counter_increase(metrics, "vllm:prompt_tokens_total", *span)
    if prompts:
        ours = float(seen.records.prompt_tokens[~np.isnan(seen.records.first_s)].sum())
        agrees = max(ours, prompts) <= TOKENS_RATIO * min(ours, prompts) + 50
        rows.append(_row("prompt tokens", "tokens", ours, prompts, prompts, prompts, agrees,
                         "the server's template or tokenizer counts prompts differently, or others use it too"))
    hits = counter_increase(metrics, "vllm:prefix_cache_hits_total", *span)
    queries = counter_increase(metrics, "vllm:prefix_cache_queries_total", *span)
    cached = seen.numbers("cached_ratio")["cached_ratio"]
    if hits is not None and queries and cached is not None:
        theirs = hits / queries
        rows.append(_row("cached share of prompt tokens", "", cached, theirs, theirs, theirs,
                         abs(cached - theirs) <= CACHED_SLACK, "usage and counters disagree about what was cached"))
    return rows
