"""Figures of the search: the Pareto front in three dimensions and in pairs, its growth, what mattered."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from spoc_lib.report import style
from spoc_lib.report.tables import column, label

#: Symbols that WebGL draws from a font which not every machine has, and what stands for them.
_SOLID = {"x": "circle-open"}

OBJECTIVES = ("output_tokens_per_s", "ttft_p95_s", "itl_p95_s")

LATENCIES = ("ttft_p95_s", "itl_p95_s")


def measured(trials: pd.DataFrame) -> pd.DataFrame:
    """The trials that have a measurement of their own, within the SLOs or not."""
    return trials[trials["state"].isin(["complete", "infeasible"])]


def _groups(trials: pd.DataFrame, knee: int | None):
    """(name, rows, marker) of the groups that every scatter shows."""
    done = measured(trials)
    front, feasible = done["on_front"].fillna(False).astype(bool), done["state"] == "complete"
    yield "misses an SLO", done[~feasible], {"color": style.GREY, "symbol": "x", "size": 7}
    yield "meets the SLOs", done[feasible & ~front], {"color": style.SKY, "symbol": "circle", "size": 8}
    yield "Pareto front", done[front], {"color": style.BLUE, "symbol": "circle", "size": 10}
    yield "vLLM's defaults", done[done["trial"] == 0], {"color": style.ORANGE, "symbol": "square", "size": 11}
    if knee is not None:
        yield "knee", done[done["trial"] == knee], {"color": style.RED, "symbol": "diamond", "size": 12}


def _hover(rows: pd.DataFrame) -> list[str]:
    return [
        f"trial {t}<br>" + "<br>".join(f"{k} = {v}" for k, v in json.loads(f).items())
        for t, f in zip(rows["trial"], rows["flags"], strict=True)
    ]


def pareto_3d(trials: pd.DataFrame, knee: int | None, objectives: Sequence[str] = OBJECTIVES) -> go.Figure:
    """All trials in the space of the three `objectives`. `trials`: table TRIALS."""
    figure = go.Figure()
    digits = column(objectives[0]).digits
    for name, rows, marker in _groups(trials, knee):
        x, y, z = (rows[n] * column(n).scale for n in objectives)
        figure.add_scatter3d(
            x=x,
            y=y,
            z=z,
            mode="markers",
            name=name,
            marker={**marker, "size": marker["size"] * 0.6, "symbol": _SOLID.get(marker["symbol"], marker["symbol"])},
            text=_hover(rows),
            hovertemplate=f"%{{text}}<br>%{{x:.{digits}f}} {column(objectives[0]).unit}, %{{y:.2f}} s, %{{z:.1f}} ms"
                          "<extra></extra>",
        )
    done = measured(trials)
    axes = {axis: {"title": {"text": label(n)}, **(style.log_axis(done[n] * column(n).scale) if n in LATENCIES else {})}
            for axis, n in zip(("xaxis", "yaxis", "zaxis"), objectives, strict=True)}
    return figure.update_layout(scene={**axes, "camera": {"eye": {"x": 1.5, "y": 1.5, "z": 1.2}}}, height=560,
                                title="Trials in the space of the three objectives")


def pareto_pairs(trials: pd.DataFrame, knee: int | None, objectives: Sequence[str] = OBJECTIVES,
                 spreads: pd.DataFrame | None = None) -> go.Figure:
    """The same trials, two objectives at a time; bars span the repeats of a trial.

    spreads: columns trial, objective, low, high, a row a trial that was repeated and an objective.
    """
    first, ttft, itl = objectives
    pairs = ((ttft, first), (itl, first), (ttft, itl))
    figure = make_subplots(rows=1, cols=3, horizontal_spacing=0.09)
    for name, rows, marker in _groups(trials, knee):
        for position, (x, y) in enumerate(pairs, 1):
            figure.add_scatter(
                x=rows[x] * column(x).scale,
                y=rows[y] * column(y).scale,
                error_x=_bars(rows, x, spreads, marker["color"]),
                error_y=_bars(rows, y, spreads, marker["color"]),
                mode="markers",
                name=name,
                marker=marker,
                legendgroup=name,
                showlegend=position == 1,
                text=_hover(rows),
                hovertemplate="%{text}<extra></extra>",
                row=1,
                col=position,
            )
    for position, (x, y) in enumerate(pairs, 1):
        done = measured(trials)
        figure.update_xaxes(title_text=label(x), **style.log_axis(done[x] * column(x).scale), row=1, col=position)
        shape = style.log_axis(done[y] * column(y).scale) if y in LATENCIES else {"type": "linear"}
        figure.update_yaxes(title_text=label(y), **shape, row=1, col=position)
    return figure.update_layout(title="The front, two objectives at a time")


def _bars(rows: pd.DataFrame, objective: str, spreads: pd.DataFrame | None, color: str) -> dict | None:
    """Plotly's error bars from each trial's point to the lowest and highest of its repeats; None where none was."""
    if spreads is None or spreads.empty:
        return None
    known = spreads[spreads["objective"] == objective].set_index("trial")
    found = known.reindex(rows["trial"])
    value = rows[objective].to_numpy(float)
    up, down = found["high"].to_numpy(float) - value, value - found["low"].to_numpy(float)
    scale = column(objective).scale
    return {"type": "data", "symmetric": False, "array": scale * np.nan_to_num(up).clip(min=0),
            "arrayminus": scale * np.nan_to_num(down).clip(min=0), "thickness": 1, "width": 3, "color": color}


def hypervolume(trials: pd.DataFrame, objectives: Sequence[str] = OBJECTIVES) -> go.Figure:
    """Hypervolume that the feasible front dominates, trial by trial, in the unit of the first of `objectives`."""
    rows = trials.dropna(subset=["hypervolume"])
    figure = go.Figure(
        go.Scatter(x=rows["trial"], y=rows["hypervolume"], mode="lines", line={"shape": "hv", "color": style.BLUE})
    )
    return figure.update_layout(title="Hypervolume by trial", xaxis_title="trial",
                                yaxis_title=f"hypervolume ({column(objectives[0]).unit})")


def importances(table: pd.DataFrame) -> go.Figure:
    """Share of each flag in each objective's variance. `table`: columns flag, objective, importance."""
    if table.empty:
        return style.nothing("too few measured trials to say which flags mattered")
    figure = go.Figure()
    for position, (objective, part) in enumerate(table.groupby("objective", sort=False)):
        figure.add_bar(
            y=part["flag"],
            x=part["importance"],
            orientation="h",
            name=column(str(objective)).label,
            marker=style.fill(style.SERIES[position], position),
        )
    return figure.update_layout(
        barmode="group",
        title="Which flags mattered",
        xaxis_title="importance (PED-ANOVA)",
        height=140 + 60 * table["flag"].nunique(),
    )


def along(trials: pd.DataFrame, flag: str) -> pd.DataFrame:
    """The measured trials that set `flag`, by its `value`; `alone`: they differ from the defaults, the first trial that
    was answered, in nothing else."""
    done = measured(trials)
    flags = done["flags"].map(json.loads)
    done = done.assign(value=flags.map(lambda one: one.get(flag)), alone=False)
    answered = trials.loc[trials["failure_class"].fillna("") != "interrupted", "flags"]
    if len(answered):
        first = json.loads(answered.iloc[0])
        done["alone"] = flags.map(lambda one: all(one[name] == first.get(name) for name in one if name != flag))
    return done.dropna(subset=["value"]).sort_values("value")


def slices(trials: pd.DataFrame, flag: str = "max_num_batched_tokens") -> go.Figure:
    """TTFT and ITL against one flag: the chunked-prefill trade-off. The line joins the trials that differ from the
    defaults in this flag alone; the others differ in more."""
    done = along(trials, flag)
    if done.empty:
        return style.nothing(f"no measured trial sets {flag}")
    figure = make_subplots(rows=1, cols=2, subplot_titles=[label("ttft_p95_s"), label("itl_p95_s")])
    for position, name in enumerate(LATENCIES, 1):
        line = done[done["alone"]].groupby("value", as_index=False)[name].mean()
        for group, rows, mode, text, size, colour in (
            ("other flags differ too", done[~done["alone"]], "markers", _hover(done[~done["alone"]]), 7, style.GREY),
            ("only this flag differs", line, "lines+markers", None, 9, style.BLUE),
        ):
            figure.add_scatter(
                x=rows["value"],
                y=rows[name] * column(name).scale,
                mode=mode,
                name=group,
                legendgroup=group,
                text=text,
                marker={"color": colour, "size": size},
                hovertemplate="%{text}<extra></extra>" if text else "%{x}: %{y:.3g}<extra></extra>",
                row=1,
                col=position,
                showlegend=position == 1,
            )
    ticks = sorted(done["value"].unique())[:: max(1, done["value"].nunique() // 6)]
    figure.update_xaxes(title_text=flag, type="log", tickvals=ticks, ticktext=[str(tick) for tick in ticks])
    for position, name in enumerate(LATENCIES, 1):
        figure.update_yaxes(**style.log_axis(done[name] * column(name).scale), row=1, col=position)
    return figure.update_layout(title=f"The chunked-prefill trade-off: latency against {flag}")


def outcomes(trials: pd.DataFrame) -> pd.DataFrame:
    """How the trials ended: columns state, failure_class, trials, and one reason of each."""
    groups = trials.assign(failure_class=trials["failure_class"].fillna("")).groupby(
        ["state", "failure_class"], sort=False
    )
    return groups.agg(trials=("trial", "size"), example=("reason", "first")).reset_index()


def heldout(table: pd.DataFrame | None) -> pd.DataFrame:
    """Launches as the fitted twin predicts them (`search.heldout.COLUMNS`), a row a launch and objective, in the
    figures' own units; a single row saying so where there was nothing to predict."""
    if table is None or table.empty:
        return pd.DataFrame([{"prediction": "nothing was predicted: the engine is the twin itself, or too few launches "
                                            "were measured"}])
    scale = [column(name).scale for name in table["objective"]]
    shown = table.assign(figure=[label(name) for name in table["objective"]],
                         **{name: table[name].to_numpy(float) * scale for name in ("measured", "twin", "calibrated")})
    return shown.rename(columns={"calibrated": "fitted twin", "twin": "twin as shipped"})[
        ["trial", "changed", "figure", "measured", "twin as shipped", "twin_error_ratio", "fitted twin",
         "calibrated_error_ratio"]]


def confirmations(found: list) -> pd.DataFrame:
    """The finalists over HTTP beside the twin, one row each. `found`: `search.confirm.Confirmation`s."""
    if not found:
        return pd.DataFrame([{"confirmation": "none was asked for: on a real engine every trial above is real load"}])
    rows = []
    for item in found:
        row = {"role": item.role, "trial": item.trial, "users": item.users, "agrees": item.agrees}
        for name in (item.http or item.twin or {}):
            for driver, values in (("HTTP", item.http), ("twin", item.twin)):
                shown = None if values is None else values[name] * column(name).scale
                row[f"{label(name)}, {driver}"] = shown
        rows.append(row)
    return pd.DataFrame(rows)
