"""Time of each kernel category of one step on one GPU of a tensor-parallel group, from shapes and parameters.

Two kinds of kernels. Those whose work depends only on how many tokens the step computes (experts, routing, dense
GEMMs, collectives, small kernels): `token_seconds`, vectorised over token counts. And attention, linear in the sums
that a `Batch` carries: `attention_coefficients`. Sources: measured kernel tables (see the calibration's provenance)
for the shapes of the curves, the roofline (Williams et al. 2009) for what they scale with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from spoc_lib.config import GpuSpec, ModelSpec, MoeShape
from spoc_lib.config.specs import MATH_BITS, Part
from spoc_lib.engine.steptime.parameters import Parameters

#: The GPU that rates limited by the SMs are expressed for: an H100's dense BF16 peak.
REFERENCE_FLOPS = 989e12

#: Token counts at which the number of experts hit is evaluated; beyond the last, all that can be hit are.
HIT_GRID = np.unique(np.round(np.geomspace(1, 2**17, 220)))

#: Expert shards are padded to this many columns by the grouped GEMM.
EXPERT_TILE = 128


@dataclass(frozen=True, slots=True)
class Shard:
    """One GPU's part of the model: heads and expert columns divided, hidden state whole."""

    model: ModelSpec
    gpu: GpuSpec
    gpu_count: int
    parameters: Parameters

    @property
    def heads(self) -> float:
        """Query heads of one GPU."""
        return self.model.heads / self.gpu_count

    @property
    def kv_heads(self) -> float:
        """KV heads are divided until one is left, then copied."""
        return max(1.0, self.model.kv_heads / self.gpu_count)

    @property
    def full_layers(self) -> int:
        """Layers whose attention sees the whole context."""
        return self.model.layers - self.model.sliding_layers

    def peak(self, part: Part) -> float:
        """Tensor-core rate of a part's products, operations a second."""
        return self.gpu.peak(*self.model.weights(part))


def smooth_max(a, b, power: float = 4.0):
    """max(a, b) without its corner: (aᵖ + bᵖ)^(1/p); at most 19 % above the larger at p = 4, 9 % at p = 8."""
    return (a**power + b**power) ** (1 / power)


def gemm_seconds(shard: Shard, tokens: np.ndarray, inputs: float, outputs: float, part: Part = "dense") -> np.ndarray:
    """One dense GEMM, tokens × inputs × outputs: launch + the larger of reading weights and computing."""
    p = shard.parameters
    read = inputs * outputs * shard.model.weights(part)[0] / 8 / (shard.gpu.dram_bytes_per_s * p.gemm_read_efficiency)
    compute = 2 * tokens * inputs * outputs / (shard.peak(part) * p.gemm_compute_efficiency)
    return p.gemm_launch_us * 1e-6 + smooth_max(read, compute)


def _stream(shard: Shard, tokens: np.ndarray, bytes_per_token: float) -> np.ndarray:
    """One small kernel that reads and writes activations."""
    return shard.parameters.small_kernel_us * 1e-6 + tokens * bytes_per_token / stream_rate(shard)


def stream_rate(shard: Shard) -> float:
    """Bytes a second of kernels that only move activations: held up by the SMs, at most DRAM's bandwidth."""
    return _rate(shard, shard.gpu.dram_bytes_per_s, shard.parameters.stream_tb_per_s)


def _rate(shard: Shard, dram_bytes_per_s: float, sm_tb_per_s: float) -> float:
    """Bytes a second under two limits: DRAM's, and the SMs' (given for `REFERENCE_FLOPS`)."""
    own = sm_tb_per_s * 1e12 * shard.gpu.bf16_flops_per_s / REFERENCE_FLOPS
    return 1 / smooth_max(1 / dram_bytes_per_s, 1 / own, 8.0)


def _moe(model: ModelSpec) -> MoeShape:
    """The experts of a model that has them; asking a dense model is the caller's error."""
    if model.moe is None:
        raise ValueError(f"{model.name} is dense: it has no experts")
    return model.moe


def experts_hit(model: ModelSpec, tokens: np.ndarray, skew: float) -> np.ndarray:
    """Expected experts that `tokens` tokens touch, when an expert's popularity falls with its rank r as r^-skew.

    Σ_e 1 − (1 − p_e)ⁿ with Σ p_e = top_k: linear at first, then saturating at all experts, the later the
    greater the skew. Evaluated on a grid of token counts and interpolated: the curve is smooth and concave.
    """
    moe = _moe(model)
    share = np.arange(1, moe.experts + 1, dtype=float) ** -skew
    chosen = np.minimum(moe.top_k * share / share.sum(), 0.999)
    grid = HIT_GRID
    hit = (1 - np.exp(np.outer(grid, np.log1p(-chosen)))).sum(axis=1)
    return np.interp(tokens, np.concatenate([[0.0], grid]), np.concatenate([[0.0], hit]))


def expert_seconds(shard: Shard, tokens: np.ndarray) -> np.ndarray:
    """A layer's expert GEMMs (up, gate, down): stored weights of the experts hit, then compute, not overlapped:
    the measured curves are their sum, since a tile waits for its weights."""
    p, model, moe = shard.parameters, shard.model, _moe(shard.model)
    columns = math.ceil(moe.d_ff / shard.gpu_count / EXPERT_TILE) * EXPERT_TILE
    columns = min(columns, moe.d_ff) if moe.d_ff < EXPERT_TILE else columns
    weights = 3 * model.hidden * columns
    read_rate = shard.gpu.dram_bytes_per_s * p.expert_read_efficiency
    if moe.weight_bits < MATH_BITS[shard.gpu.math(moe.weight_bits, moe.math)]:  # unpacked in registers
        read_rate = _rate(shard, read_rate, p.expert_unpack_tb_per_s)
    hit = experts_hit(model, tokens, p.expert_skew)
    read = hit * weights * moe.weight_bits / 8 / read_rate
    rows_each = tokens * moe.top_k / moe.experts
    padding = hit * p.expert_padding_rows * (1 - np.exp(-((rows_each / p.expert_tile_rows) ** 2)))
    rows = tokens * moe.top_k + padding
    compute = 2 * rows * weights / (shard.peak("experts") * p.expert_compute_efficiency)
    return p.expert_launch_us * 1e-6 + read + compute


def route_seconds(shard: Shard, tokens: np.ndarray) -> np.ndarray:
    """A layer's router GEMM is dense (`gemm`); here: softmax, sort, permute and combine, the same on every GPU."""
    p, model = shard.parameters, shard.model
    moved = p.route_passes * _moe(model).top_k * model.hidden * 2
    return p.route_launch_us * 1e-6 + tokens * moved / stream_rate(shard)


def allreduce_seconds(shard: Shard, message_bytes: np.ndarray) -> np.ndarray:
    """One all-reduce: latency by ranks, then the 2 (n − 1)/n of the message that each GPU sends."""
    p, ranks = shard.parameters, shard.gpu_count
    doublings = math.log2(ranks) - 1
    rate = shard.gpu.link_bytes_per_s * p.allreduce_efficiency * (1 + p.allreduce_efficiency_gain * doublings)
    return ((p.allreduce_latency_us + p.allreduce_rank_us * doublings) * 1e-6
            + message_bytes * 2 * (ranks - 1) / ranks / rate)


def token_seconds(shard: Shard, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of all layers by kernel category, for each entry of `tokens` (float array; 0 tokens cost 0)."""
    model, layers = shard.model, shard.model.layers
    width, kv_width = shard.heads * model.head_dim, shard.kv_heads * model.head_dim
    gemm = (gemm_seconds(shard, tokens, model.hidden, width + 2 * kv_width, "attention")
            + gemm_seconds(shard, tokens, width, model.hidden, "attention"))
    seconds = {
        "norm": 2 * layers * _stream(shard, tokens, 4 * model.hidden * 2),
        "rope": layers * _stream(shard, tokens, 2 * (width + kv_width) * 2),
        "kv": layers * _stream(shard, tokens, 2 * kv_width * (2 + model.kv_bits / 8)),
    }
    if model.moe:
        seconds["moe_gemm"] = layers * expert_seconds(shard, tokens)
        seconds["moe_route"] = layers * route_seconds(shard, tokens)
        gemm = gemm + gemm_seconds(shard, tokens, model.hidden, model.moe.experts, "router")
        act_columns = model.moe.top_k * model.moe.d_ff / shard.gpu_count
    else:
        columns = (model.d_ff or 4 * model.hidden) / shard.gpu_count
        gemm = (gemm + gemm_seconds(shard, tokens, model.hidden, 2 * columns)
                + gemm_seconds(shard, tokens, columns, model.hidden))
        act_columns = columns
    seconds["act"] = layers * _stream(shard, tokens, 3 * act_columns * 2)
    seconds["gemm"] = layers * gemm
    if shard.gpu_count > 1:
        seconds["comm"] = 2 * layers * allreduce_seconds(shard, tokens * model.hidden * 2)
    return {name: np.where(tokens > 0, value, 0.0) for name, value in seconds.items()}


def logits_seconds(shard: Shard, logits: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of the head and the sampler for each number of sampled positions (float array; 0 costs 0)."""
    p, model = shard.parameters, shard.model
    seconds = {
        "gemm": gemm_seconds(shard, logits, model.hidden, model.vocabulary / shard.gpu_count, "head"),
        "sample": p.sample_launch_us * 1e-6 + p.sample_request_us * 1e-6 * logits,
    }
    return {name: np.where(logits > 0, value, 0.0) for name, value in seconds.items()}


def attention_coefficients(shard: Shard) -> dict[str, float]:
    """Seconds of all attention layers per unit of each `Batch` field; `step` counts once a step and `mixed` once
    a step that holds a prompt chunk."""
    p, model, gpu = shard.parameters, shard.model, shard.gpu
    kv_bytes = 2 * shard.kv_heads * model.head_dim * model.kv_bits / 8
    read = kv_bytes / _rate(shard, gpu.dram_bytes_per_s * p.decode_read_efficiency, p.decode_read_tb_per_s)
    pair = 4 * shard.heads * model.head_dim / gpu.bf16_flops_per_s
    return {
        "step": model.layers * p.attention_launch_us * 1e-6,
        "mixed": model.layers * p.attention_prefill_launch_us * 1e-6,
        "decodes": model.layers * (p.decode_request_ns * shard.heads + p.decode_request_fixed_ns) * 1e-9,
        "decode_context": shard.full_layers * read,
        "decode_window": model.sliding_layers * read,
        "prefill_tokens": model.layers * p.prefill_token_ns * shard.heads * 1e-9,
        "prefill_pairs": shard.full_layers * pair / p.prefill_compute_efficiency,
        "prefill_window_pairs": model.sliding_layers * pair / p.window_compute_efficiency,
        "prefill_context": shard.full_layers * read,
    }
