"""What a model and a GPU are: shapes and limits, all that step time and memory need."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spoc_lib.config.shipped import find
from spoc_lib.core import yamlfile
from spoc_lib.core.yamlfile import Positive, PositiveInt, Strict


class MoeShape(Strict):
    """The experts of a mixture-of-experts layer."""

    experts: PositiveInt
    top_k: PositiveInt
    d_ff: PositiveInt
    weight_bits: Positive = Field(description="stored bits a weight, scales included (MXFP4: 4.25)")


class ModelSpec(Strict):
    """A transformer's shape (data/models/*.yaml), all that step time and memory need."""

    name: str
    source: str
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    d_ff: PositiveInt | None = Field(None, description="dense feed-forward width; null for a pure MoE")
    moe: MoeShape | None = None
    vocabulary: PositiveInt
    max_model_len: PositiveInt
    sliding_window: PositiveInt | None = None
    sliding_layers: Annotated[int, Field(ge=0)] = 0
    dense_weight_bits: Positive = 16
    kv_bits: Positive = 16
    weight_gib: Positive = Field(description="memory that loading takes, all GPUs together")


class GpuSpec(Strict):
    """A GPU's limits (data/gpus/*.yaml)."""

    name: str
    title: str
    source: str
    memory_gib: Positive
    dram_bytes_per_s: Positive
    bf16_flops_per_s: Positive
    fp8_flops_per_s: Positive | None = None
    fp4_flops_per_s: Positive | None = None
    link_bytes_per_s: Positive = Field(description="NVLink, one direction")
    power_w: Positive = 700
    sm_clock_mhz: Positive = 1980
    sm_count: int | None = Field(None, ge=1, description="a trace of a GPU with another number is not held against it")
    price_per_gpu_hour: Positive | None = Field(None, description="in any currency; a cluster's own price wins")


def load_model(name_or_path: str) -> ModelSpec:
    """A model's shape by name or path."""
    return yamlfile.load(ModelSpec, find("models", name_or_path, "model"))


def load_gpu(name_or_path: str) -> GpuSpec:
    """A GPU's limits by name or path."""
    return yamlfile.load(GpuSpec, find("gpus", name_or_path, "gpu"))
