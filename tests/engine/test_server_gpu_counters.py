"""GPU counters: additive, consistent, and an overheated GPU that holds the others up."""

from __future__ import annotations

import numpy as np
import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.flags import EngineFlags
from spoc_lib.engine.gpu_counters import (
    NOTHING,
    Activity,
    GpuCounters,
    Throttle,
    activity,
    dram_bytes,
    nvlink_bytes,
    tensor_flops,
)
from spoc_lib.engine.http.realtime import RealtimeEngine

MODEL, GPU = load_model("gpt-oss-120b"), load_gpu("h100-sxm")
DECODE = Batch(64, 64, 64 * 20_000, 64 * 128, 0, 0, 0.0, 0.0, 0, 64)
PREFILL = Batch(8192, 0, 0, 0, 1, 8192, 8192 * 4096.5, 8192 * 128.0, 0, 1)


def twin() -> EmbeddedEngine:
    return EmbeddedEngine.build(EngineFlags(tensor_parallel_size=4), MODEL, GPU, 4)


def test_known_bytes_and_operations():
    # attention projections and experts of the active parameters: about 5.1e9 a token, 2 operations each
    assert tensor_flops(PREFILL, MODEL, 1) / 8192 == pytest.approx(2 * 5.1e9, rel=0.35)
    assert nvlink_bytes(PREFILL, MODEL, 1) == 0
    assert nvlink_bytes(DECODE, MODEL, 4) == 2 * 36 * 64 * 2880 * 2 * 2 * 3 / 4
    read, written = dram_bytes(DECODE, MODEL, 1)
    kv = 36_864 * 64 * 20_000  # 36.9 kB a token in the 18 full layers
    assert read == pytest.approx(kv + 64e9, rel=0.2)  # and nearly all weights: 64 tokens hit most experts
    assert 0 < written < read


def test_arrays_are_the_same_as_one_step_after_the_other():
    steps = [DECODE, PREFILL, DECODE]
    components = [twin().step_time.components(batch) for batch in steps]
    single = NOTHING
    for one, batch in zip(components, steps, strict=True):
        single = single.plus(activity(one, batch, MODEL, GPU, 4))
    columns = {name: np.array([one[name] for one in components]) for name in components[0]}
    batches = Batch(*(np.array(column, dtype=float) for column in zip(*steps, strict=True)))
    whole = activity(columns, batches, MODEL, GPU, 4).per_window(np.array([0.1, 0.2, 1.5]), 0.0, 1.0, 2)
    assert [float(field.sum()) for field in whole] == pytest.approx([float(field) for field in single])
    assert whole.busy_s[0] > whole.busy_s[1]


@pytest.mark.parametrize("batch", [DECODE, PREFILL])
def test_a_saturated_gpu_stays_within_its_limits(batch):
    components = twin().step_time.components(batch)
    seconds = sum(components.values())
    one = activity(components, batch, MODEL, GPU, 4)
    values = GpuCounters(GPU, 4, 70).advance(one, seconds)
    ratios = {name: float(values[f"DCGM_FI_PROF_{name}"][0, 0]) for name in
              ("GR_ENGINE_ACTIVE", "SM_ACTIVE", "DRAM_ACTIVE", "PIPE_TENSOR_ACTIVE")}
    assert all(0 < ratio <= 1 for ratio in ratios.values())
    assert ratios["PIPE_TENSOR_ACTIVE"] <= ratios["SM_ACTIVE"] <= ratios["GR_ENGINE_ACTIVE"]
    assert 0.12 * 700 <= values["DCGM_FI_DEV_POWER_USAGE"][0, 0] <= 700
    assert (one.tensor_flops / seconds) < GPU.bf16_flops_per_s  # never above the roofline


def test_tensor_time_and_traffic_follow_the_bits_of_each_part():
    dense = MODEL.model_copy(update=dict(moe=None, d_ff=8192))
    eight = dense.model_copy(update=dict(dense_weight_bits=8))
    rest = GPU.model_copy(update=dict(fp8_flops_per_s=None))
    one, half, unpacked = (activity({}, PREFILL, m, g, 1) for m, g in ((dense, GPU), (eight, GPU), (eight, rest)))
    assert one.tensor_flops == half.tensor_flops
    assert one.tensor_s == pytest.approx(one.tensor_flops / GPU.bf16_flops_per_s) == pytest.approx(unpacked.tensor_s)
    head, scores = 2 * dense.hidden * dense.vocabulary, 4 * dense.heads * dense.head_dim * (
        18 * PREFILL.prefill_pairs + 18 * PREFILL.prefill_window_pairs)
    assert one.tensor_s - half.tensor_s == pytest.approx((one.tensor_flops - head - scores) * (
        1 / GPU.bf16_flops_per_s - 1 / GPU.fp8_flops_per_s))
    whole, less = (dram_bytes(PREFILL, m, 1)[0] - dram_bytes(PREFILL._replace(logits=0), m, 1)[0]
                   for m in (dense, eight))
    assert whole == less == dense.hidden * dense.vocabulary * 2  # the head stays in BF16


def test_windows_one_by_one_or_at_once():
    sums = Activity(*(np.linspace(0.1, 0.5, 30) * scale for scale in (1, 0.1, 0.8, 1e11, 1e10, 1e13, 0.01, 1e9)))
    throttle = Throttle(1, 10.0, 0.7)
    at_once = GpuCounters(GPU, 2, 70, throttle).advance(sums, 1.0)
    stepwise = GpuCounters(GPU, 2, 70, throttle)
    for window in range(30):
        values = stepwise.advance(Activity(*(field[window] for field in sums)), 1.0, float(window))
        for name, series in at_once.items():
            assert values[name][0] == pytest.approx(series[window]), name


def test_an_overheated_gpu_is_hot_slow_and_longer_at_work_and_the_others_wait():
    sums = Activity(*(np.full(60, value) for value in (0.6, 0.1, 0.5, 1e12, 1e11, 1e13, 0.01, 1e9)))
    values = GpuCounters(GPU, 2, 70, Throttle(1, 30.0, 0.7)).advance(sums, 1.0)
    clock, active = values["DCGM_FI_DEV_SM_CLOCK"], values["DCGM_FI_PROF_SM_ACTIVE"]
    assert clock[29].tolist() == [1980, 1980] and clock[30].tolist() == pytest.approx([1980, 1386])
    assert active[40, 1] > active[40, 0] > active[20, 0]
    assert values["DCGM_FI_DEV_THERMAL_VIOLATION"][-1].tolist() == [0, 30e9]
    assert values["DCGM_FI_DEV_GPU_TEMP"][-1, 1] > 80 > values["DCGM_FI_DEV_GPU_TEMP"][-1, 0]
    assert int(values["DCGM_FI_DEV_CLOCKS_EVENT_REASONS"][-1, 1]) & 0x40


def test_an_overheated_gpu_slows_every_step_of_the_group():
    engine = twin()
    hot = RealtimeEngine(engine, throttle=Throttle(1, 0.0, 0.5))
    later = RealtimeEngine(engine, throttle=Throttle(1, 3600.0, 0.5))
    components = engine.step_time.components(DECODE)
    own = sum(seconds for name, seconds in components.items() if name not in ("comm", "idle"))
    assert hot.core.seconds(DECODE) == pytest.approx(engine.step_time.seconds(DECODE) + own)
    assert later.core.seconds(DECODE) == engine.step_time.seconds(DECODE)
