"""Command-line arguments of the embedded server that are not its own: engine flags, and the throttle."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from spoc_lib.core.errors import InputError
from spoc_lib.engine.gpu_counters import Throttle


def parse_engine_arguments(arguments: Sequence[str]) -> dict[str, object]:
    """Engine flags by name from `--max-num-seqs 256 --enable-prefix-caching --no-async-scheduling --watermark=0.01`.

    Names with underscores; `--no-x` is x = false; a flag without a value is true. InputError for a stray value.
    """
    flags: dict[str, object] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise InputError("bad-argument", f"unexpected argument '{word}': engine flags are given as --name value")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            flags[name] = _value(value)
        elif rest and not rest[0].startswith("--"):
            flags[name] = _value(rest.pop(0))
        elif name.startswith("no_"):
            flags[name.removeprefix("no_")] = False
        else:
            flags[name] = True
    return flags


def _value(text: str) -> object:
    """A number, a truth value or a text, as YAML reads it."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, (bool, int, float)) or value is None else text


def parse_throttle(text: str | None) -> Throttle | None:
    """`gpu=1,at=60,factor=0.7`; InputError naming what is wrong."""
    if text is None:
        return None
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    wrong = set(parts) ^ {"gpu", "at", "factor"}
    if wrong:
        raise InputError("bad-throttle", f"--throttle {text}: give gpu, at (seconds) and factor, "
                         f"as gpu=1,at=60,factor=0.7 (wrong or missing: {', '.join(sorted(wrong))})")
    try:
        throttle = Throttle(int(parts["gpu"]), float(parts["at"]), float(parts["factor"]))
    except ValueError as error:
        raise InputError("bad-throttle", f"--throttle {text}: {error}") from error
    if throttle.gpu < 0 or throttle.at_s < 0 or not 0 < throttle.factor < 1:
        raise InputError("bad-throttle", f"--throttle {text}: gpu and at are not negative, factor lies between 0 and 1")
    return throttle
