"""Learned crash avoidance: flags that look like those that failed to start or died are not launched.

A ridge logistic regression over the flags' ranks, fitted to every trial so far. It speaks only after a few failures
and only when sure, and only of failures that launching caused (a collapse under load is an answer, not a crash).
Switched off by SPOC_CRASH_AVOIDANCE=off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from spoc_lib.search.recalibrate import encode
from spoc_lib.search.sampler import interrupted
from spoc_lib.search.space import Flags, flags_key
from spoc_lib.search.study import SearchStudy, record_of

SWITCH = "SPOC_CRASH_AVOIDANCE"
CRASHES = ("free-memory", "out-of-memory", "no-kv-room", "bad-flags", "crash", "startup-timeout")
#: Failures and successes needed before the model speaks, and how sure it must be.
LEAST_FAILURES, LEAST_SUCCESSES, SURE = 3, 3, 0.9
RIDGE = 0.1
NEWTON_STEPS = 25


def switched_on() -> bool:
    """Whether crashes are avoided: unless the environment says off."""
    return os.environ.get(SWITCH, "on").lower() not in ("off", "0", "false", "no")


class CrashAvoidance:
    """`avoid` of a study: a sentence for flags that will probably crash, else None.

    The defaults are never avoided, nor anything within the first failures and successes.
    """

    def __call__(self, study: SearchStudy, flags: Flags) -> str | None:
        if flags_key(flags) == flags_key(study.space.defaults):
            return None
        chance, failures = self.probability(study, [flags])
        if chance is None or chance[0] < SURE:
            return None
        return f"would crash with a probability of {chance[0]:.0%}, by {failures} failed launches so far"

    def probability(self, study: SearchStudy, flags: Sequence[Flags]) -> tuple[np.ndarray | None, int]:
        """(chance of a crash of each of `flags`, number of failures known); None before there are enough."""
        known = [r for t in study.trials() if not interrupted(t) and (r := record_of(t))]
        crashed = [r["flags"] for r in known if r["state"] == "failed" and r["failure_class"] in CRASHES]
        served = [r["flags"] for r in known if r["state"] in ("complete", "infeasible")]
        if len(crashed) < LEAST_FAILURES or len(served) < LEAST_SUCCESSES:
            return None, len(crashed)
        weights = fit(encode(study.space, [*crashed, *served]), np.repeat([1.0, 0.0], [len(crashed), len(served)]))
        return predict(weights, encode(study.space, flags)), len(crashed)


def fit(ranks: np.ndarray, crashed: np.ndarray) -> np.ndarray:
    """Weights (d + 1,) of a ridge logistic regression by Newton's method; the last one is the constant."""
    design = np.column_stack([ranks, np.ones(len(ranks))])
    penalty = RIDGE * np.diag([*np.ones(ranks.shape[1]), 1e-3])
    weights = np.zeros(design.shape[1])
    for _ in range(NEWTON_STEPS):
        chance = 1 / (1 + np.exp(-design @ weights))
        curvature = design.T @ (design * (chance * (1 - chance))[:, None]) + penalty
        step = np.linalg.solve(curvature, design.T @ (crashed - chance) - penalty @ weights)
        weights += step
        if np.abs(step).max() < 1e-6:
            break
    return weights


def predict(weights: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """(m,) chance of a crash."""
    return 1 / (1 + np.exp(-(ranks @ weights[:-1] + weights[-1])))
