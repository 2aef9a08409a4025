"""How sure a front is: the chance of each trial to be on it, given how far repeats of one engine differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spoc_lib.search import pareto

DRAWS = 1000
#: With no repeat at all nothing is known of the noise but that servers rarely scatter by more than this; no front
#: membership is certain then. It counts as so many repeats, lest one lucky pair make everything certain.
UNKNOWN_SD, UNKNOWN_COUNTS = 0.05, 2


@dataclass(frozen=True, slots=True)
class Drift:
    """The defaults measured again at the end: relative change of each objective and whether noise explains it."""

    change_ratio: tuple[float, float, float]
    sd_ratio: tuple[float, float, float]
    drifted: bool
    sentence: str


def relative_sd(repeats: Sequence[np.ndarray]) -> np.ndarray:
    """(3,) standard deviation of the logarithm of each objective, pooled over the engines measured twice or more and
    the assumption of UNKNOWN_SD.

    repeats: one array (n, 3) an engine, all values positive.
    """
    squares = np.full(3, UNKNOWN_COUNTS * UNKNOWN_SD**2)
    for values in repeats:
        logs = np.log(values)
        squares += ((logs - logs.mean(axis=0)) ** 2).sum(axis=0)
    return np.sqrt(squares / (UNKNOWN_COUNTS + repeated(repeats)))


def repeated(repeats: Sequence[np.ndarray]) -> int:
    """Measurements beyond the first of each engine."""
    return sum(len(values) - 1 for values in repeats)


def membership(repeats: Sequence[np.ndarray], sd: np.ndarray, limits: np.ndarray, seed: int = 0,
               draws: int = DRAWS) -> np.ndarray:
    """(m,) share of parametric bootstrap draws in which each engine is feasible and on the front.

    A draw moves every engine's mean by its standard error, sd / √(repeats), in logarithms and by Student's t, since
    few repeats know sd badly; limits (3,): largest feasible value of each objective (inf = none; the first,
    throughput, has none).
    """
    means = np.array([np.log(values).mean(axis=0) for values in repeats])
    errors = np.array([sd / np.sqrt(len(values)) for values in repeats])
    random = np.random.default_rng(seed)
    freedom = UNKNOWN_COUNTS + repeated(repeats)
    hits = np.zeros(len(means))
    for _ in range(draws):
        points = np.exp(means + errors * random.standard_t(freedom, size=means.shape))
        hits += pareto.front(points, np.all(points[:, 1:] <= limits[1:], axis=1))
    return hits / draws


def drift(first: np.ndarray, again: np.ndarray, sd: np.ndarray,
          objectives: pareto.Objectives = pareto.OBJECTIVES) -> Drift:
    """Whether the defaults answered otherwise at the end than at the start: a change above 3 sd·√2."""
    change = again / first - 1.0
    drifted = bool((np.abs(np.log(again / first)) > 3 * np.sqrt(2) * np.maximum(sd, 1e-3)).any())
    worst = int(np.argmax(np.abs(change)))
    name = objectives[worst]
    sentence = (f"The defaults, measured again at the end, moved by {change[worst]:+.1%} in {name}: "
                + ("the server drifted during the search, so early and late trials cannot be compared."
                   if drifted else "within the noise, so early and late trials can be compared."))
    return Drift(tuple(change), tuple(sd), drifted, sentence)
