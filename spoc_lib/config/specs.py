"""What a model and a GPU are: shapes and limits, all that step time and memory need."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from spoc_lib.config.shipped import find
from spoc_lib.core import yamlfile
from spoc_lib.core.yamlfile import Positive, PositiveInt, Strict

#: The types of tensor-core products, with the bits of their operands.
Math = Literal["bf16", "fp8", "int8", "fp4"]
MATH_BITS: dict[Math, int] = {"bf16": 16, "fp8": 8, "int8": 8, "fp4": 4}
_MATH = "type of the products; null: what the weights' bits let the GPU do (`GpuSpec.math`)"
Part = Literal["attention", "dense", "experts", "router", "head"]


class MoeShape(Strict):
    """The experts of a mixture-of-experts layer."""

    experts: PositiveInt
    top_k: PositiveInt
    d_ff: PositiveInt
    weight_bits: Positive = Field(description="stored bits a weight, scales included (MXFP4: 4.25)")
    math: Math | None = Field(None, description=_MATH)


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
    attention: Literal["softmax", "mla", "linear"] = Field("softmax", description="kind of its layers' attention")
    dense_weight_bits: Positive = Field(16, description="stored bits a weight, scales included, of the GEMMs outside "
                                        "the experts; router and head keep their own")
    dense_math: Math | None = Field(None, description=_MATH)
    attention_weight_bits: Positive | None = Field(None, description="of the projections; null: as dense")
    attention_math: Math | None = Field(None, description=_MATH)
    head_weight_bits: Positive = Field(16, description="quantised checkpoints leave the head in BF16")
    kv_bits: Positive = 16
    weight_gib: Positive = Field(description="memory that loading takes, all GPUs together")

    def weights(self, part: Part) -> tuple[float, Math | None]:
        """(stored bits a weight, type of the products where the file states it) of one part."""
        if part == "experts" and self.moe is not None:
            return self.moe.weight_bits, self.moe.math
        if part == "router":  # never quantised
            return 16, "bf16"
        if part == "head":
            return self.head_weight_bits, None
        if part == "attention":
            own = self.attention_weight_bits is not None or self.attention_math is not None
            return self.attention_weight_bits or self.dense_weight_bits, self.attention_math if own else self.dense_math
        return self.dense_weight_bits, self.dense_math

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts whose precision a checkpoint chooses."""
        return ("attention", "experts") if self.moe else ("attention", "dense")

    @property
    def attention_kinds(self) -> list[str]:
        """Kinds of attention among its layers."""
        sliding = self.sliding_layers if self.sliding_window else 0
        kinds = [self.attention] if sliding < self.layers else []
        return kinds + (["sliding"] if sliding else [])


class GpuSpec(Strict):
    """A GPU's limits (data/gpus/*.yaml)."""

    name: str
    title: str
    source: str
    memory_gib: Positive
    dram_bytes_per_s: Positive
    bf16_flops_per_s: Positive
    fp8_flops_per_s: Positive | None = None
    int8_flops_per_s: Positive | None = Field(None, description="integer operations a second, dense")
    fp4_flops_per_s: Positive | None = None
    link_bytes_per_s: Positive = Field(description="NVLink, one direction")
    power_w: Positive = 700
    sm_clock_mhz: Positive = 1980
    sm_count: int | None = Field(None, ge=1, description="a trace of a GPU with another number is not held against it")
    price_per_gpu_hour: Positive | None = Field(None, description="in any currency; a cluster's own price wins")

    def math(self, weight_bits: float, stated: Math | None = None) -> Math:
        """The type in which products with weights of these bits run here.

        What is not stated follows the weights: below 8 bits FP4, below 16 FP8. Where the GPU has no such rate, the
        weights are unpacked to BF16 in registers (W4A16, W8A16): BF16 products, traffic of the stored bits.
        """
        wanted: Math = stated or ("bf16" if weight_bits >= 16 else "fp8" if weight_bits >= 8 else "fp4")
        return wanted if getattr(self, f"{wanted}_flops_per_s") else "bf16"

    def peak(self, weight_bits: float, stated: Math | None = None) -> float:
        """Dense tensor-core rate of those products, operations a second."""
        return getattr(self, f"{self.math(weight_bits, stated)}_flops_per_s")

    def precision(self, model: ModelSpec, part: Part) -> str:
        """Bits of weights and of products with their type, such as `W4A16 bf16`."""
        bits, stated = model.weights(part)
        math = self.math(bits, stated)
        return f"W{bits:.0f}A{MATH_BITS[math]} {math}"


def load_model(name_or_path: str) -> ModelSpec:
    """A model's shape by name or path."""
    return yamlfile.load(ModelSpec, find("models", name_or_path, "model"))


def load_gpu(name_or_path: str) -> GpuSpec:
    """A GPU's limits by name or path."""
    return yamlfile.load(GpuSpec, find("gpus", name_or_path, "gpu"))
