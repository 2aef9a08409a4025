"""Counters, gauges, histograms and summaries of one page in Prometheus' text format.

A registry per server and nothing global; names and labels are rendered once, so that a page of 600 samples costs
well under a millisecond on the event loop that also writes tokens.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence


def labelled(labels: Mapping[str, str]) -> str:
    """`{a="1",b="2"}`, names sorted, values escaped; nothing for no labels."""
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def number(value: float) -> str:
    """A sample's value as Prometheus clients write it."""
    return repr(float(value))


class Sample:
    """One child of a counter or gauge."""

    __slots__ = ("value", "_prefix", "created")

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self.value = 0.0
        self.created = time.time()
        self._prefix = f"{name}{labelled(labels)} "

    def lines(self) -> list[str]:
        """Its line of the page."""
        return [self._prefix + number(self.value)]


class Summary:
    """Count and sum."""

    __slots__ = ("count", "sum", "_prefixes", "created")

    def __init__(self, name: str, labels: Mapping[str, str]) -> None:
        self.count, self.sum, self.created = 0, 0.0, time.time()
        self._prefixes = [f"{name}_{part}{labelled(labels)} " for part in ("count", "sum")]

    def observe(self, value: float) -> None:
        """Count a value."""
        self.count += 1
        self.sum += value

    def lines(self) -> list[str]:
        """Its lines of the page."""
        return [self._prefixes[0] + number(self.count), self._prefixes[1] + number(self.sum)]


class Histogram:
    """Observations by bucket (upper bounds inclusive, +Inf added), cumulative when rendered."""

    __slots__ = ("_bounds", "_counts", "sum", "_prefixes", "created")

    def __init__(self, name: str, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(buckets) + 1)
        self.sum, self.created = 0.0, time.time()
        bounds = [*map(repr, self._bounds), "+Inf"]
        self._prefixes = [f"{name}_bucket{labelled({**labels, 'le': bound})} " for bound in bounds]
        self._prefixes += [f"{name}_{part}{labelled(labels)} " for part in ("count", "sum")]

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def lines(self) -> list[str]:
        """Its lines of the page, buckets cumulated."""
        total, values = 0, []
        for count in self._counts:
            total += count
            values.append(total)
        return [prefix + number(value)
                for prefix, value in zip(self._prefixes, [*values, total, self.sum], strict=True)]


class Family:
    """All children of one metric under its HELP and TYPE. `created`: whether a `_created` gauge follows, as
    Python's Prometheus client adds to counters, histograms and summaries."""

    def __init__(self, name: str, kind: str, description: str, *, created: bool = False,
                 buckets: Sequence[float] = ()) -> None:
        self.name, self.kind = name, kind
        self._buckets = buckets
        self._children: dict[tuple, Sample | Summary | Histogram] = {}
        self._head = f"# HELP {name} {description}\n# TYPE {name} {kind}"
        base = name.removesuffix("_total") if kind == "counter" else name
        self._created_name = f"{base}_created"
        self._created_head = (f"# HELP {self._created_name} {description}\n# TYPE {self._created_name} gauge"
                              if created else "")
        self._labels: dict[tuple, str] = {}

    def child(self, **labels: str):
        """The child with these labels, made on first use."""
        key = tuple(sorted(labels.items()))
        found = self._children.get(key)
        if found is None:
            kind = {"histogram": Histogram, "summary": Summary}.get(self.kind, Sample)
            found = kind(self.name, labels, self._buckets) if kind is Histogram else kind(self.name, labels)
            self._children[key] = found
            self._labels[key] = labelled(labels)
        return found

    def lines(self) -> list[str]:
        """Its lines of the page, head and creation times included; none while it has no children."""
        if not self._children:
            return []
        lines = [self._head]
        for child in self._children.values():
            lines += child.lines()
        if self._created_head:
            lines.append(self._created_head)
            lines += [f"{self._created_name}{self._labels[key]} {number(child.created)}"
                      for key, child in self._children.items()]
        return lines


class Registry:
    """Families in the order in which they were made."""

    def __init__(self) -> None:
        self._families: list[Family] = []

    def family(self, name: str, kind: str, description: str, *, created: bool = False,
               buckets: Sequence[float] = ()) -> Family:
        """A new family, at the page's end."""
        family = Family(name, kind, description, created=created, buckets=buckets)
        self._families.append(family)
        return family

    def render(self) -> bytes:
        """The page."""
        lines: list[str] = []
        for family in self._families:
            lines += family.lines()
        return ("\n".join(lines) + "\n").encode()
