"""The server's figures beside the client's."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from spoc_lib.core.schemas import METRICS, REQUESTS
from spoc_lib.core.tables import as_table
from spoc_lib.telemetry.reconcile import reconcile

REQUESTS_SENT, TOKENS = 50, 20


def rung(client_delay_s: float = 0.01, tokens_lost: int = 0):
    rows, chunks = [], []
    for number in range(REQUESTS_SENT):
        send = number * 1.0
        first = send + 0.4 + client_delay_s
        arrivals = first + 0.02 * np.arange(TOKENS)
        chunks += [(number, float(at), 1.0) for at in arrivals[: TOKENS - tokens_lost]]
        rows.append(dict(
            request=number, persona="P0", user=number % 5, conversation=0, turn=0, kind="agent", intended_send_s=send,
            send_s=send, first_token_s=first, end_s=arrivals[-1], ttft_s=first - send, intended_prompt_tokens=100,
            intended_output_tokens=TOKENS, prompt_tokens=100, output_tokens=TOKENS, cached_tokens=30,
            tokens_source="usage", chunks=TOKENS, outcome="completed", error_class=None, http_status=200,
            finish_reason="length"))
    metrics = []

    def add(metric: str, before: float, after: float, labels: str = "{}") -> None:
        for at, value in ((-1.0, before), (56.0, after)):
            metrics.append(dict(source="vllm", metric=metric, labels=labels, time_s=at, value=value))

    for name, edges, total, count in (
            ("vllm:time_to_first_token_seconds", {"0.25": 0, "0.5": 50, "+Inf": 50}, 0.4 * 50, 50),
            ("vllm:inter_token_latency_seconds", {"0.025": 950, "+Inf": 950}, 0.02 * 950, 950)):
        for edge, value in edges.items():
            add(f"{name}_bucket", 0, value, f'{{"le":"{edge}"}}')
        add(f"{name}_sum", 0, total)
        add(f"{name}_count", 0, count)
    add("vllm:generation_tokens_total", 7, 7 + REQUESTS_SENT * TOKENS)
    add("vllm:prompt_tokens_total", 7, 7 + REQUESTS_SENT * 100)
    add("vllm:prefix_cache_queries_total", 0, 5000)
    add("vllm:prefix_cache_hits_total", 0, 1500)
    chunk_table = pd.DataFrame(chunks, columns=["request", "time_s", "tokens"])
    return as_table(rows, REQUESTS).to_pandas(), chunk_table, as_table(metrics, METRICS).to_pandas()


def test_two_sides_that_agree():
    table = reconcile(*rung(), 0.0, 55.0).set_index("figure")
    assert table["agrees"].all() and len(table) == 6
    assert table.loc["mean TTFT", "server"] == pytest.approx(0.4)
    assert table.loc["p95 TTFT", ["server_low", "server_high"]].tolist() == [0.25, 0.5]
    assert table.loc["output tokens", "difference"] == 0
    assert table.loc["cached share of prompt tokens", "server"] == pytest.approx(0.3)


def test_a_delay_between_the_two_is_flagged():
    table = reconcile(*rung(client_delay_s=0.3), 0.0, 55.0).set_index("figure")
    assert not table.loc["mean TTFT", "agrees"] and "network or the client" in table.loc["mean TTFT", "sentence"]
    assert not table.loc["p95 TTFT", "agrees"]


def test_tokens_that_nobody_read_are_flagged():
    table = reconcile(*rung(tokens_lost=5), 0.0, 55.0).set_index("figure")
    assert not table.loc["output tokens", "agrees"]


def test_a_server_that_exports_nothing_leaves_an_empty_table():
    requests, chunks, _ = rung()
    assert reconcile(requests, chunks, METRICS.empty_table().to_pandas(), 0.0, 55.0).empty
