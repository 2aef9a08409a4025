"""Kernel names to categories: the recorded truth list, and names of every library that such engines launch."""

from __future__ import annotations

import csv
import json

import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.kernelnames import step_kernels
from spoc_lib.nsight import CATEGORIES, classify, decompose, roofline, rule_book
from spoc_lib.nsight.categories import compute_type

KNOWN = {
    "attn": [
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<(int)128>, 8, 3, true>(Flash_fwd_params)",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<(int)96>>(Flash_fwd_params)",
        "kernel_unified_attention_3d",
        "void vllm::paged_attention_v2_kernel<unsigned short, unsigned short, (int)128, (int)16>(float *)",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, (unsigned int)2>(T1)",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<1>>(T1)",
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<(unsigned int)8>(T1 *)",
        "fmhaSm100aKernel_QkvBfloat16OBfloat16H64PagedKvSlidingOrChunkedCausalP32VarSeqQ8Kv128PersistentSwapsAbForGen",
        "void tensorrt_llm::kernels::mmha::masked_multihead_attention_kernel<unsigned short>(T1)",
        "_fwd_grouped_kernel_stage1", "_fwd_kernel_stage2", "_fwd_kernel",
        "void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<T1>(T1)",
        "void flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, float, long, 512>(T1)", "get_mla_metadata_kernel",
        "void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<T1>>(T1::Params)",
        "void vllm::merge_attn_states_kernel<__nv_bfloat16, (unsigned int)128>(T1 *)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256",
        "void deep_gemm::sm90_fp8_paged_mqa_logits<(unsigned int)64>(T1)",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "_selective_scan_update_kernel",
    ],
    "moe_gemm": [
        "_p_matmul_ogs_NNT_bf16xbf16xmxfp4_64x256x128x1_swiglu", "_matmul_ogs_NNT_fp8xbf16xmxfp4_16x256x128x1",
        "void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899907892224l, (int)256>(const int4 *)",
        "fused_moe_kernel_gptq_awq", "batched_triton_kernel",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<"
        "cute::tuple<int, int, int>>, T2>>(T1::Params)",
        "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 128u, 32u, 4u, 128u, 2u, true, "
        "(deep_gemm::GemmType)1>(T1)",
        "bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x8x512u2_s6_et128x8_m128x8x32_cga1x1x1_16dp256b_TN_transOut_"
        "schPd2x1x2x3_biasM_bN_ldgsts_tmaSf_rgTma_clmp_swiGlu_dynBatch_sm100a",
        "void moe_gemm_kernel<T1>(T1)", "fused_moe_kernel_mxfp4",
    ],
    "moe_route": [
        "void vllm::moe::topkGatingSoftmax<(int)4, (int)128, (int)4, (int)16, int>(const float *)",
        "void vllm::moe::grouped_topk_fused_kernel<float, float, int>(T1 *)",
        "void vllm::moe::moe_sum_kernel<c10::BFloat16, (int)4>(T1 *)", "_bitmatrix_metadata_compute_stage1",
        "_sum_bitmatrix_rows", "_ragged_tensor_metadata_compute", "_routing_compute_indx", "_routing_clear_bitmatrix",
        "void moe::dev::routing::routingRenormalize::routingIndicesClusterKernel<T1>(T1)",
        "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<T1>(const T1 *)",
        "void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<T1>(const T1 *)",
        "void tensorrt_llm::kernels::fusedBuildExpertMapsSortFirstTokenKernel<(int)128>(int *)",
        "void vllm::moe::batched_moe_align_block_size_kernel(int, int)", "_fwd_kernel_ep_scatter_1",
        "compute_problem_sizes", "void permute_kernel<T1>(T1)", "void moe_fused_gate_kernel<T1>(void *)",
        "_count_expert_num_tokens", "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(T1)",
    ],
    "gemm": [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(T1::Params)",
        "void machete::device_kernel<T1>(T1)", "void marlin::Marlin<__nv_bfloat16, 4>(const int4 *)",
        "void cutlass::device_kernel<vllm::enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<"
        "cute::tuple<int, int, int, int>, cutlass::gemm::collective::CollectiveMma<T1>>>>(T1::Params)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>(T1)", "_w8a8_triton_block_scaled_mm", "_lora_shrink_kernel",
        "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, (deep_gemm::GemmType)0>(T1)", "triton_tem_fused_mm_3",
        "void dot_kernel<float, (int)128, (int)0, cublasDotParams<T1>>(T1)",
    ],
    "comm": [
        "ncclKernel_AllReduce_RING_LL_Sum_half(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
        "ncclSymkDevKernel_AllReduce_RSxLD_AGxST(ncclSymkDevWorkArgs)",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, (int)4>(vllm::RankData *)",
        "void sglang::cross_device_reduce_1stage<__nv_bfloat16, (int)4>(T1)",
        "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<(int)8, T2>(T1)",
        "void two_shot_all_reduce_kernel<c10::BFloat16>(T1)",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(T1)",
        "void deep_ep::internode_ll::combine<true, false, 7168, 9, 8>(T1)",
        "nvshmem_barrier_on_stream_kernel(int)", "quickreduce::allreduce_prototype_twoshot<T1>(T1)",
    ],
    "norm": [
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, (int)8>(T1 *, T1 *)", "triton_red_fused_add_rsqrt_0",
        "void vllm::rms_norm_kernel<c10::BFloat16>(T1 *)", "triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_7",
        "void flashinfer::norm::FusedAddRMSNormKernel<(unsigned int)8, __nv_bfloat16>(T2 *)",
        "void at::native::<unnamed>::vectorized_layer_norm_kernel<float, float, (bool)0>(int, T2)",
        "void vllm::rms_norm_static_fp8_quant_kernel<c10::BFloat16>(T1)", "_layer_norm_fwd_1pass_kernel",
    ],
    "rope": [
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheEnhancedKernel<(bool)0>(T1 *)",
        "void vllm::batched_rotary_embedding_kernel<c10::Half, (bool)1>(T1)", "_triton_mrope_forward",
        "void tensorrt_llm::kernels::fusedQKNormRopeKernel<(int)128, (bool)1>(void *)",
        "triton_poi_fused_cat_mul_sub_add_split_2", "rope_quantize_fp8_kernel",
    ],
    "kv": [
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(T1)",
        "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>(T1)", "set_mla_kv_buffer_kernel",
        "void flashinfer::AppendPagedKVCacheKernel<(unsigned int)128>(T1)", "_compute_slot_mapping_kernel",
        "void vllm::copy_blocks_kernel<float>(long *)", "void vllm::gather_and_maybe_dequant_cache<T1>(T1)",
        "void vllm::indexer_k_quant_and_cache_kernel<T1>(T1)", "reshape_and_cache_kernel_flash",
    ],
    "act": [
        "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(T1 *)", "_swiglu",
        "triton_poi_fused_mul_silu_1", "silu_and_mul_per_block_quant_kernel",
        "void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<T1>(T1 *)", "swigluoai_and_mul_kernel",
        "void at::native::vectorized_elementwise_kernel<(int)8, at::native::GeluCUDAKernelImpl(T1)>(int, T2)",
    ],
    "sample": [
        "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::ArgMaxOps<T1>>>(T3)",
        "void at::native::<unnamed>::cunn_SoftMaxForward<(int)8, float, float, float, at::native::<unnamed>::"
        "SoftMaxForwardEpilogue>(T4 *, const T2 *, int)",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<(unsigned int)1024>(T1)", "_topk_topp_kernel",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, (int)2, (bool)0>(T1)",
        "void at::native::<unnamed>::distribution_elementwise_grid_stride_kernel<float, (int)4, T3>(long)",
        "rejection_greedy_sample_kernel", "_gumbel_sample_kernel", "apply_token_bitmask_inplace_kernel",
        "void at_cuda_detail::cub::DeviceScanKernel<T1>(T1)", "_temperature_kernel",
        "void vllm::apply_repetition_penalties_kernel<float>(T1)", "_topk_log_softmax_kernel",
    ],
    "mem": ["[CUDA memset]", "[CUDA memcpy Device-to-Device]", "[CUDA memcpy Peer-to-Peer]"],
    "other": ["void at::native::index_elementwise_kernel<(int)128, (int)4, T3>(long, T3)", "triton_poi_fused_4"],
}


def test_the_recorded_truth_list(shared):
    with open(shared("data/nsight/kernel_names.csv"), newline="") as file:
        truth = {row["kernel_name"]: row["category"] for row in csv.DictReader(file)}
    assert classify(truth) == truth


def test_names_of_other_libraries():
    truth = {name: category for category, names in KNOWN.items() for name in names}
    got = classify(truth)
    assert {n: (got[n], truth[n]) for n in truth if got[n] != truth[n]} == {}


def test_a_real_vllm_run_has_no_unknown_kernel_but_nameless_fusions(shared):
    with open(shared("data/nsight/vllm_a100/kernels.csv"), newline="") as file:
        names = [row["kernel_name"] for row in csv.DictReader(file)]
    unknown = [n for n in names if rule_book().match(n) is None]
    assert unknown == ["triton_poi_fused_4", "triton_red_fused_3"]


def test_the_second_recorded_truth_list(shared):
    """`a|b`: either is right."""
    with open(shared("data/nsight/kernel_names_2026.csv"), newline="") as file:
        truth = {row["kernel_name"]: row["category"].split("|") for row in csv.DictReader(file)}
    got = classify(truth)
    assert {n: (got[n], truth[n]) for n in truth if got[n] not in truth[n]} == {}


BF16, FP16, FP8 = 1125899906909960, 1125899906910725, 2814749767172868  # ids of vllm::ScalarType
U4, U4B8, U8B128, FP4, E8M0 = 1125899906843648, 1125899907892224, 1125899923621888, 562949953487106, 2814749767106568


def marlin(*ids: int) -> str:
    return f"void marlin_moe_wna16::Marlin<{', '.join(f'(long){one}' for one in ids)}, (int)128, (int)4>(const int4 *)"


@pytest.mark.parametrize(("name", "types"), [
    ("_p_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x128x1_swiglu", ("bf16", "mxfp4")),
    ("_matmul_ogs_NNT_fp8xbf16xmxfp4_16x256x128x1", ("bf16", "mxfp4")),  # the first is the output's
    ("_matmul_ogs_NNT_bf16xfp8xmxfp4_16x256x128x1", ("fp8", "mxfp4")),
    (marlin(BF16, FP8, BF16, BF16), ("bf16", "fp8")), (marlin(FP16, U4, FP16, FP16), ("fp16", "int4")),
    (marlin(BF16, U8B128, BF16, BF16), ("bf16", "int8")), (marlin(FP8, U4B8, BF16, BF16), ("fp8", "int4")),
    (marlin(BF16, FP4, BF16, E8M0), ("bf16", "mxfp4")), (marlin(BF16, FP4, BF16, FP8), ("bf16", "nvfp4")),
    (f"void marlin_moe_wna16::Marlin<__nv_bfloat16, {U4B8}l, (int)256>(const int4 *)", ("bf16", "int4")),
    (f"void marlin_moe_wna16::Marlin<(long){BF16}, (long)56294995…", None),
    (f"void marlin_moe_wna16::Marlin<(long){BF16}, (long){FP4}, (long)11258…", ("bf16", "fp4")),
    ("void marlin::Marlin<(long)1125899906910725, (long)1>", None), ("void marlin_moe_wna16::MarlinMoE<4>(T)", None),
    ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3", ("mxfp8", "mxfp4")),
    ("bmm_E2m1_E2m1E2m1_Fp32_Ab16_Bb16", ("nvfp4", "nvfp4")), ("bmm_Bfloat16_Bfloat16_Fp32_t128", ("bf16", "bf16")),
    ("bmm_Bfloat16_MxInt4Bfloat16_castBfloat16_Fp32_Ab32", ("bf16", "int4")),
    ("void deep_gemm::sm100_fp8_fp4_mega_moe_impl<128u>", ("fp8", "fp4")),
    ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u>", ("fp8", "fp8")),
    ("void cutlass::device_kernel<G<cutlass::gemm::GroupProblemShape<T>, cutlass::float_e4m3_t, "
     "cute::tuple<cutlass::integer_subbyte<(int)4, (bool)1>, T>>>(P)", ("fp8", "int4")),
    ("void cutlass::device_kernel<G<cute::tuple<cutlass::float_e2m1_t, cutlass::float_ue4m3_t>>>(P)",
     ("nvfp4", "nvfp4")),
    ("void cutlass::device_kernel<G<cute::tuple<cutlass::float_e4m3_t, cutlass::float_ue8m0_t>, "
     "cute::tuple<cutlass::float_e2m1_t, cutlass::float_ue8m0_t>>>(P)", ("mxfp8", "mxfp4")),
    ("void cutlass::device_kernel<G<cutlass::gemm::GroupProblemShape<T>, cutlass::bfloat16_t>>(P)", None),
    ("void cutlass::device_kernel<G<cutlass::float_e4m3_t, …", None),  # the other operand may be of 4 bits
    ("aiter::fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x256", ("fp8", "fp8")),
    ("kernel_cutlass_kernel_moe_W4A16MixedKernel_object_at_", ("a16", "w4")), ("_gemm_a8w8_kernel", ("a8", "w8")),
    ("fused_moe_kernel", None), ("fused_moe_kernel_gptq_awq", None), ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", None),
])
def test_a_type_is_told_where_the_name_holds_it(name, types):
    assert compute_type(name) == types


@pytest.mark.parametrize(("name", "scheme", "said"), [
    (marlin(BF16, FP4, BF16, E8M0), "W4A16", "expert GEMMs' names show BF16 products on 4-bit weights (bf16xmxfp4)."),
    (marlin(BF16, FP8, BF16, BF16), "W8A16", "expert GEMMs' names show bf16xfp8 (BF16 products on 8-bit weights)."),
    ("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128", "W4A8", "names show MXFP8 products on 4-bit weights (mxfp8xmxfp4)."),
    ("fused_moe_kernel", None, "The expert GEMMs' names do not show their types."),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", None, "The dense GEMMs' names do not show their types."),
])
def test_the_evidence_of_the_names_needs_no_batch(new_trace, spoc, name, scheme, said):
    trace = new_trace()
    trace.kernel(name, 0, 1000)
    path = trace.done()
    told = json.loads(spoc("decompose", path, "--json", "-").stdout)["types"]
    assert told["scheme"] == scheme and told["sentence"].endswith(said)
    assert said in spoc("decompose", path).stdout


@pytest.mark.parametrize(("name", "why"), [
    (marlin(BF16, FP8, BF16, BF16), r"names show 8-bit weights \(bf16xfp8\), and those of gpt-oss-120b have 4.25"),
    ("_matmul_ogs_NNT_bf16xbf16xbf16_16x256x128x1", r"names show 16-bit weights \(bf16xbf16\), and those"),
])
def test_another_models_experts_are_held_against_no_roof(new_trace, name, why):
    trace = new_trace()
    trace.kernel(name, 0, 1_000_000)
    batch = Batch(8, 8, 8000, 1024, 0, 0, 0.0, 0.0, 0, 8)
    with pytest.raises(InputError, match=why):
        roofline(decompose(trace.done()), load_model("gpt-oss-120b"), load_gpu("h100-sxm"), batch, steps=1)


def test_a_scheme_that_is_neither_reading_is_said(new_trace):
    trace = new_trace()
    trace.kernel("bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128", 0, 1_000_000)
    batch = Batch(8, 8, 8000, 1024, 0, 0, 0.0, 0.0, 0, 8)
    verdict = roofline(decompose(trace.done()), load_model("gpt-oss-120b"), load_gpu("h100-sxm"), batch, steps=1)
    assert verdict.compute_type == "mxfp8xmxfp4"
    assert any("which is W4A8: neither reading is theirs" in sentence for sentence in verdict.sentences)


def test_a_faulty_rule_file_names_its_field(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text("name: mine\nrules:\n  - {category: act, pattern: '('}\n")
    with pytest.raises(InputError, match=r"rules\.0\.pattern.*not a regular expression"):
        rule_book(path)
    path.write_text("name: mine\nrules:\n  - {category: activation, pattern: x}\n")
    with pytest.raises(InputError, match=r"rules\.0\.category"):
        rule_book(path)


def test_the_command_reads_lists_and_csv(tmp_path, spoc):
    names = tmp_path / "names.txt"
    names.write_text("ncclDevKernel_AllGather_RING_LL(T1)\n\nfused_moe_kernel\n")
    assert json.loads(spoc("classify", names, "--json", "-").stdout) == {
        "ncclDevKernel_AllGather_RING_LL(T1)": "comm", "fused_moe_kernel": "moe_gemm"}
    table = tmp_path / "names.csv"
    table.write_text('count,kernel_name\n3,"void vllm::act_and_mul_kernel<A, B>(T1 *, int)"\n')
    assert json.loads(spoc("classify", table, "--json", "-").stdout) == {
        "void vllm::act_and_mul_kernel<A, B>(T1 *, int)": "act"}
    for content, said in (("", "holds no kernel names"), ("kernel_name,x\n", "holds no kernel names")):
        names.write_text(content)
        done = spoc("classify", names)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert spoc("classify", tmp_path / "absent").returncode == 2
    assert set(classify(["x"]).values()) <= set(CATEGORIES)


@pytest.mark.parametrize("bits, math, dense, experts", [
    (16, None, None, ("bf16", "bf16")), (8, None, ("fp8", "fp8"), ("fp8", "fp8")),
    (8, "bf16", ("bf16", "fp8"), ("bf16", "fp8")), (4, None, ("bf16", "int4"), ("bf16", "mxfp4")),
])
def test_the_simulator_names_its_matmuls_by_the_models_precision(bits, math, dense, experts):
    """16-bit GEMMs of cuBLAS tell no type; 4-bit weights are unpacked to BF16 on Hopper; the router keeps BF16."""
    shipped = load_model("gpt-oss-120b")
    model = shipped.model_copy(update={"dense_weight_bits": bits, "dense_math": math, "moe": shipped.moe.model_copy(
        update={"weight_bits": bits, "math": math})})
    kernels = step_kernels(model, 1, Batch(64, 64, 64_000, 8192, 0, 0, 0.0, 0.0, 0, 64), 0.5)
    names = [k.name for k in kernels]
    assert {compute_type(k.name) for k in kernels if k.category == "moe_gemm"} == {experts}
    assert {compute_type(k.name) for k in kernels if k.category == "gemm"} == {None} | {dense}
    assert all(classify(names)[k.name] == k.category for k in kernels)
