"""A fit as files: the persona YAML and the drawn goodness of fit."""

from __future__ import annotations

from spoc_lib.core import yamlfile
from spoc_lib.workload.fitting.fit import CHECKED, TOLERANCE, Fit


def to_yaml(fit: Fit) -> str:
    """The persona file, with its goodness of fit as a comment."""
    lines = [f"# Fitted to {fit.sessions} sessions, {fit.turns} requests. Sizes in tokens, times in seconds.",
             "# Realised against measured quantiles (whole crowd, played cold, gaps uncapped):"]
    for row in fit.table.itertuples():
        measured = " ".join(f"{getattr(row, f'measured_p{q}'):.6g}" for q in CHECKED)
        realised = " ".join(f"{getattr(row, f'realised_p{q}'):.6g}" for q in CHECKED)
        lines.append(f"#   {row.quantity}: p25 p50 p75 p90 measured {measured}; realised {realised}")
    body = yamlfile.dump(fit.document, width=120, default_flow_style=None)
    return "\n".join(lines) + "\n" + body


def draw(fit: Fit) -> str:
    """An HTML page without network: for each quantity the measured and realised quantiles against each other."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for row in fit.table.itertuples():
        measured = [getattr(row, f"measured_p{q}") for q in CHECKED]
        realised = [getattr(row, f"realised_p{q}") for q in CHECKED]
        ratio = [b / a if a else float("nan") for a, b in zip(measured, realised, strict=True)]
        figure.add_scatter(x=[f"p{q}" for q in CHECKED], y=ratio, mode="lines+markers", name=row.quantity,
                           customdata=list(zip(measured, realised, strict=True)),
                           hovertemplate="measured %{customdata[0]:.4g}, realised %{customdata[1]:.4g}")
    figure.add_hrect(y0=1 - TOLERANCE, y1=1 + TOLERANCE, opacity=0.15, line_width=0, fillcolor="green")
    figure.update_layout(title=f"Goodness of fit of {fit.personas.name}: realised over measured quantiles",
                         yaxis_title="realised / measured", template="plotly_white")
    return figure.to_html(include_plotlyjs=True, full_html=True)
