"""The flags of an engine as data (data/flags/*.yaml), and the one way to read flags: a cluster file's, a notebook's
parameter, `--set`, `--flags`, the search space and an engine's own command line hold the same names and values."""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from spoc_lib.config.access import SECRET_FLAG, secret_given
from spoc_lib.config.rules import NoEffect, Rule
from spoc_lib.config.shipped import data_file
from spoc_lib.config.specs import GpuSpec
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import SHORT, Strict

FlagValue = bool | int | float | str
Kind = Literal["bool", "int", "float", "str", "list", "json"]
#: What a sentence calls a value of each type.
KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a word", "list": "words",
         "json": "JSON"}
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NOTHING = ("null", "none", "~")
#: `8k` is 8000 and `8K` 8192, as vLLM reads them.
UNITS = {unit: factor for power, pair in enumerate(("kK", "mM", "gG", "tT"), 1)
         for unit, factor in zip(pair, (1000**power, 1024**power), strict=True)}
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.]*")
#: What begins a flag on a command line: `--name`, or vLLM's short names such as `-tp`.
OPTION = re.compile(r"--?[A-Za-z]")


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
    """One flag. `default` maps a hardware class (or `any`) to the engine's default; null = decided by the engine.

    values: what a search tries; choices: all words that the engine takes (by default, of a word, `values`), of a number
    those that it takes besides numbers; int and float are bounded by `minimum` (an int without one: 1) and `maximum`.
    """

    type: Kind
    default: dict[str, FlagValue | None] = {}
    range: Range | None = None
    values: list[FlagValue] | None = None
    choices: list[str] = []
    minimum: float | None = None
    maximum: float | None = None
    searched: bool = False
    about: str = ""

    def points(self) -> list[FlagValue]:
        """All values that the search may give it; empty where the flag has no range."""
        if self.type == "bool":
            return [True, False]
        if self.values is not None:
            return list(self.values)
        return self.range.points(int if self.type == "int" else float) if self.range else []

    @property
    def unset(self) -> bool:
        """Whether null may stand for it: the engine's default is no value."""
        return all(value is None for value in self.default.values())

    def read(self, name: str, value: Any, where: str) -> FlagValue | None:
        """`value`, text or typed, as the flag takes it; None for null, where the flag may be unset. InputError naming
        the flag, what was given and what is wanted."""
        given = _unquoted(value)
        choices = self.choices or (list(map(str, self.values or [])) if self.type == "str" else [])
        if isinstance(given, (int, str)) and not isinstance(given, bool) and str(given) in choices:
            return given
        if given is None or isinstance(given, str) and given.lower() in NOTHING:
            if self.unset:
                return None
            raise InputError("bad-flag", f"{where}: {name}: no value ({given}) cannot be: leave the flag out for the "
                             "engine's default")
        if given == "":
            raise InputError("bad-flag", f"{where}: {name}: no value is given: write {name}=… with {KINDS[self.type]}")
        if choices and self.type == "str":
            near = difflib.get_close_matches(str(given).lower(), choices, 1)
            raise InputError("bad-flag", f"{where}: {name}: {SHORT.repr(given)} is not one of {', '.join(choices)}"
                             + (f": did you mean {near[0]}?" if near else ""))
        found = _READERS[self.type](given)
        if found is None:
            words = f", or {' or '.join(choices)}" if choices else ""
            raise InputError("bad-flag", f"{where}: {name}: wants a value of type {self.type} ({KINDS[self.type]}"
                             f"{words}), not {SHORT.repr(value)}")
        if isinstance(found, (int, float)) and not isinstance(found, bool):
            self._in_range(name, found, where)
        return found

    def _in_range(self, name: str, value: float, where: str) -> None:
        low = 1 if self.type == "int" and self.minimum is None else self.minimum
        if low is not None and value < low or self.maximum is not None and value > self.maximum:
            limits = f"at least {low:g}" + ("" if self.maximum is None else f" and at most {self.maximum:g}")
            raise InputError("bad-flag", f"{where}: {name}: must be {limits}, not {value!r}")


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
    """All flags of one engine and the rules between them; `others`: names by type, and `words` with what each takes, of
    the flags that no search varies and of which no default is known here; `aliases`: further names."""

    engine: str
    versions: str
    source: str
    hardware: list[HardwareClass]
    flags: dict[str, FlagSpec]
    others: dict[Kind, list[str]] = {}
    words: dict[str, list[str]] = {}
    aliases: dict[str, str] = {}
    rules: list[Rule]
    no_effect: list[NoEffect]

    def spec(self, name: str) -> FlagSpec | None:
        """The flag `name`; None when the catalogue has no such flag."""
        if name in self.flags:
            return self.flags[name]
        if name in self.words:
            return FlagSpec(type="str", choices=self.words[name])
        kind = next((kind for kind, names in self.others.items() if name in names), None)
        return kind and FlagSpec(type=kind, minimum=-math.inf)

    def unknown(self, name: str) -> str:
        """The sentence on a name that the catalogue lacks, with the nearest that it has."""
        known = [*self.flags, *self.words, *(name for names in self.others.values() for name in names)]
        near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
        return f"unknown flag '{name:.60}': " + (f"did you mean {' or '.join(near)}?" if near else
                                             f"{self.engine} has none of this name; `vllm serve --help=all` lists them")

    def default(self, name: str, gpu: GpuSpec) -> FlagValue | None:
        """The engine's default of flag `name` on `gpu`; None where it is not known here."""
        kind = next((c.name for c in self.hardware if c.fits(gpu)), "any")
        table = self.flags[name].default if name in self.flags else {}
        return table.get(kind, table.get("any"))

    def name(self, written: Any, where: str) -> str:
        """The flag that is meant by `--max-num-seqs`, `max-num-seqs` or `max_num_seqs`; InputError for what can be no
        flag's name, and for a credential."""
        name = str(written).strip().lstrip("-").replace("-", "_")
        if SECRET_FLAG.fullmatch(str(written).strip()) or SECRET_FLAG.fullmatch(name):
            raise InputError("secret", f"{where}: {secret_given(f'the flag {name}').message()}")
        if not NAME.fullmatch(name):
            raise InputError("bad-flag", f"{where}: {SHORT.repr(written)} cannot be a flag: write its name as vLLM "
                             "does, for example max_num_seqs")
        head, dot, key = name.partition(".")
        return self.aliases.get(head, head) + dot + key

    def read(self, written: Any, value: Any, where: str) -> tuple[str, FlagValue | None]:
        """One flag: (its name, its value). `no_x` is x turned round. The value of a flag that the catalogue lacks is
        taken as it stands."""
        name = self.name(written, where)
        positive = name.removeprefix("no_")
        if positive != name and self.spec(name) is None and (spec := self.spec(positive)) and spec.type == "bool":
            return positive, not spec.read(name, value, where)
        spec = self.spec(name) or self.spec(name.partition(".")[0]) and FlagSpec(type="str")
        if spec is not None:
            return name, spec.read(name, value, where)
        value = _unquoted(value)
        if not isinstance(value, (bool, int, float, str)) or value == "":
            raise InputError("bad-flag", f"{where}: {name}: must be true, false, a number or a word, not "
                             f"{SHORT.repr(value)}")
        return name, TRUTHS.get(value.lower(), value) if isinstance(value, str) else value


@lru_cache
def _catalogue(path: Path) -> Catalogue:
    return yamlfile.load(Catalogue, path)


def load_catalogue(engine: str = "vllm") -> Catalogue:
    """data/flags/<engine>.yaml, read once."""
    return _catalogue(data_file("flags", f"{engine}.yaml"))


def read_flags(given: str | Iterable[str] | Mapping[str, Any], where: str = "flags") -> dict[str, FlagValue | None]:
    """Flags by name, each checked against the catalogue; None: said to be unset.

    given: names with values, or words as on a command line (`max_num_seqs=64`, `--max-num-seqs 64`,
    `--enable-prefix-caching`, `--no-async-scheduling`), or a text of such words with blanks or commas between them.
    InputError for a value that the flag does not take, a flag that is given twice, or a word that is no flag. A flag
    that the catalogue lacks is left to the engine (`unknown_flags`).
    """
    catalogue = load_catalogue()
    if isinstance(given, str):
        given = _split(given, where)
    flags: dict[str, FlagValue | None] = {}
    for written, value in given.items() if isinstance(given, Mapping) else _pairs(given, catalogue, where):
        name, read = catalogue.read(written, value, where)
        if name in flags:
            raise InputError("flag-twice", f"{where}: '{name}' is given twice, as {SHORT.repr(flags[name])} and "
                             f"{SHORT.repr(read)}: keep one")
        flags[name] = read
    return flags


def unknown_flags(names: Iterable[str]) -> list[str]:
    """A sentence for each of `names` that the catalogue lacks."""
    catalogue = load_catalogue()
    return [catalogue.unknown(name) for name in names if catalogue.spec(name.partition(".")[0]) is None]


def _split(text: str, where: str) -> list[str]:
    """Words of a text as a shell splits it, at commas too."""
    cut = shlex.shlex(text, posix=True)
    cut.whitespace, cut.whitespace_split, cut.commenters = " \t\r\n,", True, ""
    try:
        return list(cut)
    except ValueError as error:
        raise InputError("bad-flag", f"{where}: {str(error).lower()}: write name=value, quotes in pairs") from error


def _pairs(given: Iterable[str], catalogue: Catalogue, where: str) -> Iterator[tuple[str, Any]]:
    rest = list(given)
    while rest:
        word = re.sub(r"^-O(?=\d)", "--optimization-level=", rest.pop(0))
        name, equals, value = word.partition("=")
        if equals:
            yield name, value
            continue
        if not OPTION.match(word):
            raise InputError("bad-flag", f"{where}: unexpected argument {SHORT.repr(word)}: a flag must be written "
                             "name=value or --name value")
        spec = catalogue.spec(catalogue.name(word, where))
        kind = "bool" if spec is None else spec.type
        values: list[str] = []
        while rest and not OPTION.match(rest[0]) and (not values or kind == "list") and (
                "=" not in rest[0] or kind in ("list", "json") and catalogue.spec(rest[0].partition("=")[0]) is None):
            if spec is not None and kind == "bool" and rest[0].lower() not in TRUTHS:
                break
            values.append(rest.pop(0))
        yield word, (values if kind == "list" else values[0]) if values else True if kind == "bool" else ""


def _unquoted(value: Any) -> Any:
    """Text without the blanks and the pair of quotes around it."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _truth(given: Any) -> bool | None:
    return given if isinstance(given, bool) else TRUTHS.get(given.lower()) if isinstance(given, str) else None


def _number(given: Any) -> float | None:
    """A finite number; a text as a person reads it: 010 is ten, 1e5, 1_000 and 0x10 are numbers, 8k and 8K too."""
    if isinstance(given, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", given)
        try:
            if match:
                return float(match[1] or match[3]) * UNITS[match[2] or match[4]]
            given = int(given, 16) if given.lower().startswith("0x") else float(given)
        except ValueError:
            return None
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        return None
    return float(given) if abs(given) < 1e300 else None


def _whole(given: Any) -> int | None:
    if isinstance(given, int) and not isinstance(given, bool):
        return given if abs(given) < 2**63 else None
    if isinstance(given, str) and re.fullmatch(r"[+-]?\d+(_\d+)*", given) and len(given) < 20:
        return int(given)
    number = _number(given)
    return int(number) if number is not None and number.is_integer() and abs(number) < 2**63 else None


def _word(given: Any) -> str | None:
    return str(given) if isinstance(given, (str, int, float)) and not isinstance(given, bool) else None


def words(given: Any) -> list[str] | None:
    """The words of a list flag: of such a list, of JSON, or of a text with blanks or commas between them; an object is
    one word."""
    if isinstance(given, str):
        try:
            given = json.loads(given if given[:1] in ("[", "{") else "")
        except ValueError:
            given = None if given[:1] == "{" else re.split(r"[,\s]+", given.strip("[] "))
    parts = given if isinstance(given, (list, tuple)) else [given]
    texts = [json.dumps(part) if isinstance(part, dict) else str(part) for part in parts
             if isinstance(part, (str, int, float, dict)) and not isinstance(part, bool)]
    return texts if parts and len(texts) == len(parts) and all(map(str.strip, texts)) else None


def _words(given: Any) -> str | None:
    """As text: with a blank between them, or as JSON where a word itself could be taken for several."""
    parts = words(given)
    if parts is None:
        return None
    return " ".join(parts) if words(" ".join(parts)) == parts else json.dumps(parts)


def _json(given: Any) -> str | None:
    """JSON as text, from such a text or from a mapping or list."""
    try:
        value = json.loads(given) if isinstance(given, str) else given
        return json.dumps(value) if isinstance(value, (dict, list)) else None
    except (TypeError, ValueError):
        return None


_READERS = {"bool": _truth, "int": _whole, "float": _number, "str": _word, "list": _words, "json": _json}


def _quarters(value: float) -> int:
    grain = max(1, 2 ** (math.floor(math.log2(value)) - 2)) if value >= 1 else 1
    return int(round(value / grain) * grain)
