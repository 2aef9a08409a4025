"""A finished search: its answer, the sentences that say it, and both as plain values for a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
import pandas as pd

from spoc_lib.search.answer import MEASURED, Answer
from spoc_lib.search.findings import sentences

__all__ = ["MEASURED", "StudyResult"]


@dataclass(frozen=True)
class StudyResult(Answer):
    """An `Answer` that speaks."""

    def findings(self) -> list[str]:
        """The result in sentences, computed from the tables."""
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
            "objectives": self.objectives, "reference": self.reference,
            "importances": self.importances.to_dict("records"),
            "confirmations": self.confirmations, "space": self.space.describe(), "fixed": self.space.fixed,
            "simplified": self.simplified, "probabilities": self.probabilities, "passport": self.passport,
            "heldout": None if self.heldout is None else self.heldout.to_dict("records"),
            "findings": self.findings(),
        }


def _row(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else _plain(row)


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [_plain({str(name): value for name, value in row.items()}) for row in table.to_dict("records")]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "flags": orjson.loads(row["flags"])}
