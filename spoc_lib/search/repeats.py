"""The front again before other users: does it stand, and how far do the recommendation's effects scatter?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pandas as pd

from spoc_lib.core.files import read_json, write_json
from spoc_lib.search import pareto
from spoc_lib.search.evaluate import Evaluator, TrialFailure
from spoc_lib.search.space import Flags

#: Engines that are repeated: the defaults, the chosen one, and the front by throughput up to this many.
MOST_ENGINES = 12
DRAWS = 500


@dataclass(frozen=True)
class Repeats:
    """values: trial -> (repeats, 3) objectives, NaN where a repeat failed, row k of all trials before the same users;
    feasible: trial -> (repeats,) SLOs met."""

    values: dict[int, np.ndarray]
    feasible: dict[int, np.ndarray]
    objectives: pareto.Objectives

    def probabilities(self, front: list[int], seed: int) -> dict[int, float]:
        """Chance of each trial of `front` to be on the front, over draws of the user samples with replacement.

        Paired: in a draw every engine meets the same samples, as in the search itself.
        """
        count = len(next(iter(self.values.values())))
        random = np.random.default_rng(seed)
        hits = dict.fromkeys(front, 0)
        trials = list(self.values)
        for _ in range(DRAWS):
            drawn = random.integers(0, count, count)
            points = np.array([self.values[t][drawn].mean(axis=0) for t in trials])
            usable = np.array([self.feasible[t][drawn].mean() > 0.5 for t in trials])
            for trial, member in zip(trials, pareto.front(points, usable), strict=True):
                if member and trial in hits:
                    hits[trial] += 1
        return {trial: count / DRAWS for trial, count in hits.items()}

    def change(self, before: int, after: int) -> pd.DataFrame:
        """Columns objective, low, high: range of after / before - 1 over the user samples."""
        ratio = self.values[after] / self.values[before] - 1
        return pd.DataFrame({"objective": self.objectives, "low": np.nanmin(ratio, axis=0),
                             "high": np.nanmax(ratio, axis=0)})


def repeat_front(trials: pd.DataFrame, wanted: list[int], evaluator: Evaluator, folder: Path, seeds: int,
                 objectives: pareto.Objectives, progress: Callable[[str], None] | None = None) -> Repeats:
    """Measure the `wanted` trials before `seeds` samples of users in all (the search's own is the first).

    Answers lie in `folder`, so that an interrupted search does not pay for them again.
    """
    rows = trials.set_index("trial")
    values, feasible = {}, {}
    for trial in wanted[:MOST_ENGINES]:
        flags = orjson.loads(rows.loc[trial, "flags"])
        own = [list(rows.loc[trial, list(objectives)]), rows.loc[trial, "state"] == "complete"]
        answers = [own, *(_repeat(flags, evaluator, folder / f"{trial:04d}-{k}", k) for k in range(1, seeds))]
        if progress:
            progress(f"trial {trial} before {seeds - 1} other samples of users")
        values[trial] = np.array([a[0] for a in answers], dtype=float)
        feasible[trial] = np.array([a[1] for a in answers], dtype=bool)
    return Repeats(values, feasible, objectives)


def _repeat(flags: Flags, evaluator: Evaluator, folder: Path, repeat: int) -> list:
    path = folder / "repeat.json"
    if path.is_file():
        known = read_json(path, "repeat")
        return [[np.nan if v is None else v for v in known["values"]], known["feasible"]]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        measured = evaluator.evaluate(flags, folder, repeat=repeat)
        answer = [list(measured.values), measured.violation <= 0]
    except TrialFailure:
        answer = [[np.nan] * 3, False]
    write_json(path, {"flags": flags, "values": answer[0], "feasible": answer[1]})
    return answer
