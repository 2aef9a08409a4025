"""The recommendation without the changes that change nothing: NSGA-II carries along flags that do not matter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spoc_lib.core.files import read_json, write_json
from spoc_lib.search import pareto
from spoc_lib.search.evaluate import Evaluator, TrialFailure
from spoc_lib.search.space import Flags, FlagSpace, flags_key


@dataclass(frozen=True, slots=True)
class Simplified:
    """flags: the recommendation; values: its objectives, measured; restored: flags put back to their defaults."""

    flags: Flags
    values: tuple[float, float, float]
    restored: list[str]


def simplify(space: FlagSpace, flags: Flags, values: tuple[float, float, float], evaluator: Evaluator,
             folder: Path) -> Simplified:
    """Put one changed flag after the other back to its default, and keep it there where the SLOs stay met and no
    objective gets worse by more than the resolution. Each attempt is measured (or read from `folder`)."""
    best, point, restored = dict(flags), values, []
    for name in [n for n in space.searched if flags[n] != space.defaults[n]]:
        plainer = space.canonical({**best, name: space.defaults[name]})
        if space.invalid(plainer):
            continue
        measured = _measured(plainer, evaluator, folder / name)
        if measured is not None and pareto.as_good_as(np.array([measured]), np.array(values))[0]:
            best, point = plainer, measured
            restored.append(name)
    return Simplified(best, point, restored)


def _measured(flags: Flags, evaluator: Evaluator, folder: Path) -> tuple[float, float, float] | None:
    """The objectives of `flags`; None where there is no measurement or an SLO is missed."""
    path = folder / "simplified.json"
    if path.is_file() and flags_key((known := read_json(path, "attempt"))["flags"]) == flags_key(flags):
        return None if known["values"] is None else tuple(known["values"])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = evaluator.evaluate(flags, folder)
        values = found.values if found.violation <= 0 else None
    except TrialFailure:
        values = None
    write_json(path, {"flags": flags, "values": values})
    return values
