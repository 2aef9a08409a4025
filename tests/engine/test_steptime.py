"""The step-time model: monotone, additive, compiled form equal, never above the roofline, outside ranges said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.config import load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.steptime import passport
from spoc_lib.engine.steptime.compiled import COEFFICIENTS
from spoc_lib.engine.steptime.kernels import experts_hit
from spoc_lib.engine.steptime.model import CATEGORIES, StepTimeModel, step_time_model

GPT_OSS = load_model("gpt-oss-120b")
PLACES = [("h100-sxm", 2), ("h100-sxm", 4), ("h200-sxm", 1), ("h200-sxm", 8)]
MODELS = {place: step_time_model(GPT_OSS, load_gpu(place[0]), place[1]) for place in PLACES}


def batch_of(decodes: int, context: int, chunk: int = 0, before: int = 0) -> Batch:
    """`decodes` requests of `context` tokens each, and a prompt chunk of `chunk` tokens after `before`."""
    window = min(context, 128)
    chunk_window = min(before + chunk, 128)
    return Batch(decodes + chunk, decodes, decodes * context, decodes * window, int(chunk > 0), chunk,
                 chunk * (before + (chunk + 1) / 2), float(chunk * chunk_window), before if chunk else 0,
                 decodes + int(chunk > 0))


batches = st.builds(batch_of, st.integers(0, 512), st.integers(1, 60_000), st.integers(0, 8192),
                    st.integers(0, 60_000)).filter(lambda b: b.tokens > 0)
places = st.sampled_from(PLACES)


@settings(max_examples=60, deadline=None)
@given(batches, places)
def test_components_are_of_known_categories_and_sum_to_seconds(batch, place):
    step_time = MODELS[place]
    parts = step_time.components(batch)
    assert set(parts) == {*CATEGORIES, "idle"}
    assert all(seconds >= 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(step_time.seconds(batch), rel=1e-12)
    assert (parts["comm"] > 0) == (place[1] > 1)


@settings(max_examples=60, deadline=None)
@given(batches, places)
def test_the_compiled_form_equals_seconds(batch, place):
    step = MODELS[place].compiled(16384)
    assert step.coeffs.shape == (len(COEFFICIENTS),)
    assert step.seconds(batch) == pytest.approx(MODELS[place].seconds(batch), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 50_000), st.integers(0, 8000), places,
       st.integers(1, 100), st.integers(1, 10_000), st.integers(1, 500))
def test_more_work_never_takes_less_time(decodes, context, chunk, place, more, longer, bigger):
    seconds = MODELS[place].seconds
    base = seconds(batch_of(decodes, context, chunk))
    assert seconds(batch_of(decodes + more, context, chunk)) >= base
    assert seconds(batch_of(decodes, context + longer, chunk)) >= base
    assert seconds(batch_of(decodes, context, chunk + bigger)) >= base
    assert seconds(batch_of(decodes, context, chunk + 1, 5000)) >= seconds(batch_of(decodes, context, chunk + 1))


@pytest.mark.parametrize("place", PLACES)
def test_no_step_beats_the_roofline(place):
    gpu, count = load_gpu(place[0]), place[1]
    moe = GPT_OSS.moe
    active = GPT_OSS.layers * (
        moe.top_k * 3 * GPT_OSS.hidden * moe.d_ff
        + GPT_OSS.hidden * GPT_OSS.head_dim * (2 * GPT_OSS.heads + 2 * GPT_OSS.kv_heads))
    for chunk in (256, 2048, 8192):
        least = 2 * chunk * active / count / gpu.bf16_flops_per_s
        assert MODELS[place].seconds(batch_of(0, 1, chunk)) > least
    for decodes, context in ((1, 100), (64, 4000), (256, 30_000)):
        kv = decodes * context * 2 * GPT_OSS.kv_heads * GPT_OSS.head_dim * 2 * GPT_OSS.sliding_layers / count
        one_token = moe.top_k * 3 * GPT_OSS.hidden * moe.d_ff * moe.weight_bits / 8 * GPT_OSS.layers / count
        assert MODELS[place].seconds(batch_of(decodes, context)) > (kv + one_token) / gpu.dram_bytes_per_s


@pytest.mark.parametrize("gpu", ["h100-sxm", "h200-sxm"])
def test_more_gpus_are_faster_but_never_in_proportion(gpu):
    for batch in (batch_of(64, 3000), batch_of(0, 1, 8192)):
        times = [step_time_model(GPT_OSS, load_gpu(gpu), count).seconds(batch) for count in (1, 2, 4, 8)]
        for slower, faster in zip(times, times[1:], strict=False):
            assert slower / 2 < faster < slower


def test_experts_hit_starts_at_top_k_and_saturates():
    tokens = np.arange(0, 5000, dtype=float)
    for skew in (0.0, 0.5, 1.0):
        hit = experts_hit(GPT_OSS, tokens, skew)
        assert hit[0] == 0
        assert hit[1] == pytest.approx(4, rel=0.02)
        assert (np.diff(hit) >= 0).all() and hit[-1] <= 128
    uniform = experts_hit(GPT_OSS, np.array([32.0]), 0.0)
    assert uniform[0] == pytest.approx(128 * (1 - (1 - 1 / 32) ** 32), rel=1e-3)


def test_a_model_without_measurements_gets_a_roofline_that_says_so():
    model = load_model("tiny-moe")
    step_time = step_time_model(model, load_gpu("cpu"), 1)
    assert step_time.passport()["step_time"] == "roofline"
    assert "no measurement" in step_time.passport()["warnings"][0]
    assert step_time.seconds(batch_of(4, 100)) > 0
    dense = model.model_copy(update={"moe": None, "d_ff": 256, "name": "dense"})
    parts = StepTimeModel(dense, load_gpu("h100-sxm"), 1).components(batch_of(4, 100, 32))
    assert parts["moe_gemm"] == 0 and parts["act"] > 0


def test_an_empty_step_takes_no_time_and_heads_must_divide():
    assert MODELS["h100-sxm", 2].seconds(Batch(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)) == 0
    with pytest.raises(InputError, match="cannot be divided among 3 GPUs"):
        step_time_model(GPT_OSS, load_gpu("h100-sxm"), 3)


def test_the_passport_names_calibration_range_and_held_out_error():
    card = MODELS["h100-sxm", 2].passport()
    assert card["simulated"] is True and card["step_time"] == "calibrated"
    assert len(card["calibration_id"]) == 12
    assert card["error"]["held_out_gpu_count"]["tpot_percent"] > 0
    assert any("prefix-cache hits are uncalibrated" in warning for warning in card["warnings"])
    assert any("4 GPUs were not measured" in warning for warning in MODELS["h100-sxm", 4].passport()["warnings"])


def test_asks_outside_the_range_are_said_and_refused_under_strict():
    card = MODELS["h100-sxm", 2].passport()
    assert passport.outside(card, concurrency=32, prompt_tokens=4000, batched_tokens=8192) == []
    found = passport.outside(card, concurrency=300, prompt_tokens=100_000, batched_tokens=2048,
                             cached_tokens=90_000, kv_bits=8)
    assert len(found) == 5
    assert "300 requests running at once lie outside the measured 4 to 64" in found[0]
    with pytest.raises(InputError, match="refused under --strict"):
        passport.outside(card, concurrency=300, strict=True)
