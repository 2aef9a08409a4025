"""Figures of the concurrency sweep: latency against users, where users are, each SLO's verdict."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from spoc_lib.config import SHARES, Slo
from spoc_lib.report import style
from spoc_lib.report.tables import column, label


def ladder(rungs: pd.DataFrame, slos: Sequence[Slo], capacity: dict) -> go.Figure:
    """Latency percentiles against users, one panel a metric that has an SLO; the limit dashed, the capacity's
    interval shaded. Filled markers: virtual clock; open: real HTTP. `rungs`: table RUNGS."""
    overall = [s for s in slos if s.persona == "all" and s.metric in ("ttft", "itl", "tpot")] or list(slos)[:2]
    names = [f"{s.metric}_p{s.percentile:g}_s" for s in overall]
    shown = [(s, n) for s, n in zip(overall, names, strict=True) if n in rungs]
    figure = make_subplots(rows=1, cols=max(1, len(shown)), subplot_titles=[label(n) for _, n in shown])
    for position, (slo, name) in enumerate(shown, 1):
        scale = column(name).scale
        for driver, part in rungs.sort_values("users").groupby("driver"):
            mean = part.groupby("users")[name].median() * scale
            figure.add_scatter(
                x=part["users"],
                y=part[name] * scale,
                mode="markers",
                row=1,
                col=position,
                name=str(driver),
                legendgroup=str(driver),
                showlegend=position == 1,
                marker={
                    "size": 10,
                    "symbol": [style.VERDICT_SYMBOLS.get(v, "cross") + ("" if driver == "virtual" else "-open")
                               for v in part["verdict"]],
                    "line": {"width": 2},
                    "color": [style.VERDICTS.get(v, style.GREY) for v in part["verdict"]],
                },
                customdata=part[["verdict", "reason"]],
                hovertemplate="%{x} users: %{y:.3g}<br>%{customdata[0]} %{customdata[1]}",
            )
            if driver == "virtual":
                figure.add_scatter(
                    x=mean.index,
                    y=mean,
                    mode="lines",
                    line={"color": style.GREY, "width": 1},
                    row=1,
                    col=position,
                    showlegend=False,
                    hoverinfo="skip",
                )
        figure.add_hline(
            y=slo.limit_s * scale,
            line={"color": style.RED, "dash": "dash", "width": 1.5},
            row=1,
            col=position,
            annotation_text="limit",
            annotation_position="top left",
        )
        interval = capacity.get("interval") or []
        if len(interval) == 2:
            figure.add_vrect(
                x0=interval[0],
                x1=rungs["users"].max() if interval[1] is None else interval[1],
                fillcolor=style.BLUE,
                opacity=0.15,
                line_width=0,
                row=1,
                col=position,
            )
    figure.update_xaxes(title_text="live users")
    figure.update_yaxes(rangemode="tozero")
    return figure.update_layout(title="Latency against users")


def one_driver(rungs: pd.DataFrame) -> pd.DataFrame:
    """The rungs that the first one's driver played, by users: those of the ladder."""
    return rungs[rungs["driver"] == rungs["driver"].iloc[0]].sort_values("users", kind="stable")


def users(rungs: pd.DataFrame) -> go.Figure:
    """Where the users of each rung are: thinking, or waiting for and reading an answer."""
    part = one_driver(rungs).drop_duplicates("users", keep="last")
    x = part["users"].astype(str)
    figure = go.Figure(
        [
            go.Bar(
                x=x,
                y=part["in_flight_users"],
                name="in flight",
                marker=style.fill(style.ORANGE, 1),
            ),
            go.Bar(x=x, y=part["thinking_users"], name="thinking", marker={"color": style.BLUE}),
        ]
    )
    return figure.update_layout(
        barmode="stack",
        title="Live users: thinking or in flight",
        xaxis={"type": "category", "title": {"text": "users of the rung"}},
        yaxis_title="users, time average",
    )


def throughput(rungs: pd.DataFrame) -> go.Figure:
    """Output tokens/s and prefix-cache hits against users, the median of rungs of as many users."""
    figure = make_subplots(
        rows=1,
        cols=2,
        subplot_titles=[label("output_tokens_per_s"), label("cached_ratio") + ", " + label("kv_usage_ratio")],
    )
    for position, (driver, part) in enumerate(rungs.sort_values("users").groupby("driver")):
        part = part.groupby("users", as_index=False)[["output_tokens_per_s", "cached_ratio", "kv_usage_ratio"]].median()
        colour, dash = style.DRIVERS.get(str(driver), style.GREY), style.DASHES[position]
        figure.add_scatter(
            x=part["users"],
            y=part["output_tokens_per_s"],
            mode="lines+markers",
            name=f"output, {driver}",
            line={"color": colour, "dash": dash},
            row=1,
            col=1,
        )
        for name, tone in (("cached_ratio", style.GREEN), ("kv_usage_ratio", style.PURPLE)):
            figure.add_scatter(
                x=part["users"],
                y=part[name] * 100,
                mode="lines+markers",
                name=f"{column(name).label}, {driver}",
                line={"color": tone, "dash": dash},
                row=1,
                col=2,
            )
    figure.update_xaxes(title_text="live users")
    figure.update_yaxes(rangemode="tozero")
    return figure.update_layout(title="Throughput and cache against users")


def _time_text(seconds: float) -> str:
    if pd.isna(seconds):
        return ""
    if seconds == float("inf"):
        return "∞"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 else \
        f"{seconds * 1e6:.0f} µs"


def slo_matrix(slo: pd.DataFrame, personas: pd.DataFrame) -> go.Figure:
    """Verdict by SLO and users, then by persona, as coloured cells with the value in them. Both: table SLO_VERDICTS."""
    part = pd.concat([personas, slo], ignore_index=True)
    part = part[part["driver"] == slo["driver"].iloc[0]].copy()
    share = part["metric"].isin(SHARES)
    percentile = (" p" + part["percentile"].map("{:g}".format)).mask(share, "")
    part["name"] = part["persona"] + " " + part["metric"] + percentile
    part["text"] = part["value_s"].map(_time_text).mask(share, part["beyond_ratio"].map("{:.1%} beyond".format))
    codes = {"met": 0, "undecided": 1, "missed": 2}
    part["code"] = part["verdict"].map(codes).fillna(1)
    part["text"] = part["verdict"].map(style.VERDICT_SIGNS).fillna("?") + " " + part["text"].astype(str)
    grid = part.pivot_table(index="name", columns="users", values="code", aggfunc="max")
    worst = part.sort_values("code", kind="stable")
    text = worst.pivot_table(index="name", columns="users", values="text", aggfunc="last").reindex_like(grid)
    scale = [
        (0, style.GREEN),
        (0.33, style.GREEN),
        (0.34, style.YELLOW),
        (0.66, style.YELLOW),
        (0.67, style.RED),
        (1, style.RED),
    ]
    figure = go.Figure(
        go.Heatmap(
            z=grid.values,
            x=[str(u) for u in grid.columns],
            y=list(grid.index),
            text=text.fillna("").values,
            texttemplate="%{text}",
            colorscale=scale,
            zmin=0,
            zmax=2,
            showscale=False,
            xgap=2,
            ygap=2,
            opacity=0.85,
        )
    )
    return figure.update_layout(
        title="SLO verdict by rung: ✓ met (green), ? undecided (yellow), ✗ missed (red)",
        xaxis={"type": "category", "title": {"text": "live users"}},
        height=150 + 34 * len(grid),
    )
