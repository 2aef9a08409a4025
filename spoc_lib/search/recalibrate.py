"""The twin's predictions corrected by what the real server answered, and whether the twin misled.

For each objective the logarithm of real / twin is taken as a constant plus a smooth function of the flags (a
Gaussian process over the flags' ranks): the constant corrects a wrong speed, the function a wrong trade-off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from spoc_lib.search import pareto
from spoc_lib.search.space import Flags, FlagSpace

#: Prior standard deviations, in logarithms: of the constant (the twin may be twice as fast), of the function.
CONSTANT_SD, FUNCTION_SD = 0.7, 0.25
#: Distance, in shares of a flag's list, over which corrections resemble each other.
LENGTH = 0.5
#: Below this rank correlation between twin and real over the measured engines the twin misled.
TRUSTED_CORRELATION = 0.5


def encode(space: FlagSpace, flags: Sequence[Flags]) -> np.ndarray:
    """(n, d) flags as ranks in their lists, each 0 … 1."""
    ranks = {name: {value: i / max(1, len(values) - 1) for i, value in enumerate(values)}
             for name, values in space.searched.items()}
    return np.array([[ranks[name][f[name]] for name in space.searched] for f in flags], dtype=float)


@dataclass(frozen=True)
class Correction:
    """Posterior of log(real / twin) at given flags: mean (m, 3) and standard deviation (m, 3)."""

    mean: np.ndarray
    sd: np.ndarray


def fit(measured: np.ndarray, log_ratio: np.ndarray, asked: np.ndarray, noise_sd: float) -> Correction:
    """The posterior at `asked` (m, d) given `log_ratio` (n, 3) at `measured` (n, d), flags as `encode` gives them;
    noise_sd: of one real measurement, in logarithms. Without measurements the prior."""
    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        square = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=2) / LENGTH**2
        return CONSTANT_SD**2 + FUNCTION_SD**2 * np.exp(-0.5 * square)

    prior = CONSTANT_SD**2 + FUNCTION_SD**2
    if not len(measured):
        return Correction(np.zeros((len(asked), 3)), np.full((len(asked), 3), np.sqrt(prior)))
    inner = kernel(measured, measured) + max(noise_sd, 1e-3) ** 2 * np.eye(len(measured))
    cross = kernel(asked, measured)
    mean = cross @ np.linalg.solve(inner, log_ratio)
    variance = prior - np.einsum("ij,ji->i", cross, np.linalg.solve(inner, cross.T))
    sd = np.sqrt(np.maximum(variance, 1e-9))
    return Correction(mean, np.repeat(sd[:, None], 3, axis=1))


def misled(twin: np.ndarray, real: np.ndarray, objectives: pareto.Objectives = pareto.OBJECTIVES) -> list[str]:
    """Sentences on the twin against reality over engines measured by both, (n, 3) each; n >= 2."""
    found = []
    for column, name in enumerate(objectives):
        ratio = real[:, column] / twin[:, column]
        spread = f"x{np.exp(np.log(ratio).mean()):.2f} (x{ratio.min():.2f} to x{ratio.max():.2f})"
        if len(ratio) < 4 or np.ptp(twin[:, column]) == 0 or np.ptp(real[:, column]) == 0:
            found.append(f"{name}: real / twin {spread}; too few engines to judge the order.")
            continue
        order = float(stats.kendalltau(twin[:, column], real[:, column]).statistic)
        verdict = ("the twin misled: it ranks these engines otherwise than the real server does"
                   if order < TRUSTED_CORRELATION else "the twin ranks these engines as the real server does")
        found.append(f"{name}: real / twin {spread}, rank correlation {order:.2f}: {verdict}.")
    return found
