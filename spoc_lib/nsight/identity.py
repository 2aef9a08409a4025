"""Whether a trace is of what a roofline assumes: its GPU, the model's layers and experts, the GPUs that share it.

A time on a GPU that was not there, or for another model, is no bound, so each is held against what the trace itself
shows: the exporter's description of the GPU, the kernels' names, how often a step runs attention, and the groups in
which the collectives run.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

import pandas as pd

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.nsight.categories import compute_type, type_bits
from spoc_lib.nsight.decompose import Decomposition

#: What the names of kernels built for AMD's GPUs hold.
_AMD = re.compile(r"^Cijk_|ck_tile|\bck::|^_ZN2ck|rocprim|hipcub|rocclr|aiter|__hip_|gfx9")
_NVIDIA = re.compile(r"^nvjet|cutlass|^(ampere|hopper|turing|volta)_|sm\d{2,3}_|__nv_")
_AMD_GPU = re.compile(r"(?i)\b(amd|instinct|radeon|mi\d{2,3}\w*)\b")
_CHIP = re.compile(r"[a-z]{0,3}\d{2,4}(?!gb)[a-z]{0,2}")
#: Forms in which one chip is sold with other memory, clocks and links.
_FORMS = ("sxm", "pcie", "nvl", "oam", "mig", "laptop", "super", "ti")
_MEMORY_OFF, _RATE_OFF = 0.08, 0.12
#: The experts are the second argument of vLLM's routing kernel.
_EXPERTS = re.compile(r"topkGating\w*<\s*(?:\(int\))?\d+,\s*(?:\(int\))?(\d+)")
_LAYERS_OFF = 0.1
#: Weights are of other bits where most of the time says so; block scales add up to a quarter of a 4-bit weight.
_MOST, _BITS_OFF = 0.5, 0.3


def require_same(found: Decomposition, model: ModelSpec, gpu: GpuSpec, gpus: int) -> list[str]:
    """What the trace does not tell of this, in sentences. InputError where it shows another GPU or model than given, or
    that the model is not spread over `gpus`."""
    other = [*_other_gpu(found, gpu), *_other_model(found, model), *_other_ranks(found, gpus)]
    if other:
        raise InputError("another-machine", f"{found.path} does not show what was assumed of it: "
                         f"{'; '.join(other)}. Give the model, the GPU and the tensor parallelism of this trace")
    if found.metadata["boards"] or found.simulated:
        return []
    return [f"The trace does not name its GPU, so the roofs are those of {gpu.title} as given."]


def _other_gpu(found: Decomposition, gpu: GpuSpec) -> list[str]:
    called = f"{gpu.name} {gpu.title}"
    amd = bool(_AMD_GPU.search(called))
    foreign = next((name for name in found.kernels.name if (_NVIDIA if amd else _AMD).search(name)), None)
    if foreign:
        return [f"its kernels are those of {'an NVIDIA' if amd else 'an AMD'} GPU ({foreign[:40]}), not of {gpu.title}"]
    own = json.loads(found.metadata["simulated_by"] or "{}").get("gpu") if found.simulated else None
    return [f"it ran on {board['name'] or 'a GPU'} ({', '.join(why)}), not on {gpu.title} ({gpu.name})"
            for board in found.metadata["boards"]
            if (why := _unlike(board, gpu, called if own == gpu.name else board["name"] or ""))]


def _unlike(board: dict, gpu: GpuSpec, name: str) -> list[str]:
    """Where the exporter's GPU and the file's differ: chip and form by their names, memory, bandwidth, SMs, clock."""
    words, own = (re.findall(r"[a-z0-9]+", text.lower()) for text in (name, f"{gpu.name} {gpu.title}"))
    chip = next((word for word in own if _CHIP.fullmatch(word)), None)
    if words and chip and chip not in words:
        return ["another chip"]
    why = []
    form, given = ({f for f in _FORMS if any(re.fullmatch(rf"{f}\d?", word) for word in of)} for of in (words, own))
    if words and (form & {"mig", "laptop"} - given or given and (form - given or given - form - {"sxm", "oam"})):
        why.append("another form")
    memory = board["memory_bytes"] or 2**30 * int((re.findall(r"(\d+)\s?gb", name.lower()) or ["0"])[0])
    for value, unit, there, off in (
            (memory / 2**30, "GiB", gpu.memory_gib, _MEMORY_OFF),
            ((board["dram_bytes_per_s"] or 0) / 1e12, "TB/s", gpu.dram_bytes_per_s / 1e12, _RATE_OFF),
            (board["sm_count"] or 0, "SMs", gpu.sm_count or 0, 0.0),
            ((board["clock_hz"] or 0) / 1e6, "MHz", gpu.sm_clock_mhz, _RATE_OFF)):
        if value and there and abs(value / there - 1) > off:
            why.append(f"{value:.4g} {unit}, not {there:.4g}")
    return why


def _other_model(found: Decomposition, model: ModelSpec) -> list[str]:
    other = []
    for category, what in (("attn", "attention"), ("kv", "KV cache writes")):
        counts = found.steps[f"{category}_kernels"] if len(found.steps) else pd.Series(dtype=float)
        if (counts > 0).any():
            count = int(counts[counts > 0].median())
            each = max(1, round(count / model.layers))
            if abs(count - each * model.layers) > _LAYERS_OFF * each * model.layers:
                other.append(f"a step runs {count} kernels of {what}, and {model.name} has {model.layers} layers "
                             f"(another model, or a pipeline's stage, which the roofline does not know)")
            break
    categories = set(found.kernels.category)
    experts = {int(m.group(1)) for name in found.kernels.name if (m := _EXPERTS.search(name))}
    if model.moe is None and categories & {"moe_gemm", "moe_route"}:
        other.append(f"it runs experts, and {model.name} has none")
    elif model.moe is not None and {"attn", "gemm"} <= categories and not categories & {"moe_gemm", "moe_route"}:
        other.append(f"it runs no experts, and {model.name} has {model.moe.experts}")
    elif model.moe is not None and experts and model.moe.experts not in experts:
        other.append(f"it routes among {max(experts)} experts, and {model.name} has {model.moe.experts}")
    types = shown_types(found)
    if model.moe is not None and types.category == "moe_gemm" and types.share > _MOST and \
            abs(type_bits(types.weights) - model.moe.weight_bits) > _BITS_OFF * model.moe.weight_bits:
        other.append(f"its expert GEMMs' names show {type_bits(types.weights)}-bit weights ({types.label}), and those "
                     f"of {model.name} have {model.moe.weight_bits:g}")
    return other


def _other_ranks(found: Decomposition, gpus: int) -> list[str]:
    """The largest group of collectives is the tensor parallel one, or wider (experts over all GPUs)."""
    groups, count = found.waiting.groups, len(found.totals())
    if groups and count >= gpus:
        sizes = {len(group) for group in groups}
        if gpus not in sizes:
            return [f"its collectives run in groups of {', '.join(map(str, sorted(sizes)))} GPUs, and {gpus} were to "
                    f"share the model (--tp {max(sizes)})"]
    elif gpus > 1 and count >= gpus and found.kernels.category.ne("comm").all():
        return [f"its {count} GPUs run no collectives, so each holds the model for itself, and {gpus} were to share it "
                f"(--tp 1)"]
    return []


@dataclass(frozen=True)
class ShownTypes:
    """What the names of the matmuls tell of their types, whatever they computed. category: moe_gemm, or gemm where no
    expert ran; math, weights: as `compute_type` says, of most of their time; share: of their time, 0 where no name
    tells."""

    category: str
    math: str
    weights: str
    share: float

    @property
    def label(self) -> str:
        """math x weights, `unknown` where no name tells."""
        return f"{self.math}x{self.weights}" if self.share else "unknown"

    @property
    def scheme(self) -> str | None:
        """`W4A16` and the like: bits of the weights, bits of the products."""
        return f"W{type_bits(self.weights)}A{type_bits(self.math)}" if self.share else None

    @property
    def sentence(self) -> str:
        """The evidence in words, without a full stop."""
        who = {"moe_gemm": "expert GEMMs'"}.get(self.category, "dense GEMMs'")
        if not self.share:
            return f"The {who} names do not show their types"
        bits = type_bits(self.weights)
        products = f"{type_bits(self.math)}-bit" if self.math.startswith("a") else self.math.upper()
        words = f"{products} products on {bits}-bit weights"
        part = "" if self.share > 0.995 else f", in {self.share:.0%} of their time"
        return f"The {who} names show {f'{words} ({self.label})' if bits == 4 else f'{self.label} ({words})'}{part}"

    def to_dict(self) -> dict:
        """For JSON."""
        return {"category": self.category, "compute_type": self.label, "scheme": self.scheme, "share": self.share,
                "sentence": f"{self.sentence}."}


def shown_types(decomposition: Decomposition) -> ShownTypes:
    """The types that the matmuls' names tell, by time; a batch is not needed."""
    kernels = decomposition.kernels
    category = "moe_gemm" if (kernels.category == "moe_gemm").any() else "gemm"
    matmuls = kernels[kernels.category == category]
    weight: Counter = Counter()
    for name, ns in zip(matmuls.name, matmuls.total_ns, strict=True):
        if found := compute_type(name):
            weight[found] += int(ns)
    (math, weights), most = weight.most_common(1)[0] if weight else (("", ""), 0)
    return ShownTypes(category, math, weights, most / max(1, int(matmuls.total_ns.sum())))
