"""What saturated, from summaries whose cause is known; and the lessons, which may say no."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from spoc_lib.sweep import lessons
from spoc_lib.sweep.evidence import Limits, step_figures
from spoc_lib.sweep.saturation import saturation
from spoc_lib.sweep.updown import differences

CALM = dict(
    kv_usage_ratio=0.4, kv_usage_ratio_max=0.5, running=40.0, running_max=60.0, waiting=0.1, preemptions=0.0,
    sm_active_ratio=0.8, dram_active_ratio=0.5, tensor_active_ratio=0.2, gpu_busy_ratio=0.9, nvlink_tx_bytes_per_s=4e9,
    iteration_tokens_mean=300.0, prompt_tokens=90_000.0, generation_tokens=10_000.0, server_ttft_mean_s=1.0,
    server_prefill_mean_s=0.5, server_ttft_count=60, server_itl_mean_s=0.02, start_s=0.0, end_s=60.0,
    waiting_by_reason={"capacity": 0.1}, missing=[])
ROW = dict(window_start_s=0.0, window_end_s=60.0, cached_ratio=0.5, client_limited=False, itl_p95_s=0.02)
ITL, TTFT = dict(metric="itl", limit_s=0.05), dict(metric="ttft", limit_s=2.0)
LIMITS = Limits(1024, 8192, 450e9, 0.05)


@pytest.mark.parametrize("changed, row, slots, expected", [
    ({}, {"client_limited": True}, 1024, "client"),
    (dict(kv_usage_ratio=0.99, kv_usage_ratio_max=1.0, waiting=12.0), {}, 1024, "kv_blocks"),
    (dict(kv_usage_ratio=0.8, kv_usage_ratio_max=1.0, preemptions=7.0), {}, 1024, "kv_blocks"),
    (dict(kv_usage_ratio=0.99, kv_usage_ratio_max=1.0), {}, 1024, "prefill_compute"),
    (dict(running=31.8, waiting=9.0), {}, 32, "sequence_slots"),
    (dict(sm_active_ratio=0.1, gpu_busy_ratio=0.2, waiting=9.0), {}, 1024, "host"),
    (dict(prompt_tokens=1000.0, generation_tokens=9000.0), {}, 1024, "decode_bandwidth"),
    (dict(sm_active_ratio=None, dram_active_ratio=None, tensor_active_ratio=None, prompt_tokens=None,
          missing=["sm_active_ratio"]), {}, None, "unknown"),
])
def test_the_resource_is_named(changed, row, slots, expected):
    found = saturation({**CALM, **changed}, {**ROW, **row}, replace(LIMITS, max_num_seqs=slots), binding=ITL)
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
    found = saturation(CALM, ROW, LIMITS, step_figures=figures, binding=ITL)
    assert found.resource == "prefill_compute" and "100 ms" in found.evidence[0]
    slow = step_figures(steps(0.1, 0.048, 10), (0.0, 60.0), 8192)
    found = saturation(CALM, ROW, LIMITS, step_figures=slow, binding=ITL)
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
    found = saturation(CALM, beyond, LIMITS, binding=ITL, within=within)
    assert found.resource == "kv_blocks" and "94%" in found.evidence[0] and "82% at 120" in found.evidence[0]
    steady = {**beyond, "cached_ratio": 0.92}
    assert saturation(CALM, steady, LIMITS, binding=ITL, within=within).resource != "kv_blocks"


@pytest.mark.parametrize("changed, row, expected, said", [
    (dict(waiting=9.0, iteration_tokens_mean=8000.0), {}, "token_budget", "98% of the steps"),
    (dict(waiting=9.0, iteration_tokens_mean=8000.0), {"itl_p95_s": 0.04}, "prefill_compute", "wait for prompts"),
    (dict(server_ttft_mean_s=3.0), {}, "host", "2.36 s pass before the scheduler"),
    (dict(server_ttft_mean_s=3.0, waiting=2.4), {}, "prefill_compute", "wait for prompts")])
def test_what_ttft_waits_for_is_told_apart(changed, row, expected, said):
    found = saturation({**CALM, **changed}, {**ROW, **row}, LIMITS, binding=TTFT)
    assert found.resource == expected and said in found.evidence[0]


def test_gpus_that_wait_for_one_another_are_not_a_slow_host():
    missed = {**ROW, "verdict": "missed"}
    waiting = saturation({**CALM, "sm_active_ratio": 0.3}, missed, LIMITS, binding=ITL)
    assert waiting.resource == "interconnect" and "NVLink sends 4 GB/s a GPU, 1% of its rate" in waiting.evidence[0]
    idle = saturation({**CALM, "sm_active_ratio": 0.3, "gpu_busy_ratio": 0.35}, missed, LIMITS, binding=ITL)
    assert idle.resource == "host" and "slower than they are" in idle.evidence[0]


def test_a_throttled_gpu_is_named_when_it_lasts_half_of_the_window():
    def report(end_s: float) -> dict:
        return dict(gpus=4, stragglers=[dict(start_s=10.0, end_s=end_s, sentence="GPU 2 runs 30% below.")])

    found = saturation(CALM, ROW, LIMITS, binding=ITL, stragglers=report(55.0))
    assert found.resource == "throttled_gpu" and "GPU 2" in found.evidence[0]
    brief = saturation(CALM, ROW, LIMITS, binding=ITL, stragglers=report(20.0))
    assert brief.resource == "prefill_compute" and "GPU 2 runs 30% below" in brief.evidence
    healthy = saturation(CALM, ROW, LIMITS, binding=ITL, stragglers=dict(gpus=4, stragglers=[]))
    assert "none of the 4 GPUs runs slower than its peers" in healthy.evidence


def verdicts(number: int, users: int, verdict: str, low_s: float, high_s: float) -> dict:
    return dict(rung=number, users=users, persona="all", metric="ttft", percentile=95.0, limit_s=5.0, samples=99,
                verdict=verdict, value_s=(low_s + high_s) / 2, low_s=low_s, high_s=high_s)


def test_up_and_down_shows_what_an_overload_leaves():
    up = [verdicts(0, 50, "met", 1.0, 2.0), verdicts(1, 100, "missed", 20.0, float("inf"))]
    worse = lessons.overload_leaves_no_trace(differences(pd.DataFrame([*up, verdicts(2, 50, "missed", 8, 10)])), 60)
    assert worse.holds is False and worse.sentence.startswith("Hysteresis, 60 s after an overload of 100 users")
    assert "all ttft p95 at 50 users: 1.5 s (1 to 2) before, 9 s (8 to 10) after" in worse.sentence
    same = lessons.overload_leaves_no_trace(differences(pd.DataFrame([*up, verdicts(2, 50, "met", 1.5, 2.5)])), 60)
    assert same.holds is True and same.sentence.startswith("No hysteresis")
    quicker = differences(pd.DataFrame([*up, verdicts(2, 50, "met", 0.1, 0.5)]))
    assert quicker["moved"].tolist() == ["better"] and lessons.overload_leaves_no_trace(quicker, 60).holds is True
    assert lessons.overload_leaves_no_trace(differences(pd.DataFrame(up)), 60).holds is None


def engines(*rows: tuple[float, float, float]) -> dict:
    """A summary of engines that run, hold waiting, and use KV as `rows` say."""
    each = [dict(engine=str(number), running=float(running), waiting=float(waiting), kv_usage_ratio=usage,
                 kv_usage_ratio_max=usage, preemptions=0.0) for number, (running, waiting, usage) in enumerate(rows)]
    return {**CALM, "by_engine": each, "running": sum(one["running"] for one in each),
            "waiting": sum(one["waiting"] for one in each),
            "kv_usage_ratio": sum(one["kv_usage_ratio"] for one in each) / len(each),
            "kv_usage_ratio_max": max(one["kv_usage_ratio_max"] for one in each)}


@pytest.mark.parametrize("rows, expected, words", [
    ([(64, 0.25, 0.5)] * 4, "decode_bandwidth", None),  # a quarter full each: 256 run of 1024 slots
    ([(255, 0.25, 0.5)] * 4, "sequence_slots", "in 4 of 4 engines"),
    ([(256, 9, 0.5), (40, 0, 0.2)], "sequence_slots", "max_num_seqs = 256 of engine 0"),
    ([(200, 20, 0.99), (60, 0, 0.3)], "kv_blocks", "KV blocks of engine 0 are 99%"),
    ([(60, 20, 0.3), (200, 0, 0.99)], "decode_bandwidth", None),  # what waits does not wait for the full pool
])
def test_limits_hold_for_each_engine(rows, expected, words):
    summary = {**engines(*rows), "prompt_tokens": 1000.0, "generation_tokens": 9000.0}
    found = saturation(summary, ROW, replace(LIMITS, max_num_seqs=256), binding=ITL)
    assert found.resource == expected and (words is None or words in found.evidence[0])
    assert any("uneven" in text for text in found.evidence) == (len({row[0] for row in rows}) > 1)
    assert any(f"of {256 * len(rows)} slots" in text for text in found.evidence)
