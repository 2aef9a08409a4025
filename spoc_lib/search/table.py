"""The study as a table (schema TRIALS): one row a trial, with the front and the hypervolume as they grew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from optuna.trial import FrozenTrial

from spoc_lib.core import schemas
from spoc_lib.core.tables import as_table
from spoc_lib.search import pareto
from spoc_lib.search.sampler import RECORD, interrupted
from spoc_lib.search.space import flags_key
from spoc_lib.search.study import record_of

INTERRUPTED = "the process ended during this trial; its slot was run again"


def trials_table(trials: Sequence[FrozenTrial], reference: pareto.Reference,
                 objectives: pareto.Objectives = pareto.OBJECTIVES) -> pd.DataFrame:
    """TRIALS of all answered and interrupted trials, in order. `on_front` marks the feasible front of `objectives`,
    each distinct engine once, repeats averaged; `hypervolume` is that of the feasible trials so far
    (see `pareto.Reference`)."""
    rows = [_row(t) for t in trials if RECORD in t.user_attrs or interrupted(t)]
    if rows:
        table = pd.DataFrame(rows)
        points = table[list(objectives)].to_numpy(float)
        feasible = (table["state"] == "complete").to_numpy()
        for row, volume in zip(rows, pareto.hypervolume_history(points, feasible, reference), strict=True):
            row["hypervolume"] = float(volume)
        engines = measured_engines(table, objectives)
        member = set(engines["trial"][pareto.front(engines[list(objectives)].to_numpy(float),
                                                   engines["feasible"].to_numpy(bool))])
        for row in rows:
            row["on_front"] = row["trial"] in member
    return as_table(rows, schemas.TRIALS).to_pandas()


def measured_engines(trials: pd.DataFrame, objectives: pareto.Objectives = pareto.OBJECTIVES) -> pd.DataFrame:
    """One row a distinct engine that was measured, `trial` its first trial: geometric means of the objectives over
    its repeats, `repeats`, and `feasible`: every repeat met the SLOs. Trials answered from the cache do not count."""
    measured = trials[trials["state"].isin(["complete", "infeasible"])]
    rows = []
    for _, group in measured.groupby("flags", sort=False):
        with np.errstate(divide="ignore"):  # a goodput of nothing stays nothing
            means = np.exp(np.log(group[list(objectives)].to_numpy(float)).mean(axis=0))
        rows.append({"trial": int(group["trial"].iloc[0]), **dict(zip(objectives, means, strict=True)),
                     "repeats": len(group), "feasible": bool((group["state"] == "complete").all())})
    return pd.DataFrame(rows, columns=["trial", *objectives, "repeats", "feasible"])


def _row(trial: FrozenTrial) -> dict[str, object]:
    if interrupted(trial):
        return _cells(trial.number, {"state": "failed", "failure_class": "interrupted", "reason": INTERRUPTED,
                                     "flags": {}})
    return _cells(trial.number, record_of(trial))


def _cells(number: int, record: dict) -> dict[str, object]:
    figures = record.get("figures") or dict.fromkeys((*pareto.OBJECTIVES, pareto.GOODPUT))
    return {
        "trial": number, "state": record["state"], "driver": record.get("driver"),
        "flags": flags_key(record["flags"]),
        **figures,
        "violation": record.get("violation"), "failure_class": record.get("failure_class"),
        "reason": record.get("reason"), "duplicate_of": record.get("duplicate_of"),
        "evidence": record.get("evidence"), "duration_s": record.get("duration_s"),
        "hypervolume": 0.0, "on_front": False,
    }
