"""A figure with the question that it answers and the finding that the data gives: no figure stands alone."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from spoc_lib.report.tables import Finding

#: Height of the template's title, which the question takes the place of, and the least margin that is left: for the
#: buttons, and for titles of panels below them.
TITLE_PX, BUTTONS_PX, PANEL_TITLES_PX = 40, 36, 56


class Asked:
    """Question, figure, findings, shown in this order. The sentences travel with the figure (`layout.meta`), where the
    page takes its text for those who do not see it; `reading` says how to read it, under the question."""

    def __init__(self, question: str, figure: go.Figure, *findings: str, reading: str = "", tone: str = "note") -> None:
        self.question, self.reading = question, reading
        self.finding = Finding(*findings, tone=tone)
        least_px = PANEL_TITLES_PX if figure.layout.annotations else BUTTONS_PX
        margin_px = max(least_px, (figure.layout.margin.t or 0) - TITLE_PX)
        self.figure = figure.update_layout(
            title=None, meta={"question": question, "finding": " ".join(self.finding.sentences)},
            margin_t=margin_px)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(_Question(self.question, self.reading))
        display(self.figure)
        if self.finding.sentences:
            display(self.finding)

    def __repr__(self) -> str:
        return "\n".join([self.question, *self.finding.sentences])


class _Question:
    def __init__(self, text: str, reading: str) -> None:
        self.text, self.reading = text, reading

    def _repr_html_(self) -> str:
        how = f'<p class="spoc-reading">{html.escape(self.reading)}</p>' if self.reading else ""
        return f'<p class="spoc-question">{html.escape(self.text)}</p>{how}'

    def __repr__(self) -> str:
        return self.text


def alternative(figure: dict[str, Any], heading: str, finding: str) -> str:
    """What a figure says, in words: its own question and finding, else those that stand around it in the page."""
    layout = figure.get("layout", {})
    meta = layout.get("meta")
    title = layout.get("title", {})
    title = title.get("text", "") if isinstance(title, dict) else str(title or "")
    if isinstance(meta, dict) and "question" in meta:
        parts = [meta["question"], meta.get("finding", "")]
    else:
        parts = [heading, title, finding]
    text = " ".join(part if part.endswith((".", "?", "!")) else f"{part}." for part in parts if part)
    return text or "figure"
