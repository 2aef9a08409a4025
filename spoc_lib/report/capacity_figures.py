"""Figures of the verdict: users by cluster, and how the comparison moves with the SLA."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from spoc_lib.config import Cluster
from spoc_lib.report import style
from spoc_lib.report.tables import column, label
from spoc_lib.report.verdict import Answer


def capacities(table: pd.DataFrame) -> go.Figure:
    """Max users by cluster with their intervals. `table`: columns cluster, max_users, low, high."""
    known = table.dropna(subset=["max_users"])
    figure = go.Figure(
        go.Bar(
            x=known["cluster"],
            y=known["max_users"],
            text=known["max_users"].map("{:.0f}".format),
            textposition="auto",
            marker=style.fill([style.cluster_colour(i) for i in range(len(known))], 0),
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


def limits(curve: pd.DataFrame, clusters: Sequence[Cluster]) -> go.Figure:
    """Max users of each cluster by the limit on one metric (top), and the ratio of the first two (below).

    `curve`: columns metric, limit_s, cluster, users, low, high (`evidence.limit_curve`)."""
    metrics = list(dict.fromkeys(curve["metric"]))
    rows = 2 if len(clusters) > 1 else 1
    figure = make_subplots(
        rows=rows,
        cols=max(1, len(metrics)),
        shared_xaxes=True,
        vertical_spacing=0.08,
        subplot_titles=[f"limit on {m.upper()}" for m in metrics],
    )
    for place, metric in enumerate(metrics, 1):
        part = curve[curve["metric"] == metric].replace([np.inf, -np.inf], np.nan)
        for position, cluster in enumerate(clusters):
            own = part[part["cluster"] == cluster.name]
            figure.add_scatter(
                x=own["limit_s"],
                y=own["users"],
                mode="lines+markers",
                name=cluster.name,
                legendgroup=cluster.name,
                showlegend=place == 1,
                line={"color": style.cluster_colour(position), "dash": style.DASHES[position]},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": own["high"] - own["users"],
                    "arrayminus": own["users"] - own["low"],
                    "thickness": 1,
                },
                row=1,
                col=place,
            )
        if rows == 2:
            wide = part.pivot_table(index="limit_s", columns="cluster", values="users")
            known = wide[(wide > 0).all(axis=1)] if len(wide) else wide
            first, second = clusters[0].name, clusters[1].name
            if {first, second} <= set(known):
                figure.add_scatter(
                    x=known.index,
                    y=known[first] / known[second],
                    mode="lines+markers",
                    showlegend=place == 1,
                    name=f"{first} : {second}",
                    line={"color": style.GREY},
                    row=2,
                    col=place,
                )
            naive = clusters[0].hardware.count / clusters[1].hardware.count
            figure.add_hline(
                y=naive,
                line={"dash": "dash", "color": style.GREY},
                row=2,
                col=place,
                annotation_text=f"GPU count: {naive:g}",
            )
    figure.update_xaxes(type="log")
    figure.update_xaxes(title_text="limit (s)", row=rows)
    figure.update_yaxes(title_text="max users", row=1, col=1, rangemode="tozero")
    if rows == 2:
        figure.update_yaxes(title_text="ratio", row=2, col=1, rangemode="tozero")
    return figure.update_layout(title="The answer under other limits", height=300 * rows + 80)


def latency_by_cluster(answers: Sequence[Answer]) -> go.Figure:
    """p95 TTFT and ITL against users, the clusters side by side."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=[label("ttft_p95_s"), label("itl_p95_s")])
    for position, answer in enumerate(answers):
        rungs = answer.climbed.sort_values("users")
        for panel, name in enumerate(("ttft_p95_s", "itl_p95_s"), 1):
            figure.add_scatter(
                x=rungs["users"],
                y=rungs[name] * column(name).scale,
                mode="lines+markers",
                row=1,
                col=panel,
                name=answer.cluster.name,
                legendgroup=answer.cluster.name,
                showlegend=panel == 1,
                line={"color": style.cluster_colour(position), "dash": style.DASHES[position]},
                marker={"symbol": style.MARKERS[position]},
            )
    for slo in answers[0].cluster.slos if answers else []:
        name = f"{slo.metric}_p95_s"
        if slo.persona == "all" and name in ("ttft_p95_s", "itl_p95_s"):
            figure.add_hline(
                y=slo.limit_s * column(name).scale,
                row=1,
                col=1 if slo.metric == "ttft" else 2,
                line={"dash": "dash", "color": style.RED, "width": 1.5},
            )
    figure.update_xaxes(title_text="live users")
    figure.update_yaxes(type="log")
    return figure.update_layout(title="Latency against users (limit dashed)")
