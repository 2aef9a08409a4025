"""The front again before other users: does it stand, and how far do the recommendation's effects scatter?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pandas as pd

from spoc_lib.core.files import read_json, write_json
from spoc_lib.search import noise, pareto
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
        """Chance of each trial of `front` to be on the front: share of the draws of a parametric bootstrap.

        Paired: all engines met the same samples of users, so what a sample does to all of them alike is taken out, and
        the rest, pooled over the engines, moves each mean by Student's t (two samples of users make nothing certain).
        The chance to meet the SLOs follows from the samples that did, one half added on either side.
        """
        trials = list(self.values)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(np.array([self.values[t] for t in trials]))  # (engines, samples, objectives)
        usable = np.isfinite(logs).all(axis=(1, 2))
        met = np.array([(self.feasible[t].sum() + 0.5) / (len(self.feasible[t]) + 1) for t in trials])
        error, freedom = _standard_error(logs[usable])
        random = np.random.default_rng(seed)
        hits = np.zeros(len(trials))
        for _ in range(DRAWS):
            points = np.exp(logs.mean(axis=1) + error * random.standard_t(freedom, size=(len(trials), 3)))
            hits += pareto.front(points, usable & (random.random(len(trials)) < met))
        return {trial: float(hit / DRAWS) for trial, hit in zip(trials, hits, strict=True) if trial in front}

    def change(self, before: int, after: int) -> pd.DataFrame:
        """Columns objective, low, high: range of after / before - 1 over the user samples."""
        ratio = self.values[after] / self.values[before] - 1
        return pd.DataFrame({"objective": self.objectives, "low": np.nanmin(ratio, axis=0),
                             "high": np.nanmax(ratio, axis=0)})


def _standard_error(logs: np.ndarray) -> tuple[np.ndarray, int]:
    """((3,) standard error of an engine's mean logarithm, degrees of freedom); logs (engines, samples, 3), paired."""
    engines, samples = logs.shape[:2]
    if engines < 2 or samples < 2:  # nothing to pair: the assumption of `noise` stands alone
        return np.full(3, noise.UNKNOWN_SD), noise.UNKNOWN_COUNTS
    rest = logs - logs.mean(axis=1, keepdims=True) - logs.mean(axis=0, keepdims=True) + logs.mean(axis=(0, 1))
    freedom = (engines - 1) * (samples - 1)
    return np.sqrt((rest**2).sum(axis=(0, 1)) / freedom / samples), freedom


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
