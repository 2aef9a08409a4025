"""The kernels of one engine step, in launch order, under the names that vLLM's traces show on Hopper."""

from __future__ import annotations

from typing import NamedTuple

from spoc_lib.config import ModelSpec
from spoc_lib.engine.batch import Batch


class Kernel(NamedTuple):
    """A kernel's demangled name, its category, and its weight within the category's time of the step."""

    name: str
    category: str
    weight: float = 1.0


def _flash(block_m: int, block_n: int) -> str:
    return (f"void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
            f"flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1>>, "
            f"cute::tuple<cute::C<{block_m}>, cute::C<{block_n}>, cute::C<64>>, 64, cutlass::bfloat16_t, float, "
            f"cutlass::arch::Sm90, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, cutlass::bfloat16_t, 1>, "
            f"flash::VarlenDynamicPersistentTileScheduler<{block_m}, {block_n}, 256, 128, 0, 1, 1, 1, 1, 1>>>>"
            f"(T1::Params)")


_NORM = "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_{}"
_ROPE = ("void vllm::rotary_embedding_kernel<c10::BFloat16, (bool)1>(const long *, T1 *, T1 *, const T1 *, int, long, "
         "long, long, int, int, int)")
_KV = ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>"
       "(const T1 *, const T1 *, T2 *, T2 *, const long *, long, long, long, int, int, int, const float *, "
       "const float *)")
_ACT = "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, (bool)1>(T1 *, const T1 *, int)"
_SPLIT_K = ("void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, __nv_bfloat16, float, __nv_bfloat16, "
            "(bool)0>(cublasLt::cublasSplitKParams<T1>)")
_SCALED = ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
           "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<4>, {0}, {0}>>>"
           "(T1::Params)").replace("{0}", "cutlass::{0}")
_MARLIN = "void marlin::Marlin<__nv_bfloat16, {0}l, (int)256, (int)4, (int)16, (int)4, (bool)0>(const int4 *)"
_INT4_ID, _FP8_ID = 1125899907892224, 2814749767172868  # of vllm::ScalarType: uint4b8, float8_e4m3fn
_GREEDY = ("void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, "
           "at::native::ArgMaxOps<float>, unsigned int, long, (int)4, (int)4>>(T3)")
_RANDOM = ("void at::native::<unnamed>::distribution_elementwise_grid_stride_kernel<float, (int)4, "
           "exponential_kernel>(long, at::PhiloxCudaState, T3, T4)")


def step_kernels(model: ModelSpec, gpus: int, batch: Batch, full_share: float) -> list[Kernel]:
    """All kernels of a step on one GPU. full_share: attention time of a full layer over full + sliding."""
    small = batch.tokens <= 64
    kernels = [Kernel("void flash::prepare_varlen_num_blocks_kernel<(int)1, (bool)1>(int)", "attn", 0.01)]
    for layer in range(model.layers):
        kernels += _attention_block(model, gpus, batch, small, _attention_weight(model, layer, full_share))
        kernels += _feed_forward(model, gpus, batch, small)
    return kernels + _output(model, gpus, batch)


def _attention_weight(model: ModelSpec, layer: int, full_share: float) -> float:
    """Sliding layers stand evenly among the full ones; gpt-oss begins with one."""
    if not model.sliding_layers:
        return 1.0
    before = layer * model.sliding_layers // model.layers
    sliding = (layer + 1) * model.sliding_layers // model.layers > before
    return max(1 - full_share, 0.02) if sliding else max(full_share, 0.02)


def _gemm(small: bool, weight: float, precision: tuple[float, str | None] = (16, None)) -> list[Kernel]:
    """precision: (stored bits a weight, type of the products where the model states it) as `ModelSpec.weights`."""
    bits, math = precision
    if bits < 16 and math in (None, "fp8", "int8") and bits >= 8:
        return [Kernel(_SCALED.format("int8_t" if math == "int8" else "float_e4m3_t"), "gemm", weight)]
    if bits < 16:
        return [Kernel(_MARLIN.format(_FP8_ID if bits >= 8 else _INT4_ID), "gemm", weight)]
    if small:
        return [Kernel("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_bias_TNT", "gemm", weight * 0.85),
                Kernel(_SPLIT_K, "gemm", weight * 0.15)]
    return [Kernel("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "gemm", weight)]


def _attention_block(model: ModelSpec, gpus: int, batch: Batch, small: bool, weight: float) -> list[Kernel]:
    heads = model.heads * model.head_dim
    inputs = model.hidden * (heads + 2 * model.kv_heads * model.head_dim)
    flash = _flash(192, 128) if batch.prefills else _flash(64, 128)
    kernels = [Kernel(_NORM.format(0), "norm"), *_gemm(small, inputs, model.weights("attention")),
               Kernel(_ROPE, "rope"), Kernel(_KV, "kv"),
               Kernel(flash, "attn", weight)]
    if not batch.prefills:
        kernels.append(Kernel("void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, "
                              "cute::C<64>>, 5, 256, 1, 1, cutlass::bfloat16_t, float, cutlass::arch::Sm90>>"
                              "(T1::Params)", "attn", weight * 0.08))
    return [*kernels, *_gemm(small, model.hidden * heads, model.weights("attention")), *_all_reduce(model, gpus, batch)]


def _feed_forward(model: ModelSpec, gpus: int, batch: Batch, small: bool) -> list[Kernel]:
    kernels = [Kernel(_NORM.format(2), "norm")]
    if model.moe is None:
        width = model.hidden * (model.d_ff or 4 * model.hidden)
        own = model.weights("dense")
        kernels += [*_gemm(small, 2 * width, own), Kernel(_ACT, "act"), *_gemm(small, width, own)]
    else:
        rows = batch.tokens * model.moe.top_k / model.moe.experts  # tokens an expert
        tile = "16x256" if rows <= 16 else "64x256" if rows <= 64 else "128x256"
        prefix = "_matmul_ogs" if rows <= 64 else "_p_matmul_ogs"
        bits, math = model.weights("experts")
        weights = "mxfp4" if bits < 8 else "fp8" if bits < 16 else "bf16"
        inputs = "fp8" if math == "fp8" or math is None and weights == "fp8" else "bf16"
        matmul = f"{prefix}_NNT_bf16x{inputs}x{weights}_{tile}x128x1"
        kernels += [Kernel("nvjet_tst_32x64_64x16_4x1_v_bz_bias_TNN", "gemm", model.hidden * model.moe.experts),
                    Kernel("_topk_forward", "moe_route", 2), Kernel("_combined_routing_memset", "moe_route"),
                    Kernel("_combined_routing_compute", "moe_route", 2),
                    Kernel(f"{matmul}_swiglu", "moe_gemm", 2), Kernel(_ACT, "act"), Kernel(matmul, "moe_gemm", 1),
                    Kernel("_reduce_grouped", "moe_route", 2)]
    return [*kernels, *_all_reduce(model, gpus, batch)]


def _all_reduce(model: ModelSpec, gpus: int, batch: Batch) -> list[Kernel]:
    """vLLM's own all-reduce for small messages (one stage where every GPU can write to all), NCCL for large ones."""
    if gpus == 1:
        return []
    size = batch.tokens * model.hidden * 2
    if size <= 8 << 20:
        stage = "1stage" if gpus == 2 or size <= 512 << 10 else "2stage"
        name = (f"void vllm::cross_device_reduce_{stage}<__nv_bfloat16, (int){gpus}>(vllm::RankData *, "
                f"vllm::RankSignals, vllm::Signal *, T1 *, int, int)")
    else:
        name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
    return [Kernel(name, "comm")]


def _output(model: ModelSpec, gpus: int, batch: Batch) -> list[Kernel]:
    kernels = [Kernel(_NORM.format(4), "norm")]
    if not batch.logits:
        return kernels
    kernels.append(Kernel("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm", model.hidden * model.vocabulary))
    if gpus > 1:
        kernels.append(Kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)", "comm"))
    return [*kernels, Kernel(_RANDOM, "sample", 1), Kernel(_GREEDY, "sample", 1)]
