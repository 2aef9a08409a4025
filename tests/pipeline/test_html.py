"""The rendered page in a real browser with no network: charts drawn, no external request, console clean."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient

from spoc_lib.report import html

pytestmark = pytest.mark.slow

CELL = """
from spoc_lib.report import style, tables
from spoc_lib.report.asked import Asked
import pandas as pd, plotly.graph_objects as go
style.activate()
display(tables.Table(pd.DataFrame({"users": [1], "ttft_p95_s": [float("inf")]})))
display(go.Figure(go.Scatter(x=[1, 2], y=[3, 1]), layout={"title": {"text": "drawn </script> safely"}}))
Asked("Is <this> asked?", go.Figure(go.Scatter(x=[1, 2], y=[3, 1])), "It is & it ends.", reading="A line.")
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Title\n\nWhat is $x^2$?"), nbformat.v4.new_code_cell(CELL)]
    )
    NotebookClient(notebook, kernel_name="python3").execute()
    nbformat.write(notebook, folder / "n.ipynb")
    return html.render(folder / "n.ipynb", folder / "n.html", "a <title>", {"n.html": "this one"})


def test_the_page_names_no_other_host(page):
    text = page.read_text()
    outside = text.replace(html.get_plotlyjs(), "")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", outside)
    assert page.stat().st_size < 6_000_000
    assert "a &lt;title&gt;" in text and "∞" in text


def test_the_chart_is_drawn_with_the_network_closed(page, open_page):
    dom, log = open_page(page)
    assert 'class="main-svg"' in dom
    assert "drawn &lt;/script&gt; safely" in dom
    assert not re.findall(r"CONSOLE.*(?:error|Error|Failed).*", log)


def test_a_chart_stands_between_its_question_and_its_finding(page, open_page, unframed):
    dom, _ = open_page(page)
    assert dom.count('class="plot-container plotly"') == 2
    assert unframed(dom) == ["figure-0"], "the bare one is found, the asked one is framed"
    assert 'aria-label="Is &lt;this&gt; asked? It is &amp; it ends."' in dom or \
        'aria-label="Is <this> asked? It is &amp; it ends."' in dom
