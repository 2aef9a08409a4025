"""The peak follows the weights, the products and the GPU; what was never measured comes first."""

from __future__ import annotations

import pytest

from spoc_lib.config import GpuSpec, ModelSpec, load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.steptime import passport, serving_points
from spoc_lib.engine.steptime.kernels import Shard, expert_seconds, gemm_seconds
from spoc_lib.engine.steptime.model import StepTimeModel, step_time_model
from spoc_lib.engine.steptime.parameters import ROOFLINE

H100 = load_gpu("h100-sxm")
A100 = GpuSpec(
    name="a100",
    title="A100",
    source="datasheet",
    memory_gib=80,
    dram_bytes_per_s=2.039e12,
    bf16_flops_per_s=312e12,
    int8_flops_per_s=624e12,
    link_bytes_per_s=3e11,
)
B200 = GpuSpec(
    name="b200",
    title="B200",
    source="datasheet",
    memory_gib=180,
    dram_bytes_per_s=7.7e12,
    bf16_flops_per_s=2250e12,
    fp8_flops_per_s=4500e12,
    fp4_flops_per_s=9000e12,
    link_bytes_per_s=9e11,
)
GPT_OSS = load_model("gpt-oss-120b")
DENSE = ModelSpec(
    name="dense-70b",
    source="its config",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    d_ff=28672,
    vocabulary=128256,
    max_model_len=131072,
    weight_gib=68,
)


def dense(**fields) -> ModelSpec:
    return DENSE.model_copy(update=fields)


@pytest.mark.parametrize(
    ("gpu", "bits", "stated", "math", "rate"),
    [
        (H100, 16, None, "bf16", 989e12),
        (H100, 8, None, "fp8", 1979e12),
        (H100, 8.03, None, "fp8", 1979e12),
        (H100, 8, "bf16", "bf16", 989e12),  # W8A16 asked for
        (H100, 4.25, None, "bf16", 989e12),  # Hopper has no FP4: W4A16
        (H100, 4.25, "fp8", "fp8", 1979e12),  # W4A8
        (B200, 4.25, None, "fp4", 9000e12),
        (B200, 4.5, "bf16", "bf16", 2250e12),
        (B200, 8, None, "fp8", 4500e12),
        (A100, 8, None, "bf16", 312e12),  # no FP8 there: W8A16
        (A100, 8, "int8", "int8", 624e12),
        (H100, 8, "int8", "bf16", 989e12),  # its file states no INT8 rate
    ],
)
def test_the_peak_of_weights_on_a_gpu(gpu, bits, stated, math, rate):
    assert (gpu.math(bits, stated), gpu.peak(bits, stated)) == (math, rate)


def test_a_large_gemm_takes_the_time_of_its_peak_and_a_small_one_that_of_its_bytes():
    def seconds(model, gpu, tokens, part="dense"):
        return float(gemm_seconds(Shard(model, gpu, 1, ROOFLINE), float(tokens), 8192, 28672, part)) - 3e-6

    large, small = 65536, 1
    assert seconds(dense(dense_weight_bits=8), H100, large) == pytest.approx(
        2 * large * 8192 * 28672 / (0.6 * 1979e12), rel=1e-3
    )
    assert seconds(DENSE, H100, large) / seconds(dense(dense_weight_bits=8), H100, large) == pytest.approx(
        1979 / 989, rel=1e-3
    )
    assert seconds(dense(dense_weight_bits=8, dense_math="bf16"), H100, large) == pytest.approx(
        seconds(DENSE, H100, large), rel=1e-3
    )
    for math in (None, "bf16"):
        assert seconds(dense(dense_weight_bits=4, dense_math=math), H100, small) == pytest.approx(
            seconds(DENSE, H100, small) / 4, rel=1e-2
        )
    quantised = dense(dense_weight_bits=8)
    assert seconds(quantised, H100, large, "head") == seconds(DENSE, H100, large)  # lm_head stays in BF16
    assert seconds(quantised, H100, large, "router") == seconds(DENSE, H100, large)
    own = dense(dense_weight_bits=4, dense_math="bf16", attention_weight_bits=8)
    assert seconds(own, H100, large, "attention") == seconds(quantised, H100, large)


def test_native_fp8_experts_are_not_unpacked():
    moe = GPT_OSS.moe
    fp8, w8a16 = (
        GPT_OSS.model_copy(update={"moe": moe.model_copy(update={"weight_bits": 8, "math": math})})
        for math in (None, "bf16")
    )
    slow = ROOFLINE.model_copy(update={"expert_unpack_tb_per_s": 0.5})
    for model, unpacked in ((fp8, False), (w8a16, True)):
        one, other = (float(expert_seconds(Shard(model, H100, 1, p), 64.0)) for p in (ROOFLINE, slow))
        assert (other > 1.5 * one) is unpacked


def test_gpt_oss_is_w4a16_on_hopper_and_that_was_measured():
    card = step_time_model(GPT_OSS, H100, 2).passport()
    assert card["precisions"] == ["attention W16A16 bf16", "experts W4A16 bf16"]
    assert card["attention"] == ["softmax", "sliding"]
    assert passport.outside(card, concurrency=32) == [] and "prefix-cache hits" in card["warnings"][0]


def test_what_was_never_measured_is_refused_or_comes_first():
    on_b200 = step_time_model(GPT_OSS, B200, 2).passport()
    assert on_b200["warnings"][0].startswith(
        "experts W4A4 fp4 was not measured (only attention W16A16 bf16, experts "
        "W4A16 bf16): its time follows from the stored bits and the datasheet's FP4"
    )
    other = step_time_model(GPT_OSS.model_copy(update={"dense_weight_bits": 8}), H100, 2).passport()
    assert other["warnings"][0].startswith("attention W8A8 fp8 was not measured")
    with pytest.raises(InputError, match="attention W8A8 fp8 was not measured .* refused under --strict"):
        passport.outside(other, concurrency=300, strict=True)
    latent = step_time_model(GPT_OSS.model_copy(update={"attention": "mla"}), H100, 2).passport()
    assert latent["warnings"][0].startswith("mla attention was not measured (only softmax, sliding)")
    roofline = StepTimeModel(dense(dense_weight_bits=8), H100, 2).passport()
    assert [said.split(" was ")[0] for said in roofline["warnings"][:2]] == ["attention W8A8 fp8", "dense W8A8 fp8"]
    assert passport.outside(roofline)[1].startswith("attention W8A8 fp8 was not measured: ")


def test_a_step_of_fp8_is_faster_where_it_computes():
    prompt = Batch(8192, 0, 0, 0, 1, 8192, 8192 * 4096.5, 8192 * 4096.5, 0, 1)
    wide, narrow = (
        StepTimeModel(one, H100, 2).components(prompt)["gemm"] for one in (DENSE, dense(dense_weight_bits=8))
    )
    assert wide / narrow == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("pp_size", "pipeline parallelism"),
        ("moe_ep_size", "expert parallelism"),
        ("attention_dp_size", "data parallelism"),
    ],
)
def test_serving_points_of_a_parallelism_that_is_not_modelled_are_refused(tmp_path, column, words):
    (tmp_path / "p.csv").write_text(
        f"system,isl,osl,tp_size,conc,ttft_ms_mean,tpot_ms,{column}\nh100_sxm,1024,1024,2,4,60,5,2\n"
    )
    with pytest.raises(InputError, match=f"'{column}': {words} is not modelled"):
        serving_points.read_points(tmp_path / "p.csv")


def test_serving_points_of_two_models_are_refused(tmp_path):
    (tmp_path / "p.csv").write_text(
        "model,system,isl,osl,tp_size,conc,ttft_ms_mean,tpot_ms\n"
        "a,h100_sxm,1024,1024,2,4,60,5\nb,h100_sxm,1024,1024,2,4,60,5\n"
    )
    with pytest.raises(InputError, match="points of 2 models"):
        serving_points.read_points(tmp_path / "p.csv")
