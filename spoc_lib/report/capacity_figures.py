"""Figures of the verdict: users by cluster, and how the comparison moves with the SLA."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from spoc_lib.report import style


def capacities(table: pd.DataFrame) -> go.Figure:
    """Max users by cluster with their intervals. `table`: columns cluster, max_users, low, high."""
    known = table.dropna(subset=["max_users"])
    figure = go.Figure(
        go.Bar(
            x=known["cluster"],
            y=known["max_users"],
            text=known["max_users"].map("{:.0f}".format),
            textposition="auto",
            marker={
                "color": [style.cluster_colour(i) for i in range(len(known))],
                "pattern": {"shape": [style.PATTERNS[i % 4] for i in range(len(known))], "fgopacity": 0.3},
            },
            error_y={
                "type": "data",
                "symmetric": False,
                "array": known["high"] - known["max_users"],
                "arrayminus": known["max_users"] - known["low"],
                "thickness": 2,
                "width": 10,
            },
        )
    )
    return figure.update_layout(
        title="Users that each cluster holds under the SLA",
        yaxis_title="live users",
        bargap=0.5,
        yaxis_rangemode="tozero",
    )


def ratio_curve(table: pd.DataFrame, naive: float | None, first: str, second: str) -> go.Figure:
    """Capacity of each cluster and their ratio against the ITL limit.

    `table`: columns limit_s, ratio, low, high; `naive`: ratio of GPU counts."""
    figure = go.Figure()
    x = table["limit_s"] * 1e3
    if {"low", "high"} <= set(table):
        figure.add_scatter(
            x=[*x, *x[::-1]],
            y=[*table["high"], *table["low"][::-1]],
            fill="toself",
            name="interval",
            fillcolor="rgba(0,114,178,0.18)",
            line={"width": 0},
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=x, y=table["ratio"], mode="lines+markers", name=f"{first} : {second}", line={"color": style.BLUE}
    )
    if naive:
        figure.add_hline(
            y=naive, line={"dash": "dash", "color": style.GREY}, annotation_text=f"GPU count alone: {naive:g}"
        )
    return figure.update_layout(
        title="The ratio depends on the SLA",
        xaxis_title="limit on ITL (ms)",
        yaxis_title="ratio of max users",
        yaxis_rangemode="tozero",
    )
