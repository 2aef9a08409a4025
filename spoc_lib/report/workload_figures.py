"""Figures of the workload: intended beside realised, what is shared, what the cap on think time does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from spoc_lib.report import style


def quantities(table: pd.DataFrame) -> go.Figure:
    """Intended p25 to p90 as bars with the median marked, realised quantiles as points; a panel a quantity.

    `table`: columns persona, quantity, intended_p25 … realised_p90 (`workload.audit.Audit.quantities`)."""
    names = list(dict.fromkeys(table["quantity"]))
    figure = make_subplots(rows=1, cols=len(names), subplot_titles=names, horizontal_spacing=0.05)
    for column, name in enumerate(names, 1):
        for position, row in enumerate(table[table["quantity"] == name].to_dict("records")):
            colour = style.persona_colour(row["persona"], position)
            figure.add_scatter(
                x=[row["persona"]] * 2,
                y=[row["intended_p25"], row["intended_p90"]],
                mode="lines",
                row=1,
                col=column,
                line={"color": colour, "width": 16},
                opacity=0.3,
                name="intended p25 to p90",
                legendgroup="intended",
                showlegend=column == 1 and position == 0,
            )
            figure.add_scatter(
                x=[row["persona"]],
                y=[row["intended_p50"]],
                mode="markers",
                row=1,
                col=column,
                marker={"symbol": "line-ew", "size": 20, "line": {"width": 2, "color": colour}},
                name="intended median",
                legendgroup="median",
                showlegend=column == 1 and position == 0,
            )
            figure.add_scatter(
                x=[row["persona"]] * 3,
                y=[row["realised_p25"], row["realised_p50"], row["realised_p90"]],
                mode="markers",
                marker={"color": colour, "size": 8, "symbol": ["triangle-up", "circle", "triangle-down"]},
                name="realised p25, p50, p90",
                legendgroup="realised",
                showlegend=column == 1 and position == 0,
                row=1,
                col=column,
            )
        shown = table.loc[table["quantity"] == name, ["intended_p25", "intended_p90", "realised_p25", "realised_p90"]]
        figure.update_yaxes(**style.log_axis(shown.to_numpy().ravel()), row=1, col=column)
    return figure.update_layout(title="Intended and realised, by persona", height=420)


def mix(table: pd.DataFrame) -> go.Figure:
    """Share of users by persona. `table`: columns persona, intended_share, realised_share."""
    figure = go.Figure()
    for position, (field, name) in enumerate((("intended_share", "intended"), ("realised_share", "realised"))):
        figure.add_bar(
            y=table["persona"],
            x=100 * table[field],
            orientation="h",
            name=name,
            marker=style.fill(style.SERIES[position], position),
        )
    return figure.update_layout(barmode="group", title="Mix of users", xaxis_title="share of users (%)", height=260)


def layers(table: pd.DataFrame) -> go.Figure:
    """Prompt tokens by layer: seen before (a cache could serve them) and first seen."""
    figure = go.Figure()
    for position, (field, name) in enumerate((("reused_tokens", "seen before"), ("first_seen_tokens", "first seen"))):
        figure.add_bar(
            y=table["layer"],
            x=table[field] / 1e6,
            orientation="h",
            name=name,
            marker=style.fill(style.SERIES[position], position),
        )
    return figure.update_layout(
        barmode="stack",
        title="Prompt tokens by layer of the common ground",
        xaxis_title="million tokens",
        yaxis={"autorange": "reversed"},
    )


def cache_curve(table: pd.DataFrame, ideal: float) -> go.Figure:
    """Hit rate by LRU size. `table`: columns cache_tokens, hit_ratio."""
    figure = go.Figure(
        go.Scatter(
            x=table["cache_tokens"], y=100 * table["hit_ratio"], mode="lines", line={"color": style.BLUE}, name="LRU"
        )
    )
    figure.add_hline(
        y=100 * ideal,
        line={"dash": "dash", "color": style.GREY},
        annotation_text=f"infinite cache: {ideal:.1%}",
        annotation_position="bottom left",
    )
    return figure.update_layout(
        title="Prefix hits by size of the cache",
        xaxis={"type": "log", "title": {"text": "cache size (tokens)"}},
        yaxis_title="prompt tokens served (%)",
        yaxis_rangemode="tozero",
    )


def gap_caps(table: pd.DataFrame) -> go.Figure:
    """Users that one request in flight stands for, by cap on think time."""
    colours = [style.ORANGE if used else style.BLUE for used in table["in_use"]]
    figure = go.Figure(
        go.Bar(
            x=[f"{cap:g} s" for cap in table["gap_cap_s"]],
            y=table["users_per_request"],
            marker=style.fill(colours, 0) | {
                "pattern": {"shape": ["/" if used else "" for used in table["in_use"]], "fillmode": "overlay",
                            "fgcolor": "rgba(255,255,255,0.7)"}},
            text=table["users_per_request"].map("{:.1f}".format),
            textposition="auto",
        )
    )
    return figure.update_layout(
        title="Users behind one request in flight (orange, hatched: the cap in use)",
        xaxis_title="cap on think time",
        yaxis_title="users",
        height=320,
    )


def gates(found: Sequence[Any]) -> pd.DataFrame:
    """The audit's gates as a table."""
    return pd.DataFrame([{"gate": g.name, "passed": g.passed, "finding": g.sentence} for g in found])
