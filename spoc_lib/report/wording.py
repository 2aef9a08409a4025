"""Words of the sentences under the figures: amounts with their units, counts, lists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spoc_lib.report.tables import cell, column
from spoc_lib.report.verdict import time_text

#: A change by less than this share of a value is none: percentiles of one sample of users scatter by as much.
STILL = 0.05


def amount(name: str, value: float) -> str:
    """A value of column `name` with its unit: `1,241 tokens/s`, `2.2%`; times in the unit that fits: `58 ms`."""
    if column(name).unit in ("s", "ms"):
        return time_text(value)
    text, unit = cell(name, float(value)), column(name).unit
    return f"{text}{unit}" if unit == "%" else f"{text} {unit}".rstrip()


def point(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Several columns of a row: `1,241 tokens/s, TTFT p95 1.74 s, ITL p95 49.6 ms`; the first speaks for itself."""
    first, *rest = names
    return ", ".join([amount(first, row[first]), *(f"{column(name).label} {amount(name, row[name])}" for name in rest)])


def moved(before: float, after: float) -> int:
    """1 where a value rose, -1 where it fell, 0 where it stayed within `STILL` of itself (or infinite)."""
    if before == after or math.isfinite(before) and abs(after - before) <= STILL * abs(before):
        return 0
    return 1 if after > before else -1


def change(name: str, before: float, after: float) -> str:
    """How a column goes from one value to another: `rises from 200 ms to 1.4 s`, `stays at 200 ms`."""
    verb = {1: "rises", -1: "falls", 0: "stays"}[moved(before, after)]
    return f"{verb} at {amount(name, before)}" if verb == "stays" else \
        f"{verb} from {amount(name, before)} to {amount(name, after)}"


def millions(tokens: float, noun: str = "tokens") -> str:
    """A number of tokens: `1.41 million tokens`, `52,000 tokens`."""
    return f"{tokens / 1e6:.3g} million {noun}" if tokens >= 1e6 else f"{float(f'{tokens:.3g}'):,.0f} {noun}"


def counted(number: int, noun: str) -> str:
    """`1 rung`, `3 rungs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
