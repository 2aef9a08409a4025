"""What a metric is: its name, unit, formula and rules in words, and the code that follows them (`definitions`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, once. unit: of the stored value; `shown` is the unit that people read, `scale` times the stored one,
    with so many `digits`; better: lower | higher | '' (neither).

    belongs: which requests, chunks or gaps count in a window [start, end); failed, cut: what a failed request does, and
    one that the end of the load cut off. kind: what `of` makes of a `Measured` (waits: `Waits` of all requests;
    samples: `Samples` and whose they are; number: a number or None) or of an `Occupancy` (users).
    """

    name: str
    title: str
    unit: str
    formula: str
    belongs: str
    failed: str
    cut: str
    kind: Literal["waits", "samples", "number", "users"]
    of: Callable[..., Any]
    better: Literal["lower", "higher", ""] = ""
    shown: str = ""
    scale: float = 1.0
    digits: int = 1


#: Every metric by its name, in the order of the documentation.
METRICS: dict[str, Metric] = {}


def metric(kind: Literal["waits", "samples", "number"], **told: Any) -> Callable[[Callable], Callable]:
    """Registers the function below as a metric of its name, its docstring being the formula; `told`: the other fields
    of `Metric`."""

    def register(of: Callable) -> Callable:
        METRICS[of.__name__] = Metric(of.__name__, formula=" ".join(str(of.__doc__).split()), kind=kind, of=of, **told)
        return of

    return register


def markdown(held_by: Mapping[str, str]) -> str:
    """All metrics as a Markdown table; `held_by`: links to the tests that hold each, by its name."""
    head = ("metric", "unit", "formula", "counts in a window [start, end)", "a failed request",
            "one cut off by the end", "better", "held by")
    rows = [head, ("---",) * len(head)]
    rows += [(f"{one.title} (`{name}`)", one.unit or "share", one.formula, one.belongs, one.failed, one.cut,
              one.better or "–", held_by[name]) for name, one in METRICS.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
