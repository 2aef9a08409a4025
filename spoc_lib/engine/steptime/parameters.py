"""The named parameters of the step-time model: what each one means, its unit, and the file that carries them.

A calibration (`data/kernels/<model>.steptime.yaml`) holds one set fitted to measurement; `ROOFLINE` holds plain
assumptions for models and GPUs that nobody measured.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spoc_lib.core.yamlfile import Positive, Strict

NonNegative = Annotated[float, Field(ge=0)]
Efficiency = Annotated[float, Field(gt=0, le=1)]


class Parameters(Strict):
    """Efficiencies are shares of the GPU's datasheet limits; times are per GPU.

    Every parameter is physical, so that one set serves all GPU counts and both GPUs: what changes between them
    (shards, bandwidth, number of ranks) comes from `ModelSpec` and `GpuSpec`, not from a fitted factor.
    """

    # dense GEMMs: QKV, attention output, router, head
    gemm_read_efficiency: Efficiency = Field(description="share of DRAM bandwidth when weights dominate")
    gemm_compute_efficiency: Efficiency = Field(description="share of the products' peak rate when tokens dominate")
    gemm_launch_us: NonNegative = Field(description="least time of one GEMM kernel")
    # experts
    expert_read_efficiency: Efficiency = Field(description="share of DRAM bandwidth reading expert weights")
    expert_unpack_tb_per_s: Positive = Field(
        description="stored expert bytes unpacked to BF16 a second by a GPU of 989 TFLOP/s; scales with its rate")
    expert_compute_efficiency: Efficiency = Field(description="share of the products' peak rate in expert GEMMs")
    expert_launch_us: NonNegative = Field(description="least time of a layer's expert kernels")
    expert_padding_rows: NonNegative = Field(
        description="rows a hit expert's last tile leaves empty, once tiles are large")
    expert_tile_rows: Positive = Field(
        description="rows an expert on average at which the kernel has turned from small to large tiles")
    expert_skew: NonNegative = Field(
        description="exponent of experts' popularity by rank (0: all equally likely)")
    route_launch_us: NonNegative = Field(description="least time of a layer's routing: softmax, sort, gather")
    route_passes: NonNegative = Field(
        description="passes over top_k × hidden BF16 values a token to permute and to combine, not sharded")
    # attention, one layer
    attention_launch_us: NonNegative = Field(description="least time of a decode attention kernel")
    attention_prefill_launch_us: NonNegative = Field(description="added when the step holds a prompt chunk")
    decode_request_ns: NonNegative = Field(description="per decoding request and query head")
    decode_request_fixed_ns: NonNegative = Field(description="per decoding request, whatever the heads")
    decode_read_efficiency: Efficiency = Field(description="share of DRAM bandwidth reading KV in decode")
    decode_read_tb_per_s: Positive = Field(
        description="KV bytes that the SMs of a GPU of 989 TFLOP/s can take in a second, when DRAM allows it")
    prefill_token_ns: NonNegative = Field(description="per prompt token and query head, before any pair")
    prefill_compute_efficiency: Efficiency = Field(description="share of peak BF16 rate over causal pairs")
    window_compute_efficiency: Efficiency = Field(description="the same in sliding layers")
    # collectives: two all-reduces a layer
    allreduce_latency_us: NonNegative = Field(description="one all-reduce of a small message among 2 GPUs")
    allreduce_rank_us: NonNegative = Field(description="added each time the number of ranks doubles")
    allreduce_efficiency: Efficiency = Field(description="share of the link's rate, 2 GPUs, large messages")
    allreduce_efficiency_gain: NonNegative = Field(description="relative gain each time the ranks double")
    # small kernels: norms, rotary embedding, KV write, activation
    small_kernel_us: NonNegative = Field(description="least time of one small kernel")
    stream_tb_per_s: Positive = Field(
        description="activations moved a second by small kernels on a GPU of 989 TFLOP/s, when DRAM allows it")
    # sampling and the host
    sample_launch_us: NonNegative = Field(description="sampler, a step")
    sample_request_us: NonNegative = Field(description="sampler, a sampled token")
    gap_us: NonNegative = Field(description="GPU waits for the host between two steps")
    gap_request_us: NonNegative = Field(description="added a scheduled request")
    gap_prefill_us: NonNegative = Field(description="added when the step holds a prompt chunk (no full CUDA graph)")
    earlier_release_gap_us: NonNegative = Field(
        description="added to every step of vLLM releases before 0.18, and of servers of unstated release")
    # outside the engine's step: HTTP, tokenizer, queues between processes
    frontend_us: NonNegative = Field(description="a request's way to the scheduler and its first token's way back")
    frontend_token_us: NonNegative = Field(description="added a prompt token")
    client_turnaround_us: NonNegative = Field(
        description="a benchmark client's pause between a request's end and its next request")


#: Assumptions for what nobody measured: 80 % of bandwidth, 55 % of peak compute, launch latencies of CUDA graphs.
ROOFLINE = Parameters(
    gemm_read_efficiency=0.8, gemm_compute_efficiency=0.6, gemm_launch_us=3.0,
    expert_read_efficiency=0.9, expert_unpack_tb_per_s=3.0, expert_compute_efficiency=0.5,
    expert_launch_us=25.0, expert_padding_rows=36.0, expert_tile_rows=15.0,
    expert_skew=0.4, route_launch_us=5.0, route_passes=6.0,
    attention_launch_us=10.5, attention_prefill_launch_us=4.0, decode_request_ns=2.9,
    decode_request_fixed_ns=12.0, decode_read_efficiency=0.95, decode_read_tb_per_s=3.7,
    prefill_token_ns=0.28,
    prefill_compute_efficiency=0.56, window_compute_efficiency=0.4,
    allreduce_latency_us=4.5, allreduce_rank_us=0.4, allreduce_efficiency=0.32, allreduce_efficiency_gain=0.19,
    small_kernel_us=2.2, stream_tb_per_s=2.2,
    sample_launch_us=60.0, sample_request_us=0.5, gap_us=200.0, gap_request_us=1.0, gap_prefill_us=500.0,
    earlier_release_gap_us=500.0, frontend_us=4000.0, frontend_token_us=0.5,
    client_turnaround_us=2000.0,
)


def scaled(parameters: Parameters, factors: dict[str, float]) -> Parameters:
    """`parameters` times `factors` by name; a share of a limit stays at most 1."""
    changed = {}
    for name, factor in factors.items():
        value = getattr(parameters, name) * float(factor)
        changed[name] = min(value, 1.0) if name.endswith("_efficiency") else value
    return parameters.model_copy(update=changed)
