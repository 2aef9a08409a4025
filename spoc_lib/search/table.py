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


def trials_table(trials: Sequence[FrozenTrial], reference: pareto.Reference) -> pd.DataFrame:
    """TRIALS of all answered and interrupted trials, in order. `on_front` marks the feasible front, each distinct
    engine once; `hypervolume` is that of the feasible trials so far, in tokens/s (see `pareto.Reference`)."""
    rows = [_row(t) for t in trials if RECORD in t.user_attrs or interrupted(t)]
    if rows:
        points = np.array([[r[name] if r[name] is not None else np.nan for name in pareto.OBJECTIVES] for r in rows])
        feasible = np.array([r["state"] == "complete" for r in rows])
        member = pareto.front(points, feasible)
        history = pareto.hypervolume_history(points, feasible, reference)
        for row, on_front, volume in zip(rows, member, history, strict=True):
            row |= {"on_front": bool(on_front), "hypervolume": float(volume)}
    return as_table(rows, schemas.TRIALS).to_pandas()


def _row(trial: FrozenTrial) -> dict[str, object]:
    if interrupted(trial):
        return _cells(trial.number, {"state": "failed", "failure_class": "interrupted", "reason": INTERRUPTED,
                                     "flags": {}})
    return _cells(trial.number, record_of(trial))


def _cells(number: int, record: dict) -> dict[str, object]:
    values = record.get("values") or [None, None, None]
    return {
        "trial": number, "state": record["state"], "driver": record.get("driver"),
        "flags": flags_key(record["flags"]),
        **dict(zip(pareto.OBJECTIVES, values, strict=True)),
        "violation": record.get("violation"), "failure_class": record.get("failure_class"),
        "reason": record.get("reason"), "duplicate_of": record.get("duplicate_of"),
        "evidence": record.get("evidence"), "duration_s": record.get("duration_s"),
        "hypervolume": 0.0, "on_front": False,
    }
