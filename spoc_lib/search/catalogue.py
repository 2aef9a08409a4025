"""The flags of an engine as data (data/flags/*.yaml): names, types, ranges, defaults by hardware, rules."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spoc_lib.config import FlagValue, GpuSpec, data_dir
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import Strict
from spoc_lib.search.rules import NoEffect, Rule

TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


class Range(Strict):
    """A numeric range walked in steps: `per_octave` points a doubling on a log scale (whole numbers rounded to a
    quarter of their power of two: 1024, 1536, 2048, …), `step` on a linear one; `also` adds values outside it
    (such as 0 = off)."""

    low: float
    high: float
    scale: Literal["linear", "log"] = "linear"
    step: Annotated[float, Field(gt=0)] | None = None
    per_octave: Annotated[int, Field(gt=0)] = 1
    also: list[FlagValue] = []

    @model_validator(mode="after")
    def _walkable(self) -> Range:
        if self.low > self.high:
            raise ValueError(f"empty range: low {self.low:g} is above high {self.high:g}")
        if self.scale == "log" and self.low <= 0:
            raise ValueError("a log scale needs low > 0")
        if self.scale == "linear" and self.step is None:
            raise ValueError("a linear range needs 'step'")
        return self

    def _at(self, index: int) -> float:
        if self.step is None or self.scale == "log":
            return self.low * 2 ** (index / self.per_octave)
        return self.low + index * self.step

    def points(self, kind: type) -> list[FlagValue]:
        """The values of the range, ascending, as `kind` (int or float), without repeats."""
        raw: list[float] = []
        index = 0
        while True:
            value = self._at(index)
            if value > self.high * (1 + 1e-9):
                break
            raw.append(value)
            index += 1
        rounded = [_quarters(value) if kind is int else round(value, 6) for value in raw]
        return sorted(set(self.also) | set(rounded))


class FlagSpec(Strict):
    """One flag. `default` maps a hardware class (or `any`) to the engine's default; null = decided by the engine."""

    type: Literal["bool", "int", "float", "str"]
    default: dict[str, FlagValue | None]
    range: Range | None = None
    values: list[FlagValue] | None = None
    minimum: float | None = None
    maximum: float | None = None
    searched: bool = False
    about: str

    def points(self) -> list[FlagValue]:
        """All values that the search may give it; empty where the flag has no range."""
        if self.type == "bool":
            return [True, False]
        if self.values is not None:
            return list(self.values)
        return self.range.points(int if self.type == "int" else float) if self.range else []

    def check(self, name: str, value: Any, where: str) -> FlagValue:
        """`value` in the flag's type; InputError naming the field when it does not fit."""
        fits = isinstance(value, TYPES[self.type]) and (self.type == "bool" or not isinstance(value, bool))
        if not fits:
            raise InputError("bad-flag", f"{where}: '{name}' wants a value of type {self.type}, not {value!r}")
        low = 1 if self.type == "int" and self.minimum is None else self.minimum
        if low is not None and value < low or self.maximum is not None and value > self.maximum:
            limits = f"at least {low:g}" + ("" if self.maximum is None else f" and at most {self.maximum:g}")
            raise InputError("bad-flag", f"{where}: '{name}' must be {limits}, not {value!r}")
        return float(value) if self.type == "float" else value


class HardwareClass(Strict):
    """GPUs that share defaults: named in `gpus`, or with enough memory and none of `except` in their name."""

    name: str
    gpus: list[str] | None = None
    min_memory_gib: float = 0
    excluded: list[str] = Field([], alias="except")

    def fits(self, gpu: GpuSpec) -> bool:
        """Whether `gpu` is of this class."""
        if self.gpus is not None:
            return gpu.name in self.gpus
        return gpu.memory_gib >= self.min_memory_gib and not any(word in gpu.name for word in self.excluded)


class Catalogue(Strict):
    """All flags of one engine and the rules between them."""

    engine: str
    versions: str
    source: str
    hardware: list[HardwareClass]
    flags: dict[str, FlagSpec]
    rules: list[Rule]
    no_effect: list[NoEffect]

    def spec(self, name: str, where: str) -> FlagSpec:
        """The flag `name`; InputError with the nearest known names when there is no such flag."""
        if name not in self.flags:
            near = difflib.get_close_matches(name, self.flags, n=2, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(sorted(self.flags))}"
            raise InputError("unknown-flag", f"{where}: unknown flag '{name}': {hint}")
        return self.flags[name]

    def default(self, name: str, gpu: GpuSpec) -> FlagValue | None:
        """The engine's default of flag `name` on `gpu`."""
        kind = next((c.name for c in self.hardware if c.fits(gpu)), "any")
        table = self.flags[name].default
        return table.get(kind, table.get("any"))


def load_catalogue(engine: str = "vllm") -> Catalogue:
    """Read data/flags/<engine>.yaml."""
    return yamlfile.load(Catalogue, data_dir() / "flags" / f"{engine}.yaml")


def _quarters(value: float) -> int:
    grain = max(1, 2 ** (math.floor(math.log2(value)) - 2)) if value >= 1 else 1
    return int(round(value / grain) * grain)


def flag_name(name: str) -> str:
    """`--max-num-seqs`, `max-num-seqs` or `max_num_seqs` as the last."""
    return name.lstrip("-").replace("-", "_")
