"""What saturated, from summaries whose cause is known; and the lessons, which may say no."""

from __future__ import annotations

import pandas as pd
import pytest

from spoc_lib.sweep import lessons
from spoc_lib.sweep.saturation import saturation, step_figures

CALM = dict(kv_usage_ratio=0.4, kv_usage_ratio_max=0.5, running=40.0, running_max=60.0, waiting=0.1, preemptions=0.0,
            sm_active_ratio=0.8, dram_active_ratio=0.5, tensor_active_ratio=0.2, iteration_tokens_mean=300.0,
            prompt_tokens=90_000.0, generation_tokens=10_000.0, waiting_by_reason={"capacity": 0.1}, missing=[])
ROW = dict(window_start_s=0.0, window_end_s=60.0, cached_ratio=0.5, client_limited=False)
ITL = dict(metric="itl", limit_s=0.05)


@pytest.mark.parametrize("changed, row, slots, expected", [
    ({}, {"client_limited": True}, 1024, "client"),
    (dict(kv_usage_ratio=0.99, kv_usage_ratio_max=1.0, waiting=12.0), {}, 1024, "kv_blocks"),
    (dict(kv_usage_ratio=0.8, kv_usage_ratio_max=1.0, preemptions=7.0), {}, 1024, "kv_blocks"),
    (dict(kv_usage_ratio=0.99, kv_usage_ratio_max=1.0), {}, 1024, "prefill_compute"),
    (dict(running=31.8, waiting=9.0), {}, 32, "sequence_slots"),
    (dict(sm_active_ratio=0.1, waiting=9.0), {}, 1024, "host"),
    (dict(prompt_tokens=1000.0, generation_tokens=9000.0), {}, 1024, "decode_bandwidth"),
    (dict(sm_active_ratio=None, dram_active_ratio=None, tensor_active_ratio=None, prompt_tokens=None,
          missing=["sm_active_ratio"]), {}, None, "unknown"),
])
def test_the_resource_is_named(changed, row, slots, expected):
    found = saturation({**CALM, **changed}, {**ROW, **row}, max_num_seqs=slots, max_num_batched_tokens=8192,
                       binding=ITL)
    assert found.resource == expected and found.evidence[0]


def steps(mixed_s: float, pure_s: float, mixed_every: int) -> pd.DataFrame:
    rows, clock = [], 0.0
    while clock < 60:
        mixed = len(rows) % mixed_every == 0
        duration = mixed_s if mixed else pure_s
        rows.append(dict(time_s=clock, duration_s=duration, tokens=8192 if mixed else 40, decodes=40,
                         prefill_tokens=8152 if mixed else 0))
        clock += duration
    return pd.DataFrame(rows)


def test_steps_decide_what_itl_waits_for():
    figures = step_figures(steps(0.1, 0.006, 10), (0.0, 60.0), 8192)
    assert figures["budget_full_ratio"] == 1.0 and figures["engine_busy_ratio"] == pytest.approx(1.0, abs=0.01)
    assert figures["prefill_step_time_ratio"] == pytest.approx(0.1 / (0.1 + 9 * 0.006), rel=0.02)
    found = saturation(CALM, ROW, max_num_seqs=1024, max_num_batched_tokens=8192, step_figures=figures, binding=ITL)
    assert found.resource == "prefill_compute" and "100 ms" in found.evidence[0]
    slow = step_figures(steps(0.1, 0.048, 10), (0.0, 60.0), 8192)
    found = saturation(CALM, ROW, max_num_seqs=1024, max_num_batched_tokens=8192, step_figures=slow, binding=ITL)
    assert found.resource == "decode_bandwidth"


def rung(users, sm, itl, verdict="met"):
    return dict(users=users, sm_active_ratio=sm, itl_p95_s=itl, ttft_p95_s=1.0, verdict=verdict)


def test_utilisation_is_not_the_sla():
    rungs = pd.DataFrame([rung(50, 0.6, 0.01), rung(100, 0.7, 0.04), rung(150, 0.75, 0.2, "missed")])
    found = lessons.utilisation_is_not_the_sla(rungs, 110)
    assert found.holds and "70%" in found.sentence and "200 ms" in found.sentence
    full = pd.DataFrame([rung(100, 0.97, 0.04), rung(150, 0.99, 0.2, "missed")])
    assert lessons.utilisation_is_not_the_sla(full.assign(sm_active_ratio=[0.6 + 0.35, 1.2]), 110).holds is False
    assert lessons.utilisation_is_not_the_sla(rungs.assign(sm_active_ratio=None), 110).holds is None


def test_memory_and_chunked_prefill_are_asked_anew():
    row = dict(kv_usage_ratio=0.95, cached_ratio=0.8, ttft_p95_s=1.0, itl_p95_s=0.04)
    other = dict(kv_usage_ratio=1.0, ttft_p95_s=9.0)
    assert lessons.memory_is_not_always_the_bottleneck(row, other).holds is False
    assert lessons.memory_is_not_always_the_bottleneck({**row, "kv_usage_ratio": 0.3}, other).holds
    small, large = dict(ttft_p95_s=3.0, itl_p95_s=0.03), dict(ttft_p95_s=1.0, itl_p95_s=0.09)
    assert lessons.chunked_prefill_is_the_trade_off([(2048, small), (8192, large)]).holds
    assert lessons.chunked_prefill_is_the_trade_off([(2048, large), (8192, small)]).holds is False
    assert lessons.chunked_prefill_is_the_trade_off([(2048, large)]).holds is None


def test_a_cache_that_misses_three_times_as_much_is_a_full_pool():
    within, beyond = {**ROW, "cached_ratio": 0.94, "users": 115}, {**ROW, "cached_ratio": 0.82, "users": 120}
    found = saturation(CALM, beyond, max_num_seqs=1024, max_num_batched_tokens=8192, binding=ITL, within=within)
    assert found.resource == "kv_blocks" and "94%" in found.evidence[0] and "82% at 120" in found.evidence[0]
    steady = {**beyond, "cached_ratio": 0.92}
    assert saturation(CALM, steady, max_num_seqs=1024, max_num_batched_tokens=8192, binding=ITL,
                      within=within).resource != "kv_blocks"


def test_up_and_down_shows_what_an_overload_leaves():
    def row(number, users, verdict, ttft):
        return dict(rung=number, users=users, verdict=verdict, ttft_p95_s=ttft, itl_p95_s=0.02)

    up = [row(0, 50, "met", 1.0), row(1, 100, "missed", float("inf"))]
    worse = lessons.overload_leaves_no_trace(pd.DataFrame([*up, row(2, 50, "missed", 9.0)]))
    assert worse.holds is False and "left a trace" in worse.sentence and "9.00" in worse.sentence
    assert lessons.overload_leaves_no_trace(pd.DataFrame([*up, row(2, 50, "met", 1.1)])).holds is True
    assert lessons.overload_leaves_no_trace(pd.DataFrame(up)).holds is None
