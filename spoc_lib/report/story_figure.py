"""A rung on one clock: phases of the load, what the client saw, the engine's gauges, every GPU, and throttle events."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from spoc_lib.report import style
from spoc_lib.telemetry.story import Story

#: Panels from top to bottom; those of the second tuple have a line a GPU.
SERVICE = ("TTFT (s)", "requests", "KV in use (%)")
GPUS = ("SM active (%)", "DRAM active (%)", "tensor active (%)", "SM clock (MHz)", "temperature (°C)")
PANEL_PX = 112
#: Names of series for readers, and their looks: colour and dash.
LINES = {
    "p50": ("client TTFT p50", style.BLUE, "solid"), "p95": ("client TTFT p95", style.ORANGE, "dash"),
    "running": ("running", style.BLUE, "solid"), "waiting": ("waiting", style.ORANGE, "dash"),
}
PHASES = {"cold start and warm-up": 0.16, "measured": 0.0, "drain": 0.28}


def story(told: Story) -> go.Figure:
    """`told` as stacked panels with one time axis: zoom in one and all follow.

    Many GPUs stay readable: each is a thin line of one colour, their mean a thick one, and a GPU that reported a clock
    event that slows it down stands out in red, in the panels and as a span.
    """
    shown = [panel for panel in (*SERVICE, *GPUS) if (told.series["panel"] == panel).any()]
    if not shown:
        return style.nothing("no telemetry was recorded for this rung")
    figure = make_subplots(rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=0.028, subplot_titles=shown)
    hot, seen = set(told.events["gpu"]), set[str]()
    for row, panel in enumerate(shown, 1):
        part = told.series[told.series["panel"] == panel]
        traces = _gpus(part, hot) if panel in GPUS else _service(part)
        for trace in traces:
            figure.add_trace(trace.update(showlegend=trace.name not in seen), row=row, col=1)
            seen.add(trace.name)
    for phase in told.phases.to_dict("records"):
        figure.add_vrect(x0=phase["start_s"], x1=phase["end_s"], fillcolor=style.GREY, line_width=0,
                         opacity=PHASES.get(phase["phase"], 0.1))
        span = phase["end_s"] - phase["start_s"]
        if span > 0.1 * told.phases["end_s"].max():  # room for its name
            figure.add_annotation(x=phase["start_s"] + span / 2, y=1.0, yref="paper", yshift=34, showarrow=False,
                                  text=phase["phase"], font={"size": 12, "color": style.INK})
    for event in told.events.to_dict("records"):
        figure.add_vrect(x0=event["start_s"], x1=event["end_s"], fillcolor=style.RED, opacity=0.12, line_width=0,
                         row=shown.index(GPUS[3]) + 1 if GPUS[3] in shown else "all", col=1)
    figure.update_xaxes(title_text="seconds since the first request", row=len(shown), col=1)
    figure.update_yaxes(rangemode="tozero")
    return figure.update_layout(
        height=PANEL_PX * len(shown) + 200, hovermode="x unified", margin={"t": 92, "b": 100},
        legend={"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        title=f"One clock: load, client, engine, GPUs (time stamps good to {1e3 * told.alignment_error_s:.3g} ms)")


def _service(part: pd.DataFrame) -> list[go.Scatter]:
    """A line a series; those without a look of their own share the first."""
    lines = []
    for name, series in part.groupby("series", sort=False):
        label, colour, dash = LINES.get(str(name), (part["panel"].iloc[0], style.BLUE, "solid"))
        lines.append(go.Scatter(x=series["time_s"], y=series["value"], mode="lines", name=label, legendgroup=label,
                                line={"color": colour, "dash": dash, "width": 1.6}))
    return lines


def _gpus(part: pd.DataFrame, hot: set[str]) -> list[go.Scatter]:
    """Every GPU thin, throttled ones red and last, the mean thick where there are several."""
    names = sorted(part["series"].unique(), key=lambda name: (name in hot, name))
    lines = []
    for name in names:
        series = part[part["series"] == name]
        label = f"throttled: {name}" if name in hot else "each GPU" if len(names) > 1 else "GPU"
        named = name in hot or len(names) == 1  # else the mean speaks for it
        lines.append(go.Scatter(
            x=series["time_s"], y=series["value"], mode="lines", name=label, legendgroup=label,
            hoverinfo="all" if named else "skip",
            line={"color": style.RED if name in hot else style.SKY, "width": 1.8 if name in hot else 0.8}))
    if len(names) > 1:
        mean = part.groupby("time_s")["value"].mean()
        label = f"mean of {len(names)} GPUs"
        lines.append(go.Scatter(x=mean.index, y=mean, mode="lines", name=label, legendgroup=label,
                                line={"color": style.BLUE, "width": 1.6}))
    return lines
