"""Tables for people: one registry of columns (label, unit, digits, preferred direction) drives them all."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.metrics import METRICS


@dataclass(frozen=True, slots=True)
class Column:
    """How a column is shown. scale multiplies the stored value (s -> ms); better: higher | lower | ''."""

    label: str
    unit: str = ""
    scale: float = 1.0
    digits: int = 1
    better: str = ""


def _metrics() -> dict[str, Column]:
    """The columns of the metrics: one each, and one a percentile of those that have any."""
    shown: dict[str, Column] = {}
    for name, one in METRICS.items():
        points = {f"{name}_p{q}_s": f" p{q}" for q in (50, 95, 99)} if one.kind in ("waits", "samples") else {name: ""}
        shown |= {key: Column(one.title + more, one.shown, one.scale, one.digits, one.better)
                  for key, more in points.items()}
    return shown


COLUMNS = _metrics() | {
    "users": Column("users", digits=0, better="higher"),
    "max_users": Column("max users", digits=0, better="higher"),
    "kv_usage_ratio": Column("KV in use", "%", 100, 1),
    "sm_active_ratio": Column("SM active", "%", 100, 1),
    "dram_active_ratio": Column("DRAM active", "%", 100, 1),
    "preemptions": Column("preemptions", digits=0, better="lower"),
    "change_ratio": Column("change", "%", 100, 1),
    "twin_error_ratio": Column("twin's error", "%", 100, 0),
    "calibrated_error_ratio": Column("fitted twin's error", "%", 100, 0),
    "hypervolume": Column("hypervolume", digits=4, better="higher"),
    "on_front": Column("Pareto"),
    "client_limited": Column("client-limited"),
    "max_num_batched_tokens": Column("max_num_batched_tokens", digits=0),
}


def column(name: str) -> Column:
    """How a column is shown: its label, unit, digits and preferred direction."""
    return COLUMNS.get(name, Column(name.replace("_", " "), digits=3))


def label(name: str) -> str:
    """Axis title: label with its unit."""
    shown = column(name)
    return f"{shown.label} ({shown.unit})" if shown.unit else shown.label


def cell(name: str, value: object) -> str:
    """One value as text, in the column's unit."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)) and name not in COLUMNS:
        return f"{value:,}"
    if isinstance(value, (int, float, np.number)):
        number = float(value) * column(name).scale
        return "∞" if math.isinf(number) else f"{number:,.{_digits(name, number)}f}"
    return str(value)


def _digits(name: str, number: float) -> int:
    """Decimals of a number: the column's own, else about three significant figures."""
    if name in COLUMNS:
        return COLUMNS[name].digits
    size = abs(number)
    return 0 if size >= 100 or number == int(number) else 1 if size >= 10 else 2 if size >= 1 else 4


class Table:
    """A DataFrame as an HTML table with units in its head; `highlight` marks rows by a boolean column."""

    def __init__(self, frame: pd.DataFrame, columns: list[str] | None = None, highlight: str = "") -> None:
        self.frame, self.columns, self.highlight = frame, list(columns or frame.columns), highlight

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(label(c))}</th>" for c in self.columns)
        rows = []
        for record in self.frame.to_dict("records"):
            mark = (
                ' class="mark"'
                if self.highlight and record[self.highlight] is not None and record[self.highlight]
                else ""
            )
            cells = "".join(
                f'<td class="{_kind(record[c])}">{html.escape(cell(c, record[c]))}</td>' for c in self.columns
            )
            rows.append(f"<tr{mark}>{cells}</tr>")
        return (
            f'<div class="spoc-scroll"><table class="spoc-table"><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def __repr__(self) -> str:
        return self.frame[self.columns].to_string(index=False)


def _kind(value: object) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "num"
    return "txt long" if len(str(value)) > 45 else "txt"


class Finding:
    """A sentence computed from the data, set apart from prose. `tone`: good | bad | note."""

    def __init__(self, *sentences: str, tone: str = "note") -> None:
        self.sentences, self.tone = [s for s in sentences if s], tone

    def _repr_html_(self) -> str:
        body = "".join(f"<p>{html.escape(s)}</p>" for s in self.sentences)
        return f'<div class="spoc-finding {self.tone}">{body}</div>'

    def __repr__(self) -> str:
        return "\n".join(self.sentences)
