"""Whether a trace is of what a roofline assumes: its GPU, the model's layers and experts, the GPUs that share it.

A time on a GPU that was not there, or for another model, is no bound, so each is held against what the trace itself
shows: the exporter's description of the GPU, the kernels' names, how often a step runs attention, and the groups in
which the collectives run.
"""

from __future__ import annotations

import json
import re

import pandas as pd

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
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
