"""An executed notebook as one HTML file that needs no network: our page, one copy of plotly.js, code folded away."""

from __future__ import annotations

import html as escape_html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from spoc_lib.core.files import write_text
from spoc_lib.core.quickimport import import_jsonschema
from spoc_lib.report import provenance
from spoc_lib.report.asked import alternative
from spoc_lib.report.page import STYLE
from spoc_lib.report.style import CONFIG

if TYPE_CHECKING:
    import nbformat

PLOTLY_MIME = "application/vnd.plotly.v1+json"
#: Width that a figure needs for each panel side by side; a narrower screen scrolls it.
PANEL_PX = 300

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style>{plotly}</head>
<body><input type="checkbox" id="show-code" class="visually-hidden" aria-label="show code">
<nav aria-label="pages of this run"><a href="../index.html">all runs</a>{links}
<label for="show-code" class="code-switch">show code</label></nav>
<main>{body}</main>{footer}{script}</body></html>
"""

#: Figures follow the page's width, on paper too.
_SCRIPT = """<script>
const fit = () => document.querySelectorAll('.figure').forEach(figure => Plotly.Plots.resize(figure));
const paper = matchMedia('print');
paper.addEventListener('change', fit);
addEventListener('beforeprint', fit);
addEventListener('afterprint', fit);
</script>"""


def render(notebook: Path, page: Path, title: str, siblings: dict[str, str]) -> Path:
    """Write `page` from an executed `notebook`: markdown, tables, figures; code is there, folded.

    `siblings` (file name -> label) are the run's other pages, linked in the navigation where they are there. The
    notebook's provenance (`metadata.spoc`) stands in the page as JSON and, in a line, at its end.
    """
    import_jsonschema()
    import nbformat
    from nbconvert import HTMLExporter

    document = nbformat.read(notebook, as_version=4)
    for cell in document.cells:  # the page says it in its footer
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if provenance.MARK not in output.get("metadata", {})]
    figures = _place_figures(document)
    exporter = HTMLExporter(template_name="basic")
    body, _ = exporter.from_notebook_node(document)
    links = "".join(
        f'<a href="{name}"{_current(name, page)}>{escape_html.escape(label)}</a>' for name, label in siblings.items()
        if name == page.name or (page.parent / name).exists()
    )
    return write_text(page, _PAGE.format(
        title=escape_html.escape(title), style=STYLE, body=body, links=links,
        plotly=f"<script>{get_plotlyjs()}</script>" if figures else "",
        footer=_footer(document.metadata.get(provenance.MARK) or {}),
        script=_SCRIPT if figures else "",
    ))  # fmt: skip


def _current(name: str, page: Path) -> str:
    return ' aria-current="page"' if name == page.name else ""


def _footer(made: Mapping[str, Any]) -> str:
    """The provenance: a line for people, all of it for programs."""
    if not made:
        return ""
    data = json.dumps(made, sort_keys=True).replace("</", "<\\/")
    return (f'<footer>{escape_html.escape(provenance.line(made))}</footer>'
            f'<script type="application/json" id="provenance">{data}</script>')


def _place_figures(document: nbformat.NotebookNode) -> int:
    """Replace plotly outputs by a div and the call that draws it; drop `text/plain` beside richer forms."""
    count = 0
    heading = ""
    for position, cell in enumerate(document.cells):
        if cell.cell_type == "markdown":
            heading = _heading(cell.source) or heading
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if PLOTLY_MIME in data:
                words = alternative(data[PLOTLY_MIME], heading, _next_finding(document, position))
                output["data"] = {"text/html": _figure(data[PLOTLY_MIME], count, words)}
                count += 1
    return count


def _figure(figure: dict[str, Any], number: int, words: str) -> str:
    shown = {"data": figure["data"], "layout": figure["layout"], "config": CONFIG}
    payload = json.dumps(shown).replace("</", "<\\/")
    height = int(figure["layout"].get("height") or 380)
    width = PANEL_PX * _columns(figure["layout"])
    return (
        f'<div class="spoc-scroll" tabindex="0" role="group" aria-label="figure, scrolls where it is wide">'
        f'<div id="figure-{number}" class="figure" role="img" aria-label="{escape_html.escape(words)}" '
        f'style="height:{height}px;min-width:{width}px"></div></div>'
        f"<script>(function(){{const f={payload};"
        f"Plotly.newPlot('figure-{number}',f.data,f.layout,f.config);}})();</script>"
    )


def _columns(layout: dict[str, Any]) -> int:
    """Panels side by side: distinct left edges of the x axes; a scene in three dimensions takes the room of two."""
    if "scene" in layout:
        return 2
    edges = {round(axis.get("domain", [0.0])[0], 2) for name, axis in layout.items()
             if name.startswith("xaxis") and isinstance(axis, dict)}
    return max(1, len(edges))


def _heading(markdown: str) -> str:
    found = re.findall(r"^#+\s+(.+)$", markdown, flags=re.MULTILINE)
    return found[-1].strip() if found else ""


def _next_finding(document: nbformat.NotebookNode, position: int) -> str:
    """The sentences of the first finding at or after a cell, before the next heading."""
    for cell in document.cells[position:]:
        if cell.cell_type == "markdown" and _heading(cell.source):
            return ""
        for output in cell.get("outputs", []):
            text = output.get("data", {}).get("text/html", "")
            if "spoc-finding" in text:
                return escape_html.unescape(" ".join(re.findall(r"<p>(.*?)</p>", text)))
    return ""
