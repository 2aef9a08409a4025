"""Figures of the verdict: users by cluster, and how the comparison moves with the SLA."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from spoc_lib.config import Cluster
from spoc_lib.report import style
from spoc_lib.report.answer import Answer
from spoc_lib.report.tables import column, label


def capacities(answers: Sequence[Answer]) -> go.Figure:
    """Max users by cluster with their intervals; an unresolved one is left out."""
    figure = go.Figure()
    for answer, look in zip(answers, style.looks([a.cluster for a in answers]), strict=True):
        if answer.users is None or answer.interval is None:
            continue
        low, high = answer.interval
        figure.add_bar(
            x=[answer.users],
            y=[answer.cluster.name],
            orientation="h",
            name=answer.cluster.name,
            showlegend=False,
            marker=look.bar,
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - answer.users if math.isfinite(high) else 0],
                "arrayminus": [answer.users - low],
                "thickness": 2,
                "width": 8,
                "color": style.INK,
            },
        )
        figure.add_annotation(
            x=high if math.isfinite(high) else answer.users, y=answer.cluster.name, xanchor="left", xshift=8,
            showarrow=False, text=f"{answer.users:g} ({low:g} to {high:g})" if math.isfinite(high) else
            f"at least {answer.users:g}",
        )  # fmt: skip
    most = max((a.interval[1] for a in answers if a.interval and math.isfinite(a.interval[1])), default=None)
    return figure.update_layout(
        title="Users that each cluster holds under the SLA",
        xaxis={"title": {"text": "live users"}, "range": [0, 1.3 * most] if most else None},
        yaxis={"autorange": "reversed"},
        bargap=0.45,
        height=130 + 70 * max(1, len(answers)),
    )


def limits(curve: pd.DataFrame, clusters: Sequence[Cluster], *, ratio: bool) -> go.Figure:
    """Max users of each cluster by the limit on one metric (top), and with `ratio` that of the first two (below).

    `curve`: columns metric, limit_s, cluster, users, low, high (`evidence.limit_curve`)."""
    metrics = list(dict.fromkeys(curve["metric"]))
    rows = 2 if ratio and len(clusters) > 1 else 1
    figure = make_subplots(
        rows=rows,
        cols=max(1, len(metrics)),
        shared_xaxes=True,
        vertical_spacing=0.08,
        subplot_titles=[f"limit on {m.upper()}" for m in metrics],
    )
    for place, metric in enumerate(metrics, 1):
        part = curve[curve["metric"] == metric].replace([np.inf, -np.inf], np.nan)
        for look, cluster in zip(style.looks(clusters), clusters, strict=True):
            own = part[part["cluster"] == cluster.name]
            figure.add_scatter(
                x=own["limit_s"],
                y=own["users"],
                mode="lines+markers",
                name=cluster.name,
                legendgroup=cluster.name,
                showlegend=place == 1,
                line=look.line,
                marker=look.marker,
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
        figure.update_xaxes(**style.log_axis(part["limit_s"]), col=place)
    figure.update_xaxes(title_text="limit (s)", row=rows)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="max users", row=1, col=1)
    if rows == 2:
        figure.update_yaxes(title_text="ratio", row=2, col=1)
    return figure.update_layout(title="The answer under other limits", height=300 * rows + 80)


def latency_by_cluster(answers: Sequence[Answer]) -> go.Figure:
    """p95 TTFT and ITL against users, the clusters side by side."""
    figure = make_subplots(rows=1, cols=2, subplot_titles=[label("ttft_p95_s"), label("itl_p95_s")])
    for look, answer in zip(style.looks([a.cluster for a in answers]), answers, strict=True):
        rungs = answer.climbed.replace([np.inf, -np.inf], np.nan).sort_values("users")
        middle = rungs.groupby("users")[["ttft_p95_s", "itl_p95_s"]].median()
        for panel, name in enumerate(("ttft_p95_s", "itl_p95_s"), 1):
            own = {"name": answer.cluster.name, "legendgroup": answer.cluster.name, "row": 1, "col": panel}
            scale = column(name).scale
            figure.add_scatter(x=middle.index, y=middle[name] * scale, mode="lines", line=look.line, showlegend=False,
                               hoverinfo="skip", **own)
            figure.add_scatter(x=rungs["users"], y=rungs[name] * scale, mode="markers", marker=look.marker,
                               showlegend=panel == 1, **own)
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
    for panel, name in enumerate(("ttft_p95_s", "itl_p95_s"), 1):
        shown = [value * column(name).scale for answer in answers for value in answer.climbed[name]]
        figure.update_yaxes(**style.log_axis(shown), row=1, col=panel)
    return figure.update_layout(title="Latency against users (limit dashed)")


def personas_at_limit(waits: pd.DataFrame, clusters: Sequence[Cluster], metric: str) -> go.Figure:
    """p95 of one metric by persona at each cluster's limit. `waits`: `findings.personas_at_limit`."""
    figure = go.Figure()
    part = waits[(waits["metric"] == metric) & np.isfinite(waits["value_s"])]
    scale = column(f"{metric}_p95_s").scale
    for look, cluster in zip(style.looks(clusters), clusters, strict=True):
        own = part[part["cluster"] == cluster.name]
        figure.add_bar(x=own["persona"], y=own["value_s"] * scale, name=cluster.name, marker=look.bar,
                       text=(own["value_s"] * scale).map("{:.3g}".format), textposition="outside", cliponaxis=False)
    return figure.update_layout(title="Who waits", barmode="group", yaxis_title=label(f"{metric}_p95_s"),
                                xaxis_title="persona", showlegend=len(clusters) > 1)


def kernel_shares(table: pd.DataFrame) -> go.Figure:
    """Share of GPU time by kernel category, one bar a cluster. `table`: `evidence.kernel_table`."""
    figure = go.Figure()
    for position, (category, (name, colour)) in enumerate(style.KERNELS.items()):
        if category in table:
            figure.add_bar(y=table["cluster"], x=table[category], orientation="h", name=name,
                           marker=style.fill(colour, position), hovertemplate=name + ": %{x:.1f} %<extra></extra>")
    return figure.update_layout(barmode="stack", title="Where GPU time goes", xaxis_title="share of GPU time (%)",
                                xaxis_range=[0, 100], yaxis={"autorange": "reversed"}, height=210 + 56 * len(table))
