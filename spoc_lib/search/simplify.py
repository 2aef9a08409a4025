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
    """flags: the recommendation; figures: what was measured of it, by column of TRIALS (empty where nothing was put
    back); restored: flags put back to their defaults."""

    flags: Flags
    figures: dict[str, float | None]
    restored: list[str]


def simplify(space: FlagSpace, flags: Flags, values: pareto.Point, evaluator: Evaluator, folder: Path) -> Simplified:
    """Put one changed flag after the other back to its default, and keep it there where the SLOs stay met and no
    objective gets worse by more than the resolution. Each attempt is measured (or read from `folder`)."""
    best, restored = dict(flags), []
    figures: dict[str, float | None] = {}
    for name in [n for n in space.searched if flags[n] != space.defaults[n]]:
        plainer = space.canonical({**best, name: space.defaults[name]})
        if space.invalid(plainer):
            continue
        measured = _measured(plainer, evaluator, folder / name)
        if measured is None:
            continue
        point = [measured[column] for column in space.objectives]
        if pareto.as_good_as(np.array([point]), np.array(values))[0]:
            best, figures = plainer, measured
            restored.append(name)
    return Simplified(best, figures, restored)


def _measured(flags: Flags, evaluator: Evaluator, folder: Path) -> dict[str, float | None] | None:
    """The figures of `flags`; None where there is no measurement or an SLO is missed."""
    path = folder / "simplified.json"
    if path.is_file() and flags_key((known := read_json(path, "attempt"))["flags"]) == flags_key(flags):
        return known["figures"]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        found = evaluator.evaluate(flags, folder)
        figures = found.figures if found.violation <= 0 else None
    except TrialFailure:
        figures = None
    write_json(path, {"flags": flags, "figures": figures})
    return figures
