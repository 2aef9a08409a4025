"""The prediction passport: what stands behind a simulated number, and sentences for asks that it does not cover."""

from __future__ import annotations

from typing import Any

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.engine.steptime.calibration_file import Calibration

PREFIX_WARNING = (
    "prefix-cache hits are uncalibrated: no measured prompt attended to a cached context, and such a chunk's "
    "attention is extrapolated from uncached prompts, the more so the longer the cached context"
)
ROOFLINE_WARNING = (
    "no measurement stands behind this step time: it is a roofline of datasheet limits and assumed efficiencies, "
    "good for orders of magnitude only"
)


def issue(model: ModelSpec, gpu: GpuSpec, gpu_count: int, calibration: Calibration | None) -> dict:
    """The passport of one step-time model, JSON-serialisable.

    `simulated` (always true), `model`, `gpu`, `gpu_count`, `precisions` (weights and products of each part),
    `attention` (kinds among the layers), `step_time` (calibrated | roofline), `calibration_id`,
    `sources`, `range` (null for a roofline), `error` (held-out mean absolute percentage errors, null for a
    roofline) and `warnings` (sentences; a precision or kind of attention that was never measured comes first).
    """
    passport: dict[str, Any] = {
        "simulated": True, "model": model.name, "gpu": gpu.name, "gpu_count": gpu_count,
        "precisions": [f"{part} {gpu.precision(model, part)}" for part in model.parts],
        "attention": model.attention_kinds,
        "step_time": "calibrated" if calibration else "roofline",
        "calibration_id": calibration.id if calibration else "none",
        "sources": calibration.sources if calibration else [gpu.source, model.source],
        "range": calibration.range.model_dump() if calibration and calibration.range else None,
        "error": calibration.errors.model_dump() if calibration and calibration.errors else None,
    }
    passport["warnings"] = outside(passport) if calibration else [*_unmeasured(passport, {}), ROOFLINE_WARNING]
    if passport["range"] and not passport["range"]["cached_prefix"]:
        passport["warnings"].append(PREFIX_WARNING)
    return passport


def outside(passport: dict, *, concurrency: float | None = None, prompt_tokens: float | None = None,
            context_tokens: float | None = None, batched_tokens: float | None = None,
            cached_tokens: float | None = None, kv_bits: float | None = None, strict: bool = False) -> list[str]:
    """Sentences, one for each respect in which an ask lies outside what was measured; empty when it lies inside.

    concurrency: most requests running at once; prompt_tokens, context_tokens: the longest of a request;
    batched_tokens: max_num_batched_tokens; cached_tokens: the longest prefix found in the cache. What is None is
    not judged; GPU and GPU count always are. With `strict` the first sentence is raised as InputError.
    """
    limits = passport["range"]
    if limits is None:
        found = [f"no serving measurement stands behind the step time of {passport['model']} on {passport['gpu']}",
                 *_unmeasured(passport, {})]
    else:
        found = _outside(passport, limits, concurrency, prompt_tokens, context_tokens, batched_tokens,
                         cached_tokens, kv_bits)
    if strict:
        refuse(found)
    return found


def _unmeasured(passport: dict, limits: dict) -> list[str]:
    """Sentences on precisions and kinds of attention that no measurement covers. Without a calibration that is all
    but 16 bits, whose rates everything is expressed in, and plain attention."""
    measured = limits.get("precisions") if limits else [one for one in passport["precisions"] if " W16A16 " in one]
    found = [f"{one} was not measured{_only(measured, limits)}: its time follows from the stored bits and the "
             f"datasheet's {one.split()[-1].upper()} rate" for one in passport["precisions"]
             if measured is not None and one not in measured]
    kinds = limits.get("attention") if limits else ["softmax", "sliding"]
    return found + [f"{kind} attention was not measured{_only(kinds, limits)}: its time is that of plain attention "
                    "with the model's kv_heads and head_dim" for kind in passport["attention"]
                    if kinds is not None and kind not in kinds]


def _only(measured: list[str] | None, limits: dict) -> str:
    return f" (only {', '.join(measured)})" if measured and limits else ""


def refuse(outside: list[str]) -> None:
    """Raise the first sentence as InputError, if there is one: what `--strict` means."""
    if outside:
        raise InputError("outside-calibration", f"{outside[0]}: refused under --strict")


def _outside(passport: dict, limits: dict, concurrency, prompt_tokens, context_tokens, batched_tokens,
             cached_tokens, kv_bits) -> list[str]:
    found = _unmeasured(passport, limits)
    if passport["gpu"] not in limits["gpus"]:
        found.append(f"GPU {passport['gpu']} was not measured (only {', '.join(limits['gpus'])}): its step time is "
                     f"scaled by the datasheet")
    counts = limits["gpu_counts"]
    if passport["gpu_count"] not in counts:
        between = min(counts) < passport["gpu_count"] < max(counts)
        found.append(f"{passport['gpu_count']} GPUs were not measured (only {', '.join(map(str, counts))}): "
                     f"{'interpolated' if between else 'extrapolated'} by the model's shards")
    for value, key, what in (
        (concurrency, "concurrency", "requests running at once"),
        (prompt_tokens, "prompt_tokens", "prompt tokens"),
        (context_tokens, "context_tokens", "tokens of context"),
        (batched_tokens, "batched_tokens", "max_num_batched_tokens"),
    ):
        low, high = limits[key]
        if value is not None and not low <= value <= high:
            found.append(f"{value:g} {what} lie outside the measured {low:g} to {high:g}")
    if cached_tokens and not limits["cached_prefix"]:
        found.append(f"{cached_tokens:g} tokens came from the prefix cache, and {PREFIX_WARNING}")
    if kv_bits is not None and kv_bits not in limits["kv_bits"]:
        found.append(f"a KV cache of {kv_bits:g} bits was not measured")
    return found
