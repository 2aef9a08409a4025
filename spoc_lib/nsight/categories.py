"""Kernel names to categories by the rules of data/kernels/*.yaml: first match wins, nothing is dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator

from spoc_lib import config
from spoc_lib.core import yamlfile
from spoc_lib.core.yamlfile import Strict

#: The categories in the order in which they claim an instant when kernels overlap: the one furthest left wins.
#: Compute hides communication and communication hides copies, so `comm` and `mem` stand last and what they keep
#: is exposed. The order within compute only decides rare overlaps between compute kernels.
CATEGORIES: tuple[str, ...] = (
    "attn", "moe_gemm", "gemm", "moe_route", "norm", "rope", "kv", "act", "sample", "other", "comm", "mem",
)
INDEX = {category: index for index, category in enumerate(CATEGORIES)}
COMM = INDEX["comm"]

#: How a report calls them.
TITLES = {
    "attn": "attention", "moe_gemm": "MoE expert GEMM", "moe_route": "MoE routing", "gemm": "dense GEMM",
    "comm": "collectives", "norm": "normalisation", "rope": "rotary embedding", "kv": "KV cache writes",
    "act": "activation", "sample": "sampling", "mem": "copies and fills", "other": "other kernels",
    "copy": "copies from and to the host", "idle": "idle",
}


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Regex = Annotated[str, AfterValidator(_regex)]


#: A regular expression that matches nothing.
NEVER = r"(?!)"


class Rule(Strict):
    """One rule: a kernel whose name holds `pattern` is of `category`."""

    category: Literal["attn", "moe_gemm", "moe_route", "gemm", "comm", "norm", "rope", "kv", "act", "sample",
                      "mem", "other"]
    pattern: Regex


class PhaseHints(Strict):
    """What an attention kernel's name tells of its step. decode_step: launched only where all sequences decode; decode
    and prefill: run that part of a step; either: run prompts, or both. Other names tell nothing."""

    decode_step: Regex = NEVER
    decode: Regex
    prefill: Regex
    either: Regex = NEVER


class RuleFile(Strict):
    """A file of rules (data/kernels/*.yaml). `phases` and `step_end` read steps out of traces without NVTX."""

    name: str
    rules: list[Rule]
    phases: PhaseHints | None = None
    step_end: Regex | None = None


@dataclass(frozen=True)
class RuleBook:
    """Compiled rules."""

    file: RuleFile

    @cached_property
    def _compiled(self) -> list[tuple[str, re.Pattern[str]]]:
        return [(rule.category, re.compile(rule.pattern)) for rule in self.file.rules]

    @cached_property
    def _matched(self) -> dict[str, str | None]:
        return {}

    def match(self, name: str) -> str | None:
        """The category of one kernel, or None when no rule knows it. Each name is looked up once."""
        if name not in self._matched:
            self._matched[name] = next((category for category, pattern in self._compiled if pattern.search(name)), None)
        return self._matched[name]

    def classify(self, names: Iterable[str]) -> dict[str, str]:
        """{name: category}; names that no rule knows are `other`."""
        return {name: self.match(name) or "other" for name in names}

    def phase_hints(self, name: str) -> set[str]:
        """The fields of PhaseHints that an attention kernel of this name matches."""
        hints = self.file.phases
        return {field for field, pattern in hints if re.search(pattern, name)} if hints else set()

    def ends_step(self, name: str) -> bool:
        """Whether a kernel of this name ends an engine step."""
        return self.file.step_end is not None and re.search(self.file.step_end, name) is not None


@lru_cache(maxsize=8)
def _shipped(path: Path) -> RuleFile:
    return yamlfile.load(RuleFile, path)


def rule_book(extra: str | Path | None = None) -> RuleBook:
    """The shipped rules; those of the file `extra`, if given, are tried first. InputError for a faulty file."""
    shipped = _shipped(config.find("kernels", "vllm", "rule file"))
    if extra is None:
        return RuleBook(shipped)
    own = yamlfile.load(RuleFile, extra)
    return RuleBook(shipped.model_copy(update={
        "name": f"{own.name}+{shipped.name}", "rules": own.rules + shipped.rules,
        "phases": own.phases or shipped.phases, "step_end": own.step_end or shipped.step_end,
    }))


def classify(names: Iterable[str], rules: RuleBook | None = None) -> dict[str, str]:
    """{kernel name: category} by the shipped rules; names that no rule knows are `other`."""
    return (rules or rule_book()).classify(names)


#: Triton's matmuls of experts name output x input x weights.
_TRITON = re.compile(r"matmul\w*?_(?:bf16|fp16|fp8|fp32|mxfp4|mxfp8)x(bf16|fp16|fp8|fp32|mxfp4|mxfp8)x"
                     r"(mxfp4|mxfp8|nvfp4|bf16|fp16|fp8|fp32|int4|int8)(?![a-z0-9])")
#: TensorRT-LLM's generated ones name output, then both operands (once where they are equal).
_TRTLLM = re.compile(r"^(?:bmm|gemm)_[A-Za-z0-9]+_((?:MxE2m1|MxE4m3|MxInt4|E2m1|E4m3|Bfloat16|Fp16)+)_")
_TRTLLM_TYPES = {"MxE2m1": "mxfp4", "MxE4m3": "mxfp8", "MxInt4": "int4", "E2m1": "nvfp4", "E4m3": "fp8",
                 "Bfloat16": "bf16", "Fp16": "fp16"}
_MARLIN = re.compile(r"Marlin<([^>]*)")
_FMOE = re.compile(r"fmoe\w*?_(?:pertoken|blockscale)(MXfp4|Fp8)", re.IGNORECASE)
_KIND = r"(?:mx|nv)?(?:fp|bf|int)?(\d+)"
_SPELT = re.compile(rf"(?<![A-Za-z0-9])(?:w{_KIND}_?a{_KIND}|a{_KIND}_?w{_KIND})(?![a-z0-9])|W(\d+)A(\d+)")
_DEEP_GEMM = re.compile(r"deep_gemm::\w*?(fp8_fp4|fp8|bf16)_(?:\w*gemm|mega_moe)")
_C_TYPES = {"__nv_bfloat16": "bf16", "nv_bfloat16": "bf16", "__half": "fp16", "half": "fp16"}


def compute_type(name: str) -> tuple[str, str] | None:
    """(math, weights) that a matmul's name tells: the type in which the tensor cores multiply, and the one in which the
    weights are stored; ('bf16', 'mxfp4') of `…_bf16xbf16xmxfp4_…` is W4A16, for 4-bit weights are unpacked to BF16 in
    registers. `a16`, `w4` and so on where the name holds only the bits. None when it does not tell both.
    """
    if found := _TRITON.search(name):
        return found.group(1), found.group(2)
    if found := _TRTLLM.match(name):
        both = sorted((_TRTLLM_TYPES[t] for t in re.findall("|".join(_TRTLLM_TYPES), found.group(1))), key=type_bits)
        return both[-1], both[0]
    if found := _MARLIN.search(name):
        return _marlin(found.group(1))
    if found := _DEEP_GEMM.search(name):
        math, _, weights = found.group(1).partition("_")
        return math, weights or math
    if found := _FMOE.search(name):
        return found.group(1).lower(), found.group(1).lower()
    if "cutlass" in name and not name.endswith(("…", "...")) and (types := _cutlass(name)):
        return types
    if found := _SPELT.search(name):
        first, second, third, fourth, *_ = found.groups()
        weights, math = (first, second) if first else (fourth, third) if third else found.groups()[4:]
        return f"a{math}", f"w{weights}"
    return None


def type_bits(kind: str) -> int:
    """Bits of a type that `compute_type` names."""
    return int(re.findall(r"\d+", kind)[-1])


def _marlin(arguments: str) -> tuple[str, str] | None:
    """vLLM's Marlin: the type of the activations, in C++ or as a ScalarType id, then the ids of the weights', of the
    output's where the first is an id, and of the scales', which tells MXFP4 from NVFP4."""
    first, *rest = (re.sub(r"\(\w+\)", "", part).strip().rstrip("lLuU") for part in arguments.split(","))
    math, kinds = _C_TYPES.get(first), [_scalar_type(part) for part in rest[:3]]
    scales = kinds[1:2] if math else kinds[2:3]
    math = math or _scalar_type(first)
    weights = kinds[0] if kinds else None
    if weights == "fp4" and scales:
        weights = {"e8m0": "mxfp4", "fp8": "nvfp4"}.get(scales[0] or "", weights)
    return (math, weights) if math and weights else None


def _scalar_type(text: str) -> str | None:
    """The type behind an id of vllm::ScalarType (csrc/core/scalar_type.hpp), from its low bits: 8 of the exponent, 8 of
    the mantissa, 1 sign, 32 of a bias, 1 finite values only, 8 of how it writes NaN."""
    if not text.isdigit() or (number := int(text)) >> 58:
        return None
    exponent, mantissa, sign = number & 0xFF, number >> 8 & 0xFF, number >> 16 & 1
    if not exponent:
        return f"int{mantissa + sign}" if mantissa + sign in (2, 3, 4, 8) else None
    return {(8, 7, 1): "bf16", (5, 10, 1): "fp16", (4, 3, 1): "fp8", (5, 2, 1): "fp8", (2, 1, 1): "fp4",
            (8, 0, 0): "e8m0"}.get((exponent, mantissa, sign))


def _cutlass(name: str) -> tuple[str, str] | None:
    """CUTLASS: operands by their element types; the type of a block's scale tells NVFP4 from MXFP4. 16-bit operands
    are not told from a 16-bit output."""
    eight = "float_e4m3" in name or "float_e5m2" in name or "mx_float8" in name
    if "e2m1" in name or "float4_t" in name:
        if "nv_float4" in name or "ue4m3" in name:
            return "nvfp4", "nvfp4"
        return ("mxfp8", "mxfp4") if eight else ("mxfp4", "mxfp4") if "ue8m0" in name or "mx_float4" in name else None
    if re.search(r"u?int4b?_t|integer_subbyte(<(\(int\))?4|ILi4E)", name):
        sixteen = "bf16" if "bfloat16" in name.lower() else "fp16" if "half_t" in name else None
        return ("fp8", "int4") if eight else (sixteen, "int4") if sixteen else None
    return ("fp8", "fp8") if eight else None
