"""What a search found: trials, front, knee, importances, the command, and the findings in words."""

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
class StudyResult:
    """A finished (or shown) search.

    trials: TRIALS; importances: flag, objective, importance; confirmations: finalists over HTTP, beside the twin;
    extra: sentences of the stages that this search had (screening, noise, drift); launches: real starts paid for.
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

    @cached_property
    def front(self) -> pd.DataFrame:
        """The feasible Pareto front, best throughput first; `probability` of membership where noise was measured."""
        rows = self.trials[self.trials["on_front"]].sort_values("output_tokens_per_s", ascending=False)
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
        alike = np.flatnonzero(feasible & pareto.as_good_as(self._points, self._points[found.index]))
        return self.trials.iloc[min(alike, key=self._changes)].to_dict()

    @property
    def _points(self) -> np.ndarray:
        return self.trials[list(pareto.OBJECTIVES)].to_numpy(float)

    def _changes(self, row: int) -> tuple[int, int]:
        flags = orjson.loads(self.trials["flags"].iloc[row])
        return sum(value != self.space.defaults[name] for name, value in flags.items()), row

    @property
    def knee_trial(self) -> int | None:
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
        return {**row, "flags": flags_key(self.simplified.flags),
                **dict(zip(pareto.OBJECTIVES, self.simplified.values, strict=True))}

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
        measured = self.defaults is not None and self.defaults["state"] in MEASURED
        table = recommend.effects(self.defaults if measured else None, self.chosen)
        if self.repeats is None or not measured:
            return table.assign(low=None, high=None)
        return table.merge(self.repeats.change(int(self.defaults["trial"]), int(self.chosen["trial"])), on="objective")

    @property
    def hypervolume(self) -> pd.DataFrame:
        """Columns trial, hypervolume (tokens/s, see `pareto.Reference`): how the front grew."""
        return self.trials[["trial", "hypervolume"]].copy()

    @property
    def states(self) -> dict[str, int]:
        """Number of trials a state."""
        return {str(k): int(v) for k, v in self.trials["state"].value_counts().items()}

    @property
    def failures(self) -> dict[str, int]:
        """Number of trials without a measurement, by class."""
        return {str(k): int(v) for k, v in self.trials["failure_class"].dropna().value_counts().items()}

    def findings(self) -> list[str]:
        """The result in sentences, computed from the tables."""
        from spoc_lib.search.findings import sentences

        return sentences(self)

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values, as `--json` writes it."""
        return {
            "cluster": self.cluster.name, "users": self.users, "seed": self.seed, "simulated": self.simulated,
            "trials": len(self.trials), "states": self.states, "failures": self.failures,
            "front": _rows(self.front), "knee": _row(self.knee), "nearest": _row(self.nearest),
            "defaults": _row(self.defaults), "best_flags": self.best_flags, "command": self.command,
            "command_flags": self.command_flags,
            "chosen_trial": None if self.chosen is None else int(self.chosen["trial"]),
            "changed": self.changed.to_dict("records"), "effects": self.effects.to_dict("records"),
            "hypervolume": float(self.trials["hypervolume"].iloc[-1]) if len(self.trials) else 0.0,
            "reference": self.reference, "importances": self.importances.to_dict("records"),
            "confirmations": self.confirmations, "space": self.space.describe(), "fixed": self.space.fixed,
            "simplified": self.simplified, "probabilities": self.probabilities, "passport": self.passport,
            "findings": self.findings(),
        }


def _row(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {**row, "flags": orjson.loads(row["flags"])}


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [_row(row) for row in table.to_dict("records")]
