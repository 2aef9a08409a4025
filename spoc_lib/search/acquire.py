"""Which engine to launch next: the one from which the corrected twin expects the most new hypervolume."""

from __future__ import annotations

import numpy as np

from spoc_lib.search import pareto
from spoc_lib.search.recalibrate import Correction

DRAWS = 24
#: Candidates that are judged by draws: those that the corrected means put first.
SHORTLIST = 48


def expected_gain(predicted: np.ndarray, room: np.ndarray, correction: Correction, members: np.ndarray,
                  reference: pareto.Reference, random: np.random.Generator) -> np.ndarray:
    """(m,) expected gain of hypervolume, in tokens/s.

    predicted (m, 3): the twin's objectives; room (m, 2): the largest ratio value / limit over the SLOs on TTFT and
    on ITL, as the twin has it; correction: of the logarithms; members (k, 3): real feasible points so far.
    """
    base = reference.hypervolume(members)
    means = predicted * np.exp(correction.mean)
    gain = _gains(means, room * np.exp(correction.mean[:, 1:]), members, reference, base)
    # A candidate whose mean gains nothing may still be worth a draw: rank it by how little it misses.
    order = np.lexsort((_shortfall(means, room, correction), -gain))[:SHORTLIST]
    total = np.zeros(len(predicted))
    for _ in range(DRAWS):
        shift = correction.mean[order] + correction.sd[order] * random.standard_normal(3)
        total[order] += _gains(predicted[order] * np.exp(shift), room[order] * np.exp(shift[:, 1:]), members,
                               reference, base)
    return total / DRAWS


def _gains(points: np.ndarray, room: np.ndarray, members: np.ndarray, reference: pareto.Reference,
           base: float) -> np.ndarray:
    feasible = (room <= 1.0).all(axis=1)
    gains = np.zeros(len(points))
    for index in np.flatnonzero(feasible):
        gains[index] = reference.hypervolume(np.vstack([members, points[index]])) - base
    return np.maximum(gains, 0.0)


def _shortfall(means: np.ndarray, room: np.ndarray, correction: Correction) -> np.ndarray:
    """How far the corrected means stand beyond the SLO limits, then by throughput."""
    beyond = np.maximum(room * np.exp(correction.mean[:, 1:]) - 1.0, 0.0).sum(axis=1)
    return beyond - 1e-6 * means[:, 0]
