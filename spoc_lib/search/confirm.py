"""Finalists before a real server: Locust load over HTTP, beside the twin at the very same users and seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.core.files import read_json, write_json
from spoc_lib.search.evaluate import Evaluator, Measurement, TrialFailure
from spoc_lib.search.recommend import point
from spoc_lib.search.space import Flags, flags_key

#: The two clocks agree when no objective differs by more than this share.
AGREEMENT = 0.15


@dataclass(frozen=True, slots=True)
class Confirmation:
    """One finalist over HTTP.

    role: knee | defaults | front | nearest; http and twin: objective -> value (null where it failed);
    ratio: http / twin; agrees: within AGREEMENT; sentence: the finding.
    """

    role: str
    trial: int
    flags: dict[str, Any]
    users: int
    http: dict[str, float] | None
    twin: dict[str, float] | None
    ratio: dict[str, float] | None
    agrees: bool | None
    evidence: str
    failure_class: str | None
    sentence: str


def finalists(trials: pd.DataFrame, chosen: int | None, defaults: int | None, count: int) -> list[tuple[str, int]]:
    """(role, trial) of the trials worth a real server, most wanted first: the knee (without a feasible trial: the
    nearest), the defaults, then the rest of the front by the throughput that they reach."""
    picked: list[tuple[str, int]] = []
    if chosen is not None:
        knee_state = trials.set_index("trial").loc[chosen, "state"]
        picked.append(("knee" if knee_state == "complete" else "nearest", chosen))
    measured = trials[trials["state"].isin(["complete", "infeasible"])]
    if defaults is not None and chosen != defaults and (measured["trial"] == defaults).any():
        picked.append(("defaults", defaults))
    rest = trials[trials["on_front"] & ~trials["trial"].isin([number for _, number in picked])]
    picked += [("front", int(n)) for n in rest.sort_values("output_tokens_per_s", ascending=False)["trial"]]
    return picked[:count]


def confirm(role: str, trial: int, flags: Flags, http: Evaluator, twin: Evaluator, folder: Path,
            progress: Callable[[str], None] | None = None) -> Confirmation:
    """Measure one finalist both ways. An answer that is already in `folder` for the same flags is read, not paid
    for again."""
    path = folder / "confirmation.json"
    if path.exists():
        known = Confirmation(**read_json(path, "confirmation"))
        if flags_key(known.flags) == flags_key(flags) and known.users == http.users:
            return known
    folder.mkdir(parents=True, exist_ok=True)
    if progress:
        progress(f"confirming the {role} (trial {trial}) at {http.users} users over HTTP")
    twin_values = None
    try:
        predicted = twin.evaluate(flags, _made(folder / "twin"))
        twin_values = dict(zip(predicted.objectives, predicted.values, strict=True))
        measured = http.evaluate(flags, _made(folder / "http"))
    except TrialFailure as failure:
        found = Confirmation(role, trial, dict(flags), http.users, None, twin_values, None, None, str(folder.name),
                             failure.failure_class, f"The {role} could not be confirmed: {failure.message}.")
    else:
        found = _compared(role, trial, flags, http.users, measured, twin_values, folder)
    write_json(path, found)
    return found


def _compared(role: str, trial: int, flags: Flags, users: int, measured: Measurement, twin: Mapping[str, float],
              folder: Path) -> Confirmation:
    http = dict(zip(measured.objectives, measured.values, strict=True))
    ratio = {name: http[name] / twin[name] if twin[name] else math.inf for name in measured.objectives}
    worst = max(ratio, key=lambda name: abs(ratio[name] - 1))
    agrees = abs(ratio[worst] - 1) <= AGREEMENT
    sentence = (f"The {role} over HTTP with {users} Locust users: {point(measured.figures, measured.objectives)}; "
                + (f"all within {AGREEMENT:.0%} of the twin's virtual clock." if agrees else
                   f"{worst} is {ratio[worst] - 1:+.0%} away from the twin's virtual clock."))
    return Confirmation(role, trial, dict(flags), users, http, dict(twin), ratio, agrees, folder.name, None,
                        sentence)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
