"""An executed notebook as one HTML file that needs no network: our page, one copy of plotly.js, code folded away."""

from __future__ import annotations

import html as escape_html
import json
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from plotly.offline import get_plotlyjs

from spoc_lib.core.files import write_text
from spoc_lib.report.style import CONFIG

PLOTLY_MIME = "application/vnd.plotly.v1+json"

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style>{plotly}</head>
<body><input type="checkbox" id="show-code" class="visually-hidden">
<nav><a href="../index.html">all runs</a>{links}
<label for="show-code" class="code-switch" tabindex="0">show code</label></nav>
<main>{body}</main></body></html>
"""


def render(notebook: Path, page: Path, title: str, siblings: dict[str, str]) -> Path:
    """Write `page` from an executed `notebook`: markdown, tables, figures; code is there, folded.

    `siblings` (file name -> label) are the run's other pages, linked in the navigation.
    """
    document = nbformat.read(notebook, as_version=4)
    figures = _place_figures(document)
    exporter = HTMLExporter(template_name="basic")
    body, _ = exporter.from_notebook_node(document)
    links = "".join(f'<a href="{name}">{escape_html.escape(label)}</a>' for name, label in siblings.items())
    plotly = f"<script>{get_plotlyjs()}</script>" if figures else ""
    return write_text(
        page,
        _PAGE.format(title=escape_html.escape(title), style=_STYLE, plotly=plotly, body=body, links=links),
    )


def _place_figures(document: nbformat.NotebookNode) -> int:
    """Replace plotly outputs by a div and the call that draws it; drop `text/plain` beside richer forms."""
    count = 0
    for cell in document.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if PLOTLY_MIME in data:
                figure = data[PLOTLY_MIME]
                shown = {"data": figure["data"], "layout": figure["layout"], "config": CONFIG}
                payload = json.dumps(shown).replace("</", "<\\/")
                alt = escape_html.escape(_alt(figure))
                height = int(figure["layout"].get("height") or 380)
                output["data"] = {
                    "text/html": (
                        f'<div id="figure-{count}" class="figure" role="img" aria-label="{alt}" '
                        f'style="height:{height}px"></div>'
                        f"<script>(function(){{const f={payload};"
                        f"Plotly.newPlot('figure-{count}',f.data,f.layout,f.config);}})();</script>"
                    )
                }
                count += 1
    return count


def _alt(figure: dict) -> str:
    title = figure["layout"].get("title", {})
    text = title.get("text", "") if isinstance(title, dict) else str(title)
    return text or "figure"
