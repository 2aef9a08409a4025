"""The sentences under the figures of the search, each computed from the trials that its figure draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from spoc_lib.report.search_figures import LATENCIES, OBJECTIVES, along, measured
from spoc_lib.report.tables import column
from spoc_lib.report.wording import change, counted, listed, moved, point

#: Growth of the hypervolume over the last quarter of the trials from which a search counts as still climbing.
CLIMBING = 0.01
#: A flag whose importance is below this for every objective hardly matters.
HARDLY = 0.05


def _front(trials: pd.DataFrame) -> pd.DataFrame:
    done = measured(trials)
    return done[done["on_front"].fillna(False).astype(bool)]


def pareto_3d(trials: pd.DataFrame, knee: int | None, objectives: Sequence[str] = OBJECTIVES) -> list[str]:
    """How many trials are worth having, and the knee; without a front, which trial comes nearest to the SLOs."""
    done, front = measured(trials), _front(trials)
    lost = int((trials["failure_class"] == "interrupted").sum())
    cut = f" Cut off by an interruption: {counted(lost, 'trial')}." if lost else ""
    if done.empty:
        return [f"None of {counted(len(trials), 'trial')} was measured, so there is no point to draw.{cut}"]
    good = int((done["state"] == "complete").sum())
    said = [f"Measured: {len(done)} of {counted(len(trials), 'trial')}; within the SLOs: {good}; on the front: "
            f"{len(front)}.{cut}"]
    if not good:
        known = done.dropna(subset=["violation"])
        if len(known):
            row = known.loc[known["violation"].idxmin()]
            said.append(f"Trial {row['trial']} comes nearest ({point(row, objectives)}): it misses the SLOs by "
                        f"{row['violation']:.0%} of their limits in sum.")
    chosen = done[done["trial"] == knee] if knee is not None else done[:0]
    if len(chosen):
        said.append(f"The knee is trial {knee}: {point(chosen.iloc[0], objectives)}.")
    return said


def pareto_pairs(trials: pd.DataFrame, objectives: Sequence[str] = OBJECTIVES,
                 spreads: pd.DataFrame | None = None) -> list[str]:
    """What one objective costs in the others along the front, and how far a point scatters where it was repeated."""
    front = _front(trials)
    if front.empty:
        return ["No measured trial is on a front, so nothing can be traded.", _scatter(spreads)]
    if len(front) == 1:
        return [f"Trial {front['trial'].iloc[0]} is the whole front: of the trials within the SLOs none is better in "
                f"any objective.", _scatter(spreads)]
    best: dict[int, list[str]] = {}
    for name in objectives:
        up = column(name).better == "higher"
        row = front[name].idxmax() if up else front[name].idxmin()
        best.setdefault(row, []).append(f"{'most' if up else 'lowest'} {column(name).label}")
    ends = [f"{listed(what)}: trial {front.loc[row, 'trial']} ({point(front.loc[row], objectives)})"
            for row, what in best.items()]
    if len(ends) == 1:
        return [f"One trial of the front is best in all objectives: {ends[0]}.", _scatter(spreads)]
    text = "; ".join(ends)
    return [f"{text[0].upper()}{text[1:]}.", _scatter(spreads)]


def _scatter(spreads: pd.DataFrame | None) -> str:
    """The widest range between repeats of one trial, by objective."""
    if spreads is None or spreads.empty:
        return "No trial was repeated, so how far a point scatters is not known."
    parts = []
    for name, rows in spreads.groupby("objective", sort=False):
        middle = (rows["high"] + rows["low"]) / 2
        wide = ((rows["high"] - rows["low"]) / middle.where(middle > 0)).replace(np.inf, np.nan).max()
        if not math.isnan(wide):
            parts.append(f"{column(str(name)).label} by up to {wide:.1%}")
    if not parts:
        return "The repeats of trials failed, so how far a point scatters is not known."
    return f"Repeats of one trial differ in {listed(parts)}: points that are nearer than that are not told apart."


def hypervolume(trials: pd.DataFrame, objectives: Sequence[str] = OBJECTIVES) -> list[str]:
    """Whether the last quarter of the trials still made the front larger."""
    rows = trials.dropna(subset=["hypervolume"]).sort_values("trial")
    volume = rows["hypervolume"].to_numpy(float)
    if not len(volume) or volume[-1] <= 0:
        return ["No measured trial is within the SLOs, so the front dominates nothing yet."]
    if len(volume) < 4:
        return [f"{counted(len(volume), 'trial')} cannot show whether the search converged."]
    quarter = math.ceil(len(volume) / 4)
    before, last = volume[-quarter - 1], volume[-1]
    reached = int(rows["trial"].iloc[int(np.flatnonzero(volume >= last)[0])])
    unit, final = column(objectives[0]).unit, int(rows["trial"].iloc[-1])
    if before >= last:
        return [f"Flat since trial {reached} of {final}, at {last:,.4g} {unit}: the last {counted(quarter, 'trial')} "
                f"added nothing."]
    if before <= 0:
        return [f"Still climbing: the first trial within the SLOs is among the last {quarter}, so more trials may find "
                f"a better front."]
    grown = last / before - 1
    added = "the last quarter of the trials added " + (f"{grown:.1%}" if grown >= 0.001 else "less than 0.1%")
    added += f" (the last growth at trial {reached} of {final})"
    if grown < CLIMBING:
        return [f"Levelling off: {added}."]
    return [f"Still climbing: {added}, so more trials may find a better front."]


def importances(table: pd.DataFrame) -> list[str]:
    """The flag that matters most for each objective, and those that matter for none. `table`: flag, objective,
    importance."""
    known = table.dropna(subset=["importance"])
    if known.empty or not known["importance"].max() > 0:
        return ["Too few trials were measured, or too little varied among them, to say which flags matter."]
    best = known.loc[known.groupby("objective", sort=False)["importance"].idxmax()]
    parts = []
    for flag, rows in best.groupby("flag", sort=False):
        shares = [f"{column(str(r.objective)).label} ({r.importance:.0%})" for r in rows.itertuples()]
        parts.append(f"{flag} for {listed(shares)}")
    said = [f"What sets the best quarter of the trials apart is {'; '.join(parts)}."]
    most = known.groupby("flag", sort=False)["importance"].max()
    hardly = [str(flag) for flag in most[most < HARDLY].index]
    if hardly:
        said.append(f"{listed(hardly)} stay below {HARDLY:.0%} for every objective: leave them at their defaults." if
                    len(hardly) > 1 else f"{hardly[0]} stays below {HARDLY:.0%} for every objective: leave it at its "
                    f"default.")
    return said


def slices(trials: pd.DataFrame, flag: str = "max_num_batched_tokens") -> list[str]:
    """From the largest to the smallest value of one flag, all others at their defaults: what TTFT and ITL do."""
    done = along(trials, flag)
    if done.empty:
        return [f"No measured trial sets {flag}, so what it trades is not seen."]
    line = done[done["alone"]].groupby("value")[list(LATENCIES)].mean()
    if len(line) < 2:
        return [f"No two measured trials differ in {flag} alone, so what it trades is not seen by itself."]
    small, large = line.iloc[0], line.iloc[-1]
    ttft, itl = (change(name, large[name], small[name]) for name in LATENCIES)
    first, second = (moved(large[name], small[name]) for name in LATENCIES)
    verdict = {(1, -1): "a smaller value buys ITL with TTFT", (-1, 1): "a smaller value buys TTFT with ITL",
               (0, 0): "it moves neither"}.get((first, second), "no trade between the two is seen here")
    return [f"From {flag} = {line.index[-1]} to {line.index[0]}, all else at its default, TTFT p95 {ttft} and ITL p95 "
            f"{itl}: {verdict}."]
