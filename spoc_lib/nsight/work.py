"""Bytes and FLOPs of one engine step by kernel category, on one GPU of a tensor-parallel group.

Least work: every weight, key and value is read once from DRAM and every product computed once; what a kernel moves
beyond that is its inefficiency, which is what the roofline is to show (Williams, Waterman, Patterson 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.engine.batch import Batch

_BF16 = 2.0  # bytes of an activation


@dataclass(frozen=True)
class Hypothesis:
    """What one believes of the expert GEMMs: bits a stored weight, and the rate of their products."""

    name: str
    weight_bits: float
    flops_per_s: float


@dataclass(frozen=True)
class Work:
    """`count` equal launches of one kernel, each with this much work. link_bytes: sent over NVLink by one GPU."""

    category: str
    count: float
    flops: float
    dram_bytes: float
    link_bytes: float = 0.0


def hypotheses(model: ModelSpec, gpu: GpuSpec) -> dict[str, Hypothesis]:
    """w4a16: 4-bit weights unpacked to BF16 in registers, BF16 products; fp4_naive: the products run at FP4 rate too
    (the datasheet's, or 4 x BF16 where the GPU has none, as halving the width twice suggests); bf16: weights not
    quantised at all. For weights that are stored in 16 bits, all three agree in traffic."""
    bits = model.moe.weight_bits if model.moe else model.dense_weight_bits
    bf16 = gpu.bf16_flops_per_s
    return {h.name: h for h in (
        Hypothesis("w4a16", bits, bf16 if bits < 8 else gpu.peak(*model.weights("experts" if model.moe else "dense"))),
        Hypothesis("fp4_naive", bits, (gpu.fp4_flops_per_s or 4 * bf16) if bits < 8 else bf16),
        Hypothesis("bf16", 16.0, bf16))}


def experts_hit(model: ModelSpec, tokens: float) -> float:
    """Experts that at least one of `tokens` tokens chooses, for independent and even choices."""
    if model.moe is None or tokens <= 0:
        return 0.0
    return model.moe.experts * (1 - (1 - model.moe.top_k / model.moe.experts) ** tokens)


def step_work(model: ModelSpec, gpus: int, batch: Batch, hypothesis: Hypothesis) -> list[Work]:
    """The work of one step on one of `gpus` GPUs."""
    return [*_dense(model, gpus, batch), *_experts(model, gpus, batch, hypothesis), *_attention(model, gpus, batch),
            *_small(model, gpus, batch), *_collectives(model, gpus, batch)]


def _matmul(category: str, count: float, tokens: float, inputs: float, outputs: float, bits: float) -> Work:
    return Work(category, count, 2 * tokens * inputs * outputs,
                inputs * outputs * bits / 8 + tokens * (inputs + outputs) * _BF16)


def _kv_heads(model: ModelSpec, gpus: int) -> float:
    return max(1.0, model.kv_heads / gpus)


def _dense(model: ModelSpec, gpus: int, batch: Batch) -> list[Work]:
    t, h, bits, layers = batch.tokens, model.hidden, model.dense_weight_bits, model.layers
    heads = model.heads * model.head_dim / gpus
    works = [_matmul("gemm", layers, t, h, heads + 2 * _kv_heads(model, gpus) * model.head_dim, bits),
             _matmul("gemm", layers, t, heads, h, bits),
             _matmul("gemm", 1, batch.logits, h, model.vocabulary / gpus, bits)]
    if model.moe is not None:
        return [*works, _matmul("gemm", layers, t, h, model.moe.experts, bits)]
    width = (model.d_ff or 4 * h) / gpus
    return [*works, _matmul("gemm", layers, t, h, 2 * width, bits), _matmul("gemm", layers, t, width, h, bits)]


def _experts(model: ModelSpec, gpus: int, batch: Batch, hypothesis: Hypothesis) -> list[Work]:
    if model.moe is None:
        return []
    h, width = model.hidden, model.moe.d_ff / gpus
    rows, hit = batch.tokens * model.moe.top_k, experts_hit(model, batch.tokens)
    weights = hit * h * width * hypothesis.weight_bits / 8
    return [Work("moe_gemm", model.layers, 2 * rows * h * 2 * width, 2 * weights + rows * (h + width) * _BF16),
            Work("moe_gemm", model.layers, 2 * rows * h * width, weights + rows * (h + width) * _BF16)]


def _attention(model: ModelSpec, gpus: int, batch: Batch) -> list[Work]:
    token = 2 * _kv_heads(model, gpus) * model.head_dim * model.kv_bits / 8
    pair = 4 * model.heads / gpus * model.head_dim
    queries = 2 * batch.tokens * model.heads / gpus * model.head_dim * _BF16
    window = model.sliding_window or 0
    full = batch.decode_context + batch.prefill_context + batch.prefill_tokens
    sliding = batch.decode_window + min(batch.prefill_context, batch.prefills * window) + batch.prefill_tokens
    works = [Work("attn", model.layers - model.sliding_layers, pair * (batch.decode_context + batch.prefill_pairs),
                  token * full + queries)]
    if model.sliding_layers:
        works.append(Work("attn", model.sliding_layers, pair * (batch.decode_window + batch.prefill_window_pairs),
                          token * sliding + queries))
    return works


def _small(model: ModelSpec, gpus: int, batch: Batch) -> list[Work]:
    """Kernels that only stream activations: read once, written once."""
    t, h, layers = batch.tokens, model.hidden, model.layers
    heads, kv = model.heads * model.head_dim / gpus, _kv_heads(model, gpus) * model.head_dim
    works = [Work("norm", 2 * layers + 1, 0, 4 * t * h * _BF16),  # input and residual, both ways
             Work("rope", layers, 0, 2 * t * (heads + kv) * _BF16),
             Work("kv", layers, 0, 2 * t * 2 * kv * _BF16),
             Work("sample", 1, 0, batch.logits * model.vocabulary * 4.0)]
    if model.moe is not None:
        works.append(Work("moe_route", layers, 0, t * model.moe.experts * _BF16
                          + t * (model.moe.top_k + 1) * h * _BF16))  # choose, then sum the experts' outputs
        works.append(Work("act", layers, 0, 3 * t * model.moe.top_k * model.moe.d_ff / gpus * _BF16))
    else:
        works.append(Work("act", layers, 0, 3 * t * (model.d_ff or 4 * h) / gpus * _BF16))
    return works


def _collectives(model: ModelSpec, gpus: int, batch: Batch) -> list[Work]:
    """Two all-reduces a layer, each sending 2 (g - 1) / g of the message, and the gathering of logits."""
    if gpus == 1:
        return []
    message = batch.tokens * model.hidden * _BF16
    return [Work("comm", 2 * model.layers, 0, 2 * message, 2 * (gpus - 1) / gpus * message),
            Work("comm", 1, 0, 0, (gpus - 1) / gpus * batch.logits * model.vocabulary * _BF16)]
