"""The twin fitted to one launch: it screens for the others, and is held against them, which it has not seen.

The one launch is the defaults': its requests and the server's gauge give the step-time parameters
(`engine.steptime.fit_run`). Every other launch differs in its flags, so its figures are predictions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.config import Cluster
from spoc_lib.core.errors import InputError
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.steptime.calibrate import calibrate_run
from spoc_lib.engine.steptime.model import StepTimeModel
from spoc_lib.engine.steptime.parameters import Parameters
from spoc_lib.search import recommend
from spoc_lib.search.evaluate import TrialFailure
from spoc_lib.search.space import Flags, FlagSpace, digest, flags_key
from spoc_lib.search.study import SearchStudy, record_of
from spoc_lib.search.twin import TwinEvaluator

COLUMNS = ["trial", "changed", "objective", "label", "measured", "twin", "calibrated", "twin_error_ratio",
           "calibrated_error_ratio"]


@dataclass
class CalibratedTwin(TwinEvaluator):
    """The twin with step-time parameters of its own."""

    parameters: Parameters | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parameters is not None:
            self.version += f" fitted {digest(self.parameters.model_dump())}"

    def engine(self, flags: Flags) -> EmbeddedEngine:
        engine = super().engine(flags)
        if self.parameters is None or not isinstance(engine.step_time, StepTimeModel):
            return engine
        return dataclasses.replace(engine, step_time=engine.step_time.with_parameters(self.parameters))


@dataclass(frozen=True)
class HeldOut:
    """table: COLUMNS, one row a launch and objective (errors: predicted / measured - 1); sentence: the finding."""

    table: pd.DataFrame
    sentence: str


def held_out(study: SearchStudy, cluster: Cluster, twin: Callable[[Parameters | None], CalibratedTwin],
             parameters: Parameters | None = None) -> HeldOut:
    """Fit the twin to trial 0 of a real study and predict its other measured launches, each engine once.

    twin: makes the twin with given parameters (None: as shipped) at the users and seconds of the launches;
    parameters: what `fit_to_defaults` has found already (None: fitted now).
    """
    why_not = ""
    if parameters is None:
        parameters, why_not = fit_to_defaults(study, cluster)
    if parameters is None:
        return HeldOut(_empty(), why_not)
    trials = _distinct(study)
    if len(trials) < 2:
        return HeldOut(_empty(), "The twin was not held against the launches: another engine than the defaults must be "
                       "measured for that.")
    before, after = twin(None), twin(parameters)
    rows: list[dict[str, Any]] = []
    for record in trials[1:]:
        try:
            raw, fitted = (one.evaluate(record["flags"], study.folder).figures for one in (before, after))
        except TrialFailure:
            continue  # the twin refuses the flags: it predicts nothing there
        rows += [_row(record, name, study.space, raw[name], fitted[name]) for name in study.space.objectives]
    table = pd.DataFrame(rows, columns=COLUMNS)
    return HeldOut(table, _sentence(table))


def fit_to_defaults(study: SearchStudy, cluster: Cluster) -> tuple[Parameters | None, str]:
    """(step-time parameters from the launch of the defaults, ''); (None, why not in a sentence)."""
    trials = _distinct(study)
    if not trials or trials[0]["flags"] != study.space.defaults:
        return None, "The twin could not be fitted: the defaults were not measured."
    evidence = study.folder / trials[0]["evidence"]
    budget = {**study.space.context, **study.space.fixed, **study.space.defaults}["max_num_batched_tokens"]
    try:
        found = calibrate_run(cluster.model, evidence / "requests.parquet", evidence / "metrics.parquet",
                              gpu_name=cluster.hardware.gpu, gpu_count=cluster.hardware.count,
                              batched_tokens=int(budget))
    except InputError as error:
        return None, f"The twin could not be fitted to the defaults' launch: {error.message}."
    return found.parameters, ""


def _distinct(study: SearchStudy) -> list[dict[str, Any]]:
    """Records of the measured launches, the first of each engine, with their trial's number."""
    found: dict[str, dict[str, Any]] = {}
    for trial in study.trials():
        record = record_of(trial)
        if record.get("state") in ("complete", "infeasible"):
            found.setdefault(flags_key(record["flags"]), {"trial": trial.number, **record})
    return list(found.values())


def _row(record: dict[str, Any], name: str, space: FlagSpace, twin: float | None,
         calibrated: float | None) -> dict[str, Any]:
    measured = record["figures"][name]
    changed = ", ".join(f"{flag} {value}" for flag, value in record["flags"].items() if value != space.defaults[flag])
    return {"trial": record["trial"], "changed": changed, "objective": name, "label": recommend.LABELS[name][0],
            "measured": measured, "twin": twin, "calibrated": calibrated,
            "twin_error_ratio": _error(twin, measured), "calibrated_error_ratio": _error(calibrated, measured)}


def _error(predicted: float | None, measured: float | None) -> float:
    return predicted / measured - 1 if predicted is not None and measured else np.nan


def _sentence(table: pd.DataFrame) -> str:
    if table.empty:
        return "The twin refuses the flags of every other launch, so it predicts none."
    parts = []
    for label, rows in table.groupby("label", sort=False):
        after, before = (rows[name].abs().mean() for name in ("calibrated_error_ratio", "twin_error_ratio"))
        parts.append(f"{after:.0%} in {label} ({before:.0%} as shipped)")
    return (f"The twin, fitted to the defaults' launch alone, predicts the {table['trial'].nunique()} other engines, "
            f"which it has not seen, with a mean absolute error of {', '.join(parts)}.")


def _empty() -> pd.DataFrame:
    return pd.DataFrame(columns=COLUMNS)
