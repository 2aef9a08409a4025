"""How many KV blocks fit beside the weights: what vLLM's start-up profiling would find, from shapes.

Per GPU: utilisation × memory - weights / TP - overhead, divided by the bytes of a block. A block holds `block_size`
tokens of one *group* of layers: vLLM puts layers of one kind (full, or one sliding window) into groups of equal size,
and all groups draw on one pool, so a token of a model with 18 full and 18 sliding layers takes one block-slot a group.
"""

from __future__ import annotations

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.engine.flags import KV_BITS, EngineFlags

GIB = 2**30
#: CUDA context, NCCL buffers, CUDA graphs and allocator slack of one GPU. An assumption: real servers log
#: 1.5 to 3 GiB, by driver and capture sizes.
FIXED_OVERHEAD_GIB = 2.0
#: Live BF16 activations of a step, in units of hidden size a token, during start-up profiling (residual stream,
#: attention projections, expert inputs and outputs). An assumption.
ACTIVATION_WIDTHS = 24


def layer_groups(model: ModelSpec) -> tuple[list[int], int]:
    """(window of each KV group, 0 = full; layers a group), as vLLM groups layers of unequal kinds.

    Alternating models begin with a sliding layer (gpt-oss, Gemma), and groups stand in the order of their first
    layer, so the sliding groups come first.
    """
    sliding = min(model.sliding_layers, model.layers) if model.sliding_window else 0
    full = model.layers - sliding
    kinds = [(model.sliding_window or 0, sliding), (0, full)]
    kinds = [(window, layers) for window, layers in kinds if layers]
    fewest, most = min(layers for _, layers in kinds), max(layers for _, layers in kinds)
    size = most if most < 1.5 * fewest else fewest
    return [window for window, layers in kinds for _ in range(-(-layers // size))], size


def kv_windows(model: ModelSpec) -> list[int]:
    """Sliding window of each KV group in order, 0 = full attention."""
    return layer_groups(model)[0]


def kv_bits(flags: EngineFlags, model: ModelSpec) -> float:
    """Stored bits of a key or value under `kv_cache_dtype`."""
    return KV_BITS[flags.kv_cache_dtype] or model.kv_bits


def block_bytes(flags: EngineFlags, model: ModelSpec, gpu_count: int) -> int:
    """Bytes that one block takes on one GPU: K and V of `block_size` tokens in one group's layers."""
    heads = max(1, model.kv_heads // gpu_count)
    values = 2 * heads * model.head_dim * flags.block_size * layer_groups(model)[1]
    return int(values * kv_bits(flags, model) / 8)


def overhead_bytes(flags: EngineFlags, model: ModelSpec) -> int:
    """What a GPU holds beside weights and KV: the fixed part, a step's activations, the logits of all sequences."""
    activations = flags.max_num_batched_tokens * model.hidden * 2 * ACTIVATION_WIDTHS
    logits = flags.max_num_seqs * model.vocabulary * 4
    return int(FIXED_OVERHEAD_GIB * GIB) + activations + logits


def num_kv_blocks(flags: EngineFlags, model: ModelSpec, gpu: GpuSpec, gpu_count: int) -> int:
    """Blocks in the pool of one replica on `gpu_count` GPUs under tensor parallelism (the null block included).

    `num_gpu_blocks_override` wins. InputError when the weights do not fit or the rest cannot hold one request of
    max_model_len, as the real server refuses to start.
    """
    if flags.num_gpu_blocks_override:
        return flags.num_gpu_blocks_override
    usable = flags.gpu_memory_utilization * gpu.memory_gib * GIB
    weights = model.weight_gib * GIB / gpu_count
    room = usable - weights - overhead_bytes(flags, model)
    where = f"{model.name} on {gpu_count} x {gpu.name}"
    if room <= 0:
        raise InputError("model-does-not-fit", f"{where}: weights and overhead take more than "
                         f"gpu_memory_utilization {flags.gpu_memory_utilization:g} of a GPU leaves; raise it, use "
                         "more GPUs or lower max_num_batched_tokens")
    blocks = int(room // block_bytes(flags, model, gpu_count))
    needed = blocks_of_longest_request(flags, model)
    if blocks - 1 < needed:
        raise InputError("context-does-not-fit", f"{where}: the KV cache has {blocks} blocks, one request of "
                         f"max_model_len needs {needed}; lower max_model_len or raise gpu_memory_utilization")
    return blocks


def blocks_of_longest_request(flags: EngineFlags, model: ModelSpec) -> int:
    """Blocks that one request of max_model_len holds at most."""
    longest = flags.max_model_len or model.max_model_len
    in_flight = flags.max_num_batched_tokens * (2 if flags.async_scheduling else 1)
    total = 0
    for window in kv_windows(model):
        tokens = min(window - 1 + in_flight, longest) if window else longest
        total += -(-tokens // flags.block_size) + (1 if window else 0)
    return total
