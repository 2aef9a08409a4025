"""Recorded sessions into a persona set, and how well it fits.

Sessions are grouped by the context window that holds their longest prompt, by whether their context was ever
compacted, and within that by the logarithm of their first prompt (k-means, deterministic start); each group becomes a
persona. Sizes and times keep the group's own quantiles, so the middle of every distribution is the measured one.
What a whole conversation adds to its context is a quantity of its own: long conversations grow less a turn, and turns
that grew independently would end elsewhere. Parametric families are fitted beside them and reported, for those who
prefer a formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.stats import percentile
from spoc_lib.workload.build import build_script
from spoc_lib.workload.fitting.persona import CHECKED, QUANTITIES, geometry_of, measured_quantities, persona_of, tally
from spoc_lib.workload.fitting.shapes import WINDOWS, families, grouped
from spoc_lib.workload.model.persona import PersonaSet
from spoc_lib.workload.traces.result import ImportResult

TOLERANCE = 0.05

@dataclass(frozen=True)
class Fit:
    """A fitted set and its goodness of fit.

    table: a row a quantity: measured and realised quantiles (whole crowd, realised by playing the set), their largest
        error at p25 to p90;
    families: a row a (quantity, family): parameters and distance (Kolmogorov and Smirnov).
    """

    personas: PersonaSet
    document: dict[str, Any]
    table: pd.DataFrame
    families: pd.DataFrame
    sessions: int
    turns: int

    @property
    def worst_error(self) -> float:
        """Largest relative error of any quantity at p25 to p90 (half a second, a step or a token forgiven)."""
        return float(self.table["worst_error"].max())


def fit(result: ImportResult, *, name: str = "fitted", source: str = "", groups: int = 2,
        windows: tuple[int, ...] = WINDOWS, check_users: int = 4000) -> Fit:
    """Fit a persona set to imported sessions.

    windows: context windows in tokens; a session belongs to the smallest that holds its longest prompt; groups: most
    personas in a window; check_users: conversations played to check the fit.

    InputError when there are fewer than 10 sessions of two or more requests.
    """
    sessions = [session for session in result.main_sessions if len(session.requests) >= 2]
    if len(sessions) < 10:
        raise InputError("too-few-sessions", f"only {len(sessions)} sessions have two or more requests; a fit needs "
                         "10: import more traces")
    persona_documents = [persona_of(f"G{k}", group, len(group) / len(sessions))
                         for k, group in enumerate(grouped(sessions, groups, windows))]
    _make_shares_whole(persona_documents)
    document = {
        "name": name, "title": f"fitted to {len(sessions)} sessions",
        "source": source or f"fitted to {', '.join(result.sources)}",
        "personas": persona_documents,
        "geometry": geometry_of(sessions),
    }
    personas = yamlfile.parse(PersonaSet, document, "the fitted persona set")
    measured = measured_quantities(sessions)
    return Fit(personas, document, _goodness(measured, realised_quantities(personas, check_users)),
               families(measured), len(sessions), sum(len(session.requests) for session in sessions))


def realised_quantities(personas: PersonaSet, users: int, seed: int = 7) -> dict[str, np.ndarray]:
    """The same over one whole conversation of each of `users` users, replies as planned, gaps uncapped."""
    script = build_script(personas, seed, start="cold", gap_cap_s=1e9)
    rows: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for user in script.users(users):
        history = 0
        requests: list[tuple[int, int, float | None, bool]] = []
        while True:
            turn = user.next(history)
            if turn.conversation > 0:
                break
            if turn.starts:
                history = 0
            history += sum(segment.tokens for segment in turn.append) + turn.output_tokens
            requests.append((turn.prompt_tokens, turn.output_tokens, turn.think_time_s, turn.kind != "agent"))
        tally(rows, requests)
    return {name: np.asarray(values, dtype=float) for name, values in rows.items()}


def _goodness(measured: dict[str, np.ndarray], realised: dict[str, np.ndarray]) -> pd.DataFrame:
    table = []
    for name in QUANTITIES:
        if not len(measured[name]) or not len(realised[name]):
            continue
        row: dict[str, Any] = {"quantity": name, "samples": len(measured[name]),
                               "measured_mean": float(measured[name].mean()),
                               "realised_mean": float(realised[name].mean())}
        errors = []
        for q in CHECKED:
            row[f"measured_p{q}"] = percentile(measured[name], q)
            row[f"realised_p{q}"] = percentile(realised[name], q)
            errors.append(_error(row[f"measured_p{q}"], row[f"realised_p{q}"], 0.5 if name.endswith(", s") else 1.0))
        table.append({**row, "worst_error": max(errors)})
    return pd.DataFrame(table)


def _error(measured: float, realised: float, grain: float) -> float:
    """Relative error; what is recorded in whole seconds, steps or tokens is not known better than its `grain`."""
    off = abs(realised - measured)
    return 0.0 if off <= grain else off / max(1e-9, abs(measured))


def _make_shares_whole(personas: list[dict[str, Any]]) -> None:
    personas[-1]["share"] = round(1 - sum(persona["share"] for persona in personas[:-1]), 6)
