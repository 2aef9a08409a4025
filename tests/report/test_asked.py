"""No figure stands alone: each is asked, drawn and concluded, in the notebooks and in the page."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest

from spoc_lib.report.asked import Asked, alternative

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("0[1-5]_*.ipynb"))
#: Functions of the figure modules that return tables.
TABLES = {"gates", "outcomes", "heldout", "confirmations", "roofline_table", "unknown_kernels"}


def drawn(tree: ast.AST) -> list[ast.Call]:
    """Calls that return a figure: those of the modules of figures, and the timeline."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if ast.unparse(call.func) == "story" or ast.unparse(call.func).startswith("figures.")
            and ast.unparse(call.func).removeprefix("figures.") not in TABLES]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem[:2])
def test_every_figure_of_a_notebook_is_asked_and_concluded(notebook):
    code = "\n".join(cell.source for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code")
    tree = ast.parse(code)
    asked = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and ast.unparse(call.func) == "Asked"]
    assert drawn(tree) and [ast.unparse(call.args[1]) for call in asked] == [ast.unparse(call) for call in drawn(tree)]
    for call in asked:
        question, _, *findings = call.args
        assert isinstance(question, ast.Constant) and str(question.value).endswith("?")
        assert findings and all(ast.unparse(one).startswith("*") for one in findings), "computed, not written"


def test_the_question_takes_the_place_of_the_title_and_travels_with_the_figure():
    plain = Asked("How many?", go.Figure(layout={"title": "Users"}), "Ten.", "", "Or eleven.").figure
    assert plain.layout.title.text is None and plain.layout.margin.t == 36
    assert alternative(plain.to_dict(), "heading", "") == "How many? Ten. Or eleven."
    panels = go.Figure(layout={"annotations": [{"text": "a panel"}]})
    assert Asked("How many?", panels, "Ten.").figure.layout.margin.t == 56
    roomy = go.Figure(layout={"margin": {"t": 120}})
    assert Asked("How many?", roomy, "Ten.").figure.layout.margin.t == 80
