"""Which flags decided: importances of the searched flags for each objective.

PED-ANOVA (Watanabe et al. 2023, in Optuna) asks how differently a flag is set among the best quarter of the
measured trials than among all of them. It needs some trials; below that the table is empty and says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import optuna
import pandas as pd
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from spoc_lib.search.pareto import OBJECTIVES, Objectives

BEST_SHARE = 0.25
#: Fewer measured trials than this say nothing about five flags.
MIN_TRIALS = 12
FRONT = "pareto_front"


def importances(study: optuna.Study, objectives: Objectives = OBJECTIVES) -> pd.DataFrame:
    """Columns flag, objective (three objectives and `pareto_front`), importance (sums to 1 an objective).

    Empty when fewer than MIN_TRIALS trials were measured or nothing varied.
    """
    columns = ["flag", "objective", "importance"]
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    varied = sorted({name for t in trials for name, d in t.distributions.items() if not d.single()})
    if len(trials) < MIN_TRIALS or not varied:
        return pd.DataFrame(columns=columns)
    rows = []
    for objective, target in _targets(objectives).items():
        with warnings.catch_warnings():  # it warns at every use of a target that low is good: the targets see to it
            warnings.simplefilter("ignore")
            found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(target_quantile=BEST_SHARE),
                                          params=varied, target=target)
        rows += [{"flag": flag, "objective": objective, "importance": float(value)} for flag, value in found.items()]
    return pd.DataFrame(rows, columns=columns)


def _targets(objectives: Objectives) -> dict[str, Callable[[FrozenTrial], float] | None]:
    throughput, ttft, itl = objectives
    return {
        throughput: lambda t: -t.values[0],
        ttft: lambda t: t.values[1],
        itl: lambda t: t.values[2],
        FRONT: None,  # the best quarter by non-domination rank
    }
