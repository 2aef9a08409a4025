"""Two traces compared: what got slower, by category, kernel and step, normalised so that sizes do not matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.core.errors import InputError
from spoc_lib.nsight.categories import CATEGORIES, TITLES
from spoc_lib.nsight.decompose import Decomposition

UNITS = ("token", "step", "second")
_WORDS = {"token": "a token", "step": "a step", "second": "a second of the window"}

_LENGTHS_APART = 0.05  # of windows, of mixes of phases, of time outside steps, from which it is said


@dataclass(frozen=True)
class Diff:
    """GPU time per `unit` (token, step, or second of the window where neither is told), seconds, mean over GPUs.

    categories: phase, category, a_s, b_s, delta_s, ratio (b/a, inf for what only B has); phase `all` first.
    kernels: name, category, a_s, b_s, delta_s, largest change first. steps: phase, a_steps, b_steps, a_mean_s,
    b_mean_s, ratio.
    """

    a: str
    b: str
    unit: str
    a_units: float
    b_units: float
    categories: pd.DataFrame
    kernels: pd.DataFrame
    steps: pd.DataFrame
    ratio: float
    sentence: str
    notes: list[str]

    def to_dict(self) -> dict:
        """For JSON, with the fifty kernels that moved most."""
        return {"a": self.a, "b": self.b, "unit": self.unit, "a_units": self.a_units, "b_units": self.b_units,
                "ratio": self.ratio, "sentence": self.sentence, "categories": self.categories.to_dict("records"),
                "kernels": self.kernels.head(50).to_dict("records"), "steps": self.steps.to_dict("records"),
                "notes": self.notes}


def diff(a: Decomposition, b: Decomposition, unit: str | None = None,
         tokens: tuple[float, float] | None = None) -> Diff:
    """Compare B with A. unit: token, step or second; default: the finest that both traces tell. tokens: those that A
    and B processed in their windows, where the traces do not tell. InputError for a unit that they do not tell."""
    told = ["token"] if tokens else [u for u in UNITS if _units(a, u) and _units(b, u)]
    if unit is not None and unit not in told:
        raise InputError("untold-unit", f"the two traces do not both tell {unit}s: compare by {' or '.join(told)}, or "
                         f"say how many tokens each processed (--tokens A:B)")
    unit = unit or told[0]
    whole = unit == "second" or tokens is not None
    a_units, b_units = tokens or (_units(a, unit), _units(b, unit))
    categories = _by_category(a, b, unit, (a_units, b_units), whole)
    overall = categories[categories.phase == "all"]
    a_total, b_total = overall.a_s.sum(), overall.b_s.sum()
    ratio = float(b_total / a_total) if a_total else float("inf")
    notes = []
    if unit == "second":
        notes.append("neither tokens nor steps are told by both traces: shares of the window are compared, not cost")
    if abs(a.window_s / b.window_s - 1) > _LENGTHS_APART:
        notes.append(f"A's window lasts {a.window_s:.3g} s, B's {b.window_s:.3g} s: what is compared is {_WORDS[unit]}")
    outside = [0.0 if whole or not d.table.busy_ns.sum() else 1 - _inside(d) for d in (a, b)]
    if max(outside) > _LENGTHS_APART:
        notes.append(f"{outside[0]:.0%} of A's and {outside[1]:.0%} of B's kernel time lies outside the steps: it is "
                     f"among the kernels below, and in no category")
    if a.simulated != b.simulated:
        notes.append(f"{'A' if a.simulated else 'B'} is simulated, the other is measured")
    gpus = len(a.totals()), len(b.totals())
    if gpus[0] != gpus[1]:
        notes.append(f"A has {gpus[0]} GPUs, B has {gpus[1]}: times are those of one GPU")
    return Diff(a.path, b.path, unit, a_units, b_units, categories, _by_kernel(a, b, a_units, b_units), _by_step(a, b),
                ratio, _sentence(overall, unit, a_total, b_total) + ("" if whole else _mix(a, b, unit, categories)),
                notes)


def _units(d: Decomposition, unit: str, phase: str | None = None) -> float:
    """Units in the window on one GPU; 0 where the trace does not tell."""
    if unit == "second":
        return d.window_s
    steps = d.steps if phase is None else d.steps[d.steps.phase == phase]
    if steps.empty:
        return 0.0
    gpus = len(d.totals())
    if unit == "step":
        return len(steps) / gpus
    tokens = pd.to_numeric(steps.tokens)
    return float(tokens.sum()) / gpus if tokens.notna().all() else 0.0


def _seconds(d: Decomposition, whole: bool, phase: str | None) -> pd.Series:
    """Seconds by category and idle on one GPU: of the steps, or of the whole window."""
    gpus = len(d.totals())
    if whole:
        return d.table.groupby("category", observed=True).busy_ns.sum() / gpus / 1e9
    steps = d.steps if phase is None else d.steps[d.steps.phase == phase]
    ns = {c: steps[f"{c}_ns"].sum() for c in CATEGORIES}
    return pd.Series({**ns, "idle": steps.launch_gap_ns.sum() + steps.host_gap_ns.sum()}) / gpus / 1e9


def _by_category(a: Decomposition, b: Decomposition, unit: str, totals: tuple[float, float], whole: bool
                 ) -> pd.DataFrame:
    both = [] if whole else [p for p in a.steps.phase.unique() if p in set(b.steps.phase.unique())]
    rows = []
    for phase in (None, *both):
        columns = []
        for d, total in zip((a, b), totals, strict=True):
            units = total if phase is None else _units(d, unit, phase)
            columns.append(_seconds(d, whole, phase) / units if units else pd.Series(dtype=float))
        for category in (*CATEGORIES, "idle"):
            x, y = float(columns[0].get(category, 0.0)), float(columns[1].get(category, 0.0))
            if x or y:
                rows.append({"phase": phase or "all", "category": category, "a_s": x, "b_s": y, "delta_s": y - x,
                             "ratio": y / x if x else float("inf")})
    return pd.DataFrame(rows)


def _by_kernel(a: Decomposition, b: Decomposition, a_units: float, b_units: float) -> pd.DataFrame:
    def per_unit(d: Decomposition, units: float) -> pd.Series:
        return d.kernels.groupby(["name", "category"]).total_ns.sum() / len(d.totals()) / 1e9 / units

    both = pd.concat({"a_s": per_unit(a, a_units), "b_s": per_unit(b, b_units)}, axis=1).fillna(0.0).reset_index()
    both["delta_s"] = both.b_s - both.a_s
    return both.iloc[np.argsort(-both.delta_s.abs().to_numpy(), kind="stable")].reset_index(drop=True)


def _by_step(a: Decomposition, b: Decomposition) -> pd.DataFrame:
    rows = []
    for phase in dict.fromkeys([*a.steps.phase, *b.steps.phase]):
        x, y = (d.steps[d.steps.phase == phase].duration_ns for d in (a, b))
        means = [float(v.mean()) / 1e9 if len(v) else float("nan") for v in (x, y)]
        rows.append({"phase": phase, "a_steps": int(_units(a, "step", phase)), "b_steps": int(_units(b, "step", phase)),
                     "a_mean_s": means[0], "b_mean_s": means[1], "ratio": means[1] / means[0] if means[0] else None})
    return pd.DataFrame(rows, columns=["phase", "a_steps", "b_steps", "a_mean_s", "b_mean_s", "ratio"])


def _inside(d: Decomposition) -> float:
    """Share of the kernels' time that lies in steps."""
    busy = d.table[d.table.category != "idle"]
    return float(busy[busy.phase != "none"].busy_ns.sum() / max(1, busy.busy_ns.sum()))


def _mix(a: Decomposition, b: Decomposition, unit: str, categories: pd.DataFrame) -> str:
    """Where the windows hold other shares of prompts and single tokens, what differs within each: the mean over all
    steps moves with the mix even where no step got slower."""
    shares = [{p: _units(d, unit, p) / _units(d, unit) for p in d.steps.phase.unique()} for d in (a, b)]
    phases = sorted({*shares[0], *shares[1]})
    if max(abs(shares[0].get(p, 0) - shares[1].get(p, 0)) for p in phases) < _LENGTHS_APART:
        return ""
    totals = categories.groupby("phase")[["a_s", "b_s"]].sum()
    within = [f"{p} {totals.b_s[p] / totals.a_s[p] - 1:+.1%}" for p in phases if p in totals.index and totals.a_s[p]]
    mixed = ", ".join(f"{p} {shares[0].get(p, 0):.0%} of A's {unit}s and {shares[1].get(p, 0):.0%} of B's"
                      for p in phases)
    told = ", ".join(within) or "none is in both"
    return f" The windows hold other mixes ({mixed}); within a phase: {told}."


def _sentence(overall: pd.DataFrame, unit: str, a_total: float, b_total: float) -> str:
    """The first thing that the table's rows of all phases say; the largest change is the table's largest."""
    top = overall.loc[overall.delta_s.abs().idxmax()]
    moved = f"{TITLES[top.category]} {'+' if top.delta_s >= 0 else '-'}{abs(top.delta_s) * 1e6:.1f} us"
    if not top.delta_s:
        return "Nothing changed between A and B."
    if unit == "second":
        return (f"Of a second of the window, {TITLES[top.category]} changes most ({moved}): {top.a_s:.1%} in A, "
                f"{top.b_s:.1%} in B.")
    change = b_total / a_total - 1 if a_total else float("inf")
    if abs(change) < 0.01:
        return (f"B takes as long as A for {_WORDS[unit]} ({b_total * 1e6:.1f} us against {a_total * 1e6:.1f} us); the "
                f"largest change is {moved}.")
    return (f"B takes {abs(change):.1%} {'longer' if change > 0 else 'less'} for {_WORDS[unit]} "
            f"({b_total * 1e6:.1f} us against {a_total * 1e6:.1f} us); the largest change is {moved}.")
