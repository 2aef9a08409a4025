"""Figures of the trace analysis: where GPU time goes, a few steps drawn out, measured against the roofline."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from spoc_lib.nsight.roofline import Verdict
from spoc_lib.report import style


def stacked(decomposition: pd.DataFrame) -> go.Figure:
    """Share of the window by category, one bar a GPU. `decomposition`: table DECOMPOSITION, phases summed."""
    part = decomposition.groupby(["pid", "device", "category"], observed=True, as_index=False)["busy_ns"].sum()
    part["window_ns"] = part.groupby(["pid", "device"])["busy_ns"].transform("sum")
    gpu = "GPU " + part["device"].astype(str)
    if part.groupby("device")["pid"].nunique().max() > 1:
        gpu = gpu + " (pid " + part["pid"].astype(str) + ")"
    figure = go.Figure()
    for position, (category, (name, colour)) in enumerate(style.KERNELS.items()):
        rows = part["category"] == category
        if rows.any() and part.loc[rows, "busy_ns"].sum() > 0:
            share = 100 * part.loc[rows, "busy_ns"] / part.loc[rows, "window_ns"]
            figure.add_bar(
                y=gpu[rows],
                x=share,
                orientation="h",
                name=name,
                marker=style.fill(colour, position),
                hovertemplate=name + ": %{x:.1f} %<extra></extra>",
            )
    return figure.update_layout(
        barmode="stack",
        title="Where each GPU's time goes",
        xaxis_title="share of the window (%)",
        height=170 + 46 * gpu.nunique(),
        xaxis_range=[0, 100],
    )


def kernel_timeline(kernels: pd.DataFrame) -> go.Figure:
    """A few steps drawn out, one row a GPU. `kernels`: columns device, start_s, duration_s, category, name."""
    figure = go.Figure()
    for category, (name, colour) in style.KERNELS.items():
        rows = kernels[kernels["category"] == category]
        if not rows.empty:
            figure.add_bar(
                y="GPU " + rows["device"].astype(str),
                x=rows["duration_s"] * 1e3,
                base=rows["start_s"] * 1e3,
                orientation="h",
                name=name,
                marker={"color": colour, "line": {"width": 0}},
                customdata=rows["name"].str.slice(0, 80),
                hovertemplate="%{customdata}<br>%{x:.3f} ms<extra></extra>",
            )
    return figure.update_layout(
        barmode="overlay",
        title="A few steps, kernel by kernel",
        xaxis_title="milliseconds",
        height=170 + 46 * kernels["device"].nunique(),
        bargap=0.3,
    )


def predictions(verdict: Verdict | None) -> go.Figure:
    """Measured beside predicted time of a mean step on one GPU, by category."""
    if verdict is None:
        return style.nothing("no roofline for this trace")
    table = verdict.table[(verdict.table["phase"] == "all") & (verdict.table["measured_s"] > 0)]
    names = [style.KERNELS.get(c, (c, ""))[0] for c in table["category"]]
    figure = go.Figure()
    for position, (field, name) in enumerate(
        (
            ("measured_s", "measured" if not verdict.simulated else "simulated"),
            ("fp4_naive_s", "roofline, FP4-naive"),
            ("w4a16_s", "roofline, W4A16"),
        )
    ):
        figure.add_bar(
            x=names,
            y=table[field] * 1e3,
            name=name,
            marker=style.fill((style.GREY, style.ORANGE, style.BLUE)[position], position),
        )
    return figure.update_layout(
        barmode="group", title="A mean step against the roofline", yaxis_title="milliseconds a step"
    )


def roofline_table(verdict: Verdict | None) -> pd.DataFrame:
    """The roofline's rows of the mean step, longest first."""
    if verdict is None:
        return pd.DataFrame(columns=["category"])
    rows = verdict.table[(verdict.table["phase"] == "all") & (verdict.table["measured_s"] > 0)]
    rows = rows.sort_values("measured_s", ascending=False)
    return pd.DataFrame(
        {
            "category": [style.KERNELS.get(c, (c, ""))[0] for c in rows["category"]],
            "measured_ms": rows["measured_s"] * 1e3,
            "roof_w4a16_ms": rows["w4a16_s"] * 1e3,
            "roof_fp4_naive_ms": rows["fp4_naive_s"] * 1e3,
            "binds": rows["binds"],
            "share_of_roof": rows["of_roof"],
        }
    )


def unknown_kernels(found: list[dict]) -> pd.DataFrame:
    """Kernels without a rule, by time."""
    return pd.DataFrame(found) if found else pd.DataFrame([{"name": "none: every kernel has a category"}])
