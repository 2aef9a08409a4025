"""Kernel names that vLLM and the libraries below it launch, and the category each must have; none of them stands in
the recorded truth list."""

from __future__ import annotations

import pytest

from spoc_lib.nsight import classify

NAMES = {
    "attn": """
        void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128,64,128,4>,false>(Flash_fwd_params)
        void flash::flash_fwd_splitkv_combine_kernel<T>(P)
        void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd
        void flash::prepare_varlen_num_blocks_kernel(int)
        void flash::FlashAttnFwdCombine<T>(P)
        void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>>>>(T)
        kernel_unified_attention_2d
        kernel_unified_attention_3d
        reduce_segments
        void vllm::merge_attn_states_kernel<float, 128>(T)
        merge_attn_states_kernel
        void flashinfer::BatchDecodeWithPagedKVCacheKernel<T>(P)
        void flashinfer::BatchPrefillWithPagedKVCacheKernel<T>(P)
        void flashinfer::PersistentVariableLengthMergeStatesKernel<T>(P)
        fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP32VarSeqQ128Kv128StaticContext
        fmhaSm90Kernel_QkvBfloat16
        void flash_fwd_splitkv_mla_kernel<Traits>(P)
        void sm90::flash_fwd_splitkv_mla_kernel<T>
        void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<T>
        void smxx::flash_fwd_mla_combine_kernel<T>
        get_mla_metadata_kernel
        void vllm::paged_attention_v2_kernel<T>
        void vllm::paged_attention_v2_reduce_kernel<T>
        _fwd_grouped_kernel_stage1
        _fwd_kernel_stage2
        _fwd_kernel
        kernel_paged_attention_2d
        chunked_prefill_paged_decode
        void mha::kernel_mha<T>(P)
        xqa::kernel_mha
        fp8_mqa_logits_kernel
        void deep_gemm::sm90_fp8_paged_mqa_logits<1>(T)
        smxx_paged_mqa_logits_metadata
        _chunk_scan_fwd_kernel
        _chunk_state_fwd_kernel
        _state_passing_fwd_kernel
        _selective_scan_update_kernel
        _causal_conv1d_update_kernel
        _causal_conv1d_fwd_kernel
        fused_recurrent_gated_delta_rule_fwd_kernel
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64
        chunk_fwd_kernel_o
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaGenKernelWarpspecialized<T>>(P)
        void cutlass::device_kernel<cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized<T>>
        void pytorch_flash::flash_fwd_kernel<T>(P)
        fmha_cutlassF_bf16_aligned_64x64_rf_sm80(P)
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128
        _attn_fwd
        void convert_req_index_to_global_index_kernel
        _convert_req_index_to_global_index_kernel
        correct_attn_cp_out_kernel
        void vllm::cutlass_mla::sm100_mla_decode_full
        void cutlass::device_kernel<cutlass::fmha::kernel::FmhaKernelTma>
        trtllm_batch_decode_sparse_mla
        _bmm_chunk_fwd_kernel
        void selective_scan_fwd_kernel<Selective_Scan_fwd_kernel_traits<128, 16>>(SSMParamsBase)
        void causal_conv1d_fwd_kernel<T>(ConvParamsBase)
        fused_sigmoid_gating_delta_rule_update_kernel
        merge_16x16_to_64x64_inverse_kernel
        chunk_local_cumsum_scalar_kernel
        _flash_attn_fwd_kernel
        flash_attn_varlen_kernel
        _paged_attention_kernel_2d
        _triton_mixed_sparse_attn_fwd_kernel
        recompute_w_u_fwd_kernel
        chunk_scaled_dot_kkt_fwd_kernel
    """,
    "moe_gemm": """
        fused_moe_kernel
        fused_moe_kernel_gptq_awq
        _matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu
        _p_matmul_ogs_NNT_bf16xbf16xmxfp4_128x256x64
        void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8, false, 4, 8, false>(T)
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tupl
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 1u, 128u, (deep_gemm::GemmType)1, T>(T)
        void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 8u, 5u, 1u, false, (deep_gemm::GemmType)2>(T)
        void tensorrt_llm::kernels::cutlass_kernels::MoeGemm<T>(P)
        bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x8x256u2_s4_bN_tma_tmaOpt_clmp_swiGlu_dynBatch_sm100f
        bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x8x256_s5_bN_tma_dynBatch_sm100f
        _matmul_NNT_bf16xbf16xmxfp4_32x128x256x1
        expert_triton_kernel
        batched_triton_kernel
        void cutlass::device_kernel<cutlass_moe_mm_sm90::T>
        void moe_wna16_gemm_kernel<T>
        void tensorrt_llm::kernels::fp8_blockscale_gemm::grouped_gemm_kernel<T>
        fused_moe_lora_kernel
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::MoEProblemShape<T>>>
        void deep_gemm::sm100_m_grouped_fp8_gemm_masked_1d1d
        void vllm::moe::moe_wna16_gemm_kernel
        triton_kernel_moe_forward_matmul_ogs
        _matmul_ogs_NTN_bf16xfp8xmxfp4_64x256x128x1
        void cutlass_fused_moe_gemm_kernel
    """,
    "moe_route": """
        void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, 32, int, __nv_bfloat16>(T)
        void vllm::moe::topkGating<8,128,4>
        _topk_forward
        _topk
        _bitmatrix_metadata_memset
        _combined_routing_memset
        _combined_routing_compute
        _routing_compute_indx
        _routing_compute_expt_offs
        _sum_bitmatrix_rows
        _expt_data_memset
        _expt_data_compute
        void vllm::moe::moe_align_block_size_kernel<int>(T)
        void vllm::moe::count_and_sort_expert_tokens_kernel<int>(T)
        void vllm::moe::moe_sum_kernel<c10::BFloat16, 4>(T)
        void vllm::moe::grouped_topk_fused_kernel<T>
        void tensorrt_llm::kernels::cutlass_kernels::finalizeMoeRoutingKernel<T>(P)
        void tensorrt_llm::kernels::threeStepBuildExpertMapsSortFirstTokenKernel
        void tensorrt_llm::kernels::cutlass_kernels::computeStridesTmaWarpSpecializedKernel<T>
        ep_scatter_1
        _fwd_kernel_ep_gather
        _fwd_kernel_ep_scatter_2
        void shuffleInputRowsKernel<T>
        void moe::dev::routing::routingDeepSeek::routingMainKernel<T>(P)
        void moe::dev::finalize::finalizeKernel<T>
        void vllm::moe::moe_lora_align_sum_kernel<T>
        triton_poi_fused_topk_softmax_1
        _reduce_grouped
        _finalize_matmul
        void deep_ep::layout::get_dispatch_layout<512, 32, 2>
        void moe::dev::activation::permuteKernel
        pack_bitmatrix
        _count_expert_num_tokens
        void vllm::moe::topk_with_k2_kernel<T>
        map_logical_to_physical_kernel
        _topk_backward
        void vllm::moe::moeSoftmax<float, 256>
        void vllm::moe::moeTopK<float, 256>
        _compute_expert_offsets
        void get_blockscale_offsets
        void compute_expert_blockscale_offsets<T>
        void routingIndicesHistogramKernel
        routingIndicesOffsetsKernel
        _vllm_bitmatrix_pack_kernel
        apply_expert_map
        void unpermute_kernel
        moe_unpermute_kernel
        _local_expert_count_expert_num_tokens
    """,
    "gemm": """
        nvjet_tst_128x272_64x4_2x1_v_bz_coopA_TNN
        nvjet_hsh_64x8_64x16_2x4_h_bz_splitK_TNT
        void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false, true, fal
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel_
        cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8
        void marlin::Marlin<nv_bfloat16, 4>
        void machete::prepack_B_kernel<T>
        void cutlass::device_kernel<vllm::enable_sm90_only<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int,int,
        void internal::gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16, float>(T)
        void gemvNSP_kernel<float, float, float>
        void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 7168u, 2048u, 1u, 128u, 112u, 128u, 8u, 4u
        _w8a8_block_fp8_matmul
        w8a8_block_fp8_matmul
        tinygemm_kernel
        void tinygemm::kernel<T>
        void awq::gemm_forward_4bit_cuda_m16nXk32
        void vllm::gptq::gemm_half_q_half_gptq_4bit_kernel
        _lora_expand_kernel
        void dsv3_router_gemm_kernel<__nv_bfloat16>
        void router_gemm_kernel_float_output<T>
        void dsv3_fused_a_gemm
        void fused_a_gemm_kernel<T>
        gemm_kernel_persistent
        triton_tem_fused_addmm_2
        _scaled_mm_kernel
        void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm>
        sm80_xmma_gemm_f32f32_tf32f32
        void vllm::awq_dequantize_kernel
        ampere_sgemm_32x128_tn
        void gemmSN_TN_kernel<float, 128>
        void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::g
        nvjet_qqtst_128x128_128x6_2x1_v_bz_TNT
        cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_bf16_bf16_128x128x64
        ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_f2f_stages_64x5_tn
        turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn
        volta_sgemm_64x64_nn
        void gemmk1_kernel<int, float, 256, 5>
        _fp8_gemm_kernel
        void vllm::allspark_qgemm
        _bitblas_gemm
        triton_scaled_mm_kernel
        void marlin::gptq_marlin_repack_kernel<4>
        void marlin_24::Marlin_24<T>
        void wvSplitK_hf_sml_
        void machete::MacheteKernel<T>
        sgmv_expand_kernel
    """,
    "comm": """
        ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)
        ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096>)
        ncclDevKernel_Broadcast_RING_LL
        ncclKernel_AllReduce_RING_LL_Sum_uint8_t(ncclDevComm*)
        ncclSymDevKernel_AllReduce_AGxLLMC_R_Sum_bf16
        void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(T)
        void multimem_all_reduce_kernel<c10::BFloat16>(T)
        multimem_one_shot_all_reduce_kernel
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<T>
        void deep_ep::internode_ll::dispatch<false,false,7168>
        void deep_ep::internode::notify_dispatch<false,2>
        void deep_ep::intranode::combine<__nv_bfloat16, 8, 768>
        void deep_ep::intranode::cached_notify_combine<8>
        void deep_ep::internode_ll::clean_low_latency_buffer<512>
        void nvshmemi_proxy
        nvshmemi_transfer_rma
        void tensorrt_llm::kernels::mnnvl_throughput::moeAlltoAllKernel
        void quickreduce::allreduce_prototype_twoshot<T>
        vllm::quick_all_reduce
        void pplx::dispatchKernel
        pplx::AllToAllIntraNode
        ncclDevKernel_ReduceScatter_Sum_f32_RING_LL
        ncclDevKernel_AlltoAll
        nccl_symmetric_AllGather
        void vllm::cross_device_reduce_2stage<half, 8>
        void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_twoshot_sync<T>
        two_shot_all_reduce_
        void deep_ep::intranode::notify_combine
        nvshmemi_barrier_threadgroup
        mnnvl_moe_alltoallv
        void userbuffers_fp16_sum_inplace_gpu_rr
        multimem_all_gather_kernel
    """,
    "norm": """
        void vllm::rms_norm_kernel<c10::BFloat16, 8, 2>(T)
        void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>
        void vllm::fused_add_rms_norm_static_fp8_quant_kernel<T>
        void vllm::rms_norm_dynamic_per_token_quant_kernel<T>
        void vllm::rms_norm_per_block_quant_kernel<T>
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0
        triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_1
        void flashinfer::norm::RMSNormKernel<8, __nv_bfloat16>
        layer_norm_gated_fwd_kernel
        _layer_norm_fwd_1pass_kernel
        void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>
        void tensorrt_llm::kernels::fusedAddRMSNormKernel<T>
        l2norm_fwd_kernel
        triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_0
        void vllm::poly_norm_kernel<T>
        void vllm::rms_norm_static_fp8_quant_kernel<T>
        void flashinfer::norm::GemmaFusedAddRMSNormKernel
        triton_per_fused_native_layer_norm_2
        _rms_norm_tiled_onepass
        void at::native::RowwiseMomentsCUDAKernel<float>
        void at::native::GroupNormForwardCUDAKernel
    """,
    "rope": """
        void vllm::rotary_embedding_kernel<c10::BFloat16, true>(T)
        void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<T>
        triton_poi_fused_cat_index_mul_split_sub_unsqueeze_3
        triton_poi_fused_add_cat_mul_sub_0
        _triton_mrope_forward
        void vllm::fusedQKNormRopeKernel<c10::BFloat16, 128, true>
        void flashinfer::RopeQuantizeKernel<T>
        triton_poi_fused_rotary_embedding_1
        rotary_kernel
        void vllm::deepseek_scaling_rotary_embedding_kernel
        _triton_rope_forward
        void flashinfer::BatchQKApplyLlama31RotaryKernel
        rope_kernel
        triton_poi_fused_add_cat_index_mul_neg_slice_5
        void fused_rope_kernel
    """,
    "kv": """
        void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, (vllm::Fp8KVCacheDataType)1>
        void vllm::reshape_and_cache_kernel<T>
        void vllm::concat_and_cache_mla_kernel<T>
        void vllm::concat_and_cache_ds_mla_kernel<T>
        reshape_and_cache_kernel_flash
        void vllm::indexer_k_quant_and_cache_kernel<T>
        void vllm::cp_gather_indexer_k_quant_cache_kernel<8>
        void vllm::gather_and_maybe_dequant_cache<T>
        void vllm::cp_gather_cache<T>
        void vllm::swap_blocks_kernel
        _compute_slot_mapping_kernel
        triton_reshape_and_cache_flash
        void flashinfer::AppendPagedKVMlaCacheKernel<T>
        void vllm::concat_and_cache_mla_rope_fused_kernel
        _gather_block_tables_kernel
        void vllm::concat_and_cache_mla_kernel<unsigned char>
        gather_kv_cache_kernel
        void vllm::copy_blocks_mla_kernel
        void vllm::swap_blocks
        cp_gather_and_upconvert_fp8_kv_cache
        store_kvcache_kernel
        void vllm::reshape_and_cache_kernel<half>
    """,
    "act": """
        void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>(T)
        void vllm::act_and_mul_quant_kernel<c10::BFloat16, T>
        void vllm::swigluoai_and_mul_kernel<T>
        silu_and_mul_quant_kernel
        _silu_mul_fp8_quant_deep_gemm
        void vllm::silu_mul_fp8_quant_deep_gemm_kernel<T>
        void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<T>
        void tensorrt_llm::kernels::cutlass_kernels::doGatedActivationKernel<T>
        triton_poi_fused_mul_silu_slice_4
        triton_poi_fused_silu_mul_2
        void vllm::activation_kernel<c10::BFloat16, &vllm::gelu_new_kernel>
        void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel(at::TensorIteratorBase&)>
        void moe::dev::activation::activationDeepSeekKernel<T>
        void at::native::vectorized_elementwise_kernel<4, at::native::sigmoid_kernel_cuda>
        _silu_and_mul_kernel
        _act_mul_and_dynamic_mxfp4_quant_kernel
        triton_poi_fused_gelu_mul_0
        void vllm::act_and_mul_kernel<half, &vllm::gelu_tanh_kernel>
        void vllm::silu_and_mul_nvfp4_quant
        _swiglu_fn
        swiglu_oai_kernel
        triton_poi_fused__to_copy_mul_sigmoid_2
        void flashinfer::activation::act_and_mul_kernel<T,&gelu>
        relu_squared_kernel
        fatrelu_and_mul_kernel
        mul_and_silu_kernel
    """,
    "sample": """
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned in
        void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, T>(T)
        void at::native::(anonymous namespace)::cunn_SoftMaxForwardGmem
        void at::native::(anonymous namespace)::softmax_warp_forward<float,float,float,8,false,false>
        void flashinfer::sampling::TopPSamplingFromProbKernel<T>
        void flashinfer::sampling::TopKTopPSamplingFromProbKernel
        void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<T>
        void at_cuda_detail::cub::DeviceRadixSortHistogramKernel
        void at_cuda_detail::cub::DeviceSegmentedRadixSortKernel<T>
        void at::native::radixSortKVInPlace<T>
        void at::native::bitonicSortKVInPlace
        void at::native::mbtopk::radixFindKthValues
        void at::native::sbtopk::gatherTopK
        void at::native::tensor_kernel_scan_innermost_dim<float, std::plus<float>>
        void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4, at::native::te
        triton_red_fused_argmax_div_exponential_0
        _topk_log_softmax_kernel
        _ranks_kernel
        expand_kernel
        rejection_random_sample_kernel
        sample_recovered_tokens_kernel
        eagle_prepare_next_token_padded_kernel
        _bincount_kernel
        _penalties_kernel
        _min_p_kernel
        apply_token_bitmask_inplace_kernel
        void vllm::apply_repetition_penalties_kernel<float>
        triton_per_fused__softmax_0
        void vllm::topKPerRowDecode<T>
        void flashinfer::sampling::OnlineSoftmaxFusedKernel
        triton_red_fused__log_softmax_0
        void at::native::(anonymous namespace)::sort_postprocess_kernel
        void at::native::mbtopk::computeBlockDigitCounts
        void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem
        void at_cuda_detail::cub::DeviceScanInitKernel
        void at::native::(anonymous namespace)::cunn_LogSoftMaxForward
        triton_red_fused_argmax_0
        greedy_sample_kernel
        void flashinfer::sampling::ChainSpeculativeSampling
        _rejection_sample_kernel
        triton_red_fused_log_softmax_1
        void at::native::tensor_kernel_scan_outer_dim
        void at::native::(anonymous namespace)::fill_reverse_indices_kernel
    """,
    "mem": """
        [CUDA memcpy HtoD]
        [CUDA memcpy DtoH]
        [CUDA memcpy DtoD]
        [CUDA memset]
        [CUDA memcpy Host-to-Device]
        Memcpy HtoD (Pinned -> Device)
        Memset (Device)
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul>>(T)
        void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{
        void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>
        void at::native::(anonymous namespace)::CatArrayBatchedCopy<T>
        triton_poi_fused_clone_0
        triton_poi_fused__to_copy_0
        [CUDA memcpy Device-to-Host]
        [CUDA memcpy Host-to-Device]
        [CUDA memcpy Peer-to-Peer]
        void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<T>
        void at::native::vectorized_elementwise_kernel<8, at::native::FillFunctor<c10::BFloat16>>
        triton_poi_fused_zeros_0
        triton_poi_fused_cat_1
        void at::native::unrolled_elementwise_kernel<at::native::float16_copy_kernel_cuda>
    """,
    "other": """
        void at::native::index_elementwise_kernel<128, 4, T>
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<int>>
        void at::native::(anonymous namespace)::indexSelectLargeIndex
        void at::native::vectorized_gather_kernel<16, long>
        void at::native::_scatter_gather_elementwise_kernel<128,8>
        void vllm::scaled_fp8_quant_kernel_strided
        void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn>
        void per_token_group_quant_8bit_kernel<T>
        _per_token_group_quant_fp8
        void vllm::cvt_fp16_to_fp4<T>
        void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>
        triton_poi_fused_embedding_0
        void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::BinaryFunctor<T>>
        void at::native::(anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>
        _quantize_mxfp8_fn
        void (anonymous namespace)::elementwise_kernel_with_index
        void at::native::index_put_kernel_impl
        _downcast_to_mxfp
        triton_poi_fused_add_0
        _prepare_prefill_inputs_kernel
        _post_update_kernel
        void vllm::advance_step_flashattn_kernel
        void cub::DeviceReduceSingleTileKernel
        void deep_gemm::transpose_and_pack_fp32_into_ue8m0
        void at::native::index_elementwise_kernel<128, 4>
        void vllm::segmented_max_reduction<float>
        void vllm::scaled_fp8_quant_kernel
        triton_per_fused_abs_amax_0
        void vllm::per_token_group_quant_8bit_kernel
        triton_poi_fused_add_mul_3
        void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, at::nat
        void vllm::cvt_fp16_to_fp4
        void vllm::static_scaled_int8_quant_kernel
    """,
}


@pytest.mark.parametrize("category", NAMES)
def test_each_name_has_its_category(category):
    names = [line.strip() for line in NAMES[category].splitlines() if line.strip()]
    assert {name: got for name, got in classify(names).items() if got != category} == {}


def test_the_list_is_long_enough_to_mean_something():
    assert sum(len(text.split("\n")) - 2 for text in NAMES.values()) > 380
