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


class Rule(Strict):
    """One rule: a kernel whose name holds `pattern` is of `category`."""

    category: Literal["attn", "moe_gemm", "moe_route", "gemm", "comm", "norm", "rope", "kv", "act", "sample",
                      "mem", "other"]
    pattern: Regex


class PhaseHints(Strict):
    """Names of kernels that only a decode, or only a prefill, launches."""

    decode: Regex
    prefill: Regex


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

    def match(self, name: str) -> str | None:
        """The category of one kernel, or None when no rule knows it."""
        for category, pattern in self._compiled:
            if pattern.search(name):
                return category
        return None

    def classify(self, names: Iterable[str]) -> dict[str, str]:
        """{name: category}; names that no rule knows are `other`."""
        return {name: self.match(name) or "other" for name in names}

    def phase_hint(self, name: str) -> str | None:
        """'decode' or 'prefill' when the kernel's name shows it."""
        hints = self.file.phases
        if hints is None:
            return None
        if re.search(hints.decode, name):
            return "decode"
        return "prefill" if re.search(hints.prefill, name) else None

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


_COMPUTE_TYPE = re.compile(r"(?<![A-Za-z0-9])(bf16|fp16|f16|fp8|e4m3|fp32|tf32)x(bf16|fp16|f16|fp8|e4m3|fp32|tf32)x"
                           r"(mxfp4|mxfp8|nvfp4|bf16|fp16|fp8|int4|int8)", re.IGNORECASE)


def compute_type(name: str) -> tuple[str, str] | None:
    """(math, weights) that a matmul's name shows, e.g. ('bf16', 'mxfp4') of `…_bf16xbf16xmxfp4_…`: weights of
    4 bits, unpacked to BF16 in registers, so the tensor cores do BF16 work (W4A16). None when it shows none."""
    found = _COMPUTE_TYPE.search(name)
    if found:
        return found.group(1).lower(), found.group(3).lower()
    if re.search(r"(?i)marlin_?moe_?wna16", name):
        return "bf16", "int4"
    return None
