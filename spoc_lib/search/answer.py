"""What a search found, as tables and choices: trials, front, knee, the command, what changed against the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pandas as pd

from spoc_lib.config import Cluster
from spoc_lib.search import pareto, recommend
from spoc_lib.search.confirm import Confirmation
from spoc_lib.search.repeats import Repeats
from spoc_lib.search.simplify import Simplified
from spoc_lib.search.space import Flags, FlagSpace, flags_key

MEASURED = ("complete", "infeasible")


@dataclass(frozen=True)
class Answer:
    """A finished (or shown) search.

    trials: TRIALS; importances: flag, objective, importance; confirmations: finalists over HTTP, beside the twin;
    extra: sentences of the stages that this search had (screening, noise, drift); heldout: launches as a twin that had
    not seen them predicts them (`heldout.COLUMNS`; null where the twin is the engine itself).
    """

    cluster: Cluster
    space: FlagSpace
    seed: int
    users: int
    reference: pareto.Reference
    trials: pd.DataFrame
    importances: pd.DataFrame
    confirmations: list[Confirmation] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    simulated: bool = True
    passport: dict[str, Any] | None = None
    probabilities: dict[int, float] = field(default_factory=dict)
    repeats: Repeats | None = None
    simplified: Simplified | None = None
    heldout: pd.DataFrame | None = None

    @cached_property
    def front(self) -> pd.DataFrame:
        """The feasible Pareto front, best throughput first; `probability` of membership where noise was measured."""
        rows = self.trials[self.trials["on_front"]].sort_values(self.objectives[0], ascending=False)
        return rows.assign(probability=[self.probabilities.get(int(n), np.nan) for n in rows["trial"]])

    @cached_property
    def knee(self) -> dict[str, Any] | None:
        """The recommended trial's row; None when no trial meets the SLOs.

        By `pareto.KNEE_RULE`, then the plainest engine that cannot be told from that point: of all trials within
        the SLOs that are nowhere worse than it by more than the resolution, the one that changes the fewest flags.
        """
        found = pareto.knee(self._points, self.trials["on_front"].to_numpy())
        if found is None:
            return None
        feasible = (self.trials["state"] == "complete").to_numpy()
        alike = feasible & pareto.as_good_as(self._points, self._points[found.index])
        return self.trials.iloc[min(map(int, np.flatnonzero(alike)), key=self._changes)].to_dict()

    @property
    def objectives(self) -> pareto.Objectives:
        """Names of the three objectives, as columns of `trials`."""
        return self.space.objectives

    @property
    def _points(self) -> np.ndarray:
        return self.trials[list(self.objectives)].to_numpy(float)

    def _changes(self, row: int) -> tuple[int, int]:
        flags = orjson.loads(self.trials["flags"].iloc[row])
        return sum(value != self.space.defaults[name] for name, value in flags.items()), row

    @property
    def knee_trial(self) -> int | None:
        """Number of the knee's trial; None without a feasible one."""
        return None if self.knee is None else int(self.knee["trial"])

    @cached_property
    def nearest(self) -> dict[str, Any] | None:
        """The measured trial that misses the SLOs by least; None when some trial meets them or none was measured."""
        measured = self.trials[self.trials["state"] == "infeasible"]
        if self.knee is not None or measured.empty:
            return None
        return measured.loc[measured["violation"].idxmin()].to_dict()

    @cached_property
    def defaults(self) -> dict[str, Any] | None:
        """The row of the engine's defaults (trial 0); None when it was not reached."""
        answered = self.trials[self.trials["failure_class"] != "interrupted"]
        return None if answered.empty else answered.iloc[0].to_dict()

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The knee, else the nearest: where it was simplified, with the flags and objectives of that."""
        row = self.knee or self.nearest
        if row is None or self.simplified is None:
            return row
        return {**row, "flags": flags_key(self.simplified.flags), **self.simplified.figures}

    @property
    def best_flags(self) -> Flags:
        """The searched flags to serve with: the knee's without the changes that change nothing; without a feasible
        trial those of the nearest, else the defaults."""
        return dict(self.space.defaults) if self.chosen is None else orjson.loads(self.chosen["flags"])

    @property
    def command(self) -> str:
        """The ready `vllm serve` command (shell)."""
        return self.command_as("shell")

    def command_as(self, form: recommend.Format) -> str:
        """The ready command for shell, compose or kubernetes: the fixed flags and what the knee changes."""
        return recommend.command(self.cluster, self.command_flags, form)

    @property
    def command_flags(self) -> Flags:
        """What the ready command passes."""
        changed = {k: v for k, v in self.best_flags.items() if v != self.space.defaults[k]}
        return {**self.space.fixed, **changed}

    @property
    def changed(self) -> pd.DataFrame:
        """Columns flag, default, chosen: what the recommendation sets otherwise than the engine would."""
        return recommend.changed_flags(self.space.defaults, self.best_flags)

    @property
    def effects(self) -> pd.DataFrame:
        """The recommendation against the defaults, an objective a row (empty without a measured trial).

        `low`, `high`: range of `change_ratio` over samples of users (null where nothing was repeated)."""
        if self.chosen is None:
            return pd.DataFrame(columns=["objective", "label", "better", "default", "chosen", "change_ratio", "low",
                                         "high"])
        before = self.defaults
        measured = before is not None and before["state"] in MEASURED
        table = recommend.effects(before if measured else None, self.chosen, self.objectives)
        if self.repeats is None or before is None or not measured:
            return table.assign(low=None, high=None)
        return table.merge(self.repeats.change(int(before["trial"]), int(self.chosen["trial"])), on="objective")

    @cached_property
    def spreads(self) -> pd.DataFrame:
        """Columns trial, objective, low, high: the range over the repeats of a trial's engine, where there were any."""
        groups = {} if self.repeats is None else {t: values for t, values in self.repeats.values.items()}
        for _, group in self.trials[self.trials["state"].isin(MEASURED)].groupby("flags", sort=False):
            if len(group) > 1:
                groups[int(group["trial"].iloc[0])] = group[list(self.objectives)].to_numpy(float)
        rows = [{"trial": trial, "objective": name, "low": float(np.nanmin(column)), "high": float(np.nanmax(column))}
                for trial, values in groups.items()
                for name, column in zip(self.objectives, values.T, strict=True) if not np.isnan(column).all()]
        return pd.DataFrame(rows, columns=["trial", "objective", "low", "high"])

    @property
    def hypervolume(self) -> pd.DataFrame:
        """Columns trial, hypervolume (see `pareto.Reference`): how the front grew."""
        return self.trials[["trial", "hypervolume"]].copy()

    @property
    def states(self) -> dict[str, int]:
        """Number of trials a state."""
        return {str(k): int(v) for k, v in self.trials["state"].value_counts().items()}

    @property
    def failures(self) -> dict[str, int]:
        """Number of trials without a measurement, by class."""
        return {str(k): int(v) for k, v in self.trials["failure_class"].dropna().value_counts().items()}
