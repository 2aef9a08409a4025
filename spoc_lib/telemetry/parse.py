"""The Prometheus text exposition format: pages in, samples out.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4, and OpenMetrics' `#
EOF`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import orjson

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_TEXT = r'"(?:[^"\\]|\\.)*"'
_LINE = re.compile(
    rf"({_NAME})\s*(?:\{{((?:[^\"{{}}]|{_TEXT})*)\}})?\s+(\S+)(?:\s+(-?[0-9.eE+-]+))?(?:\s+#.*)?$", re.DOTALL)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


class Sample(NamedTuple):
    """One line of a page. `labels` is a JSON object with sorted keys, as METRICS holds it; `value` may be
    NaN or infinite (`+Inf` parses as float infinity)."""

    metric: str
    labels: str
    value: float


class BadPage(ValueError):
    """A line that is no sample and no comment: the page is cut off, or not a metrics page at all."""


def labels_json(labels: dict[str, str]) -> str:
    """`labels` as METRICS stores them: a JSON object, keys sorted."""
    return orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()


def parse(text: str) -> Iterator[Sample]:
    """The samples of a page, in its order; BadPage naming the first line that is none.

    A time stamp behind the value is dropped: the reader stamps the scrape with its own clock.
    """
    interned: dict[str, str] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip(" \t\r")
        if not line or line[0] == "#":
            continue
        match = _LINE.match(line)
        if match is None:
            raise BadPage(f"line {number} is no metric sample: {line:.80}")
        name, label_text, value_text, _ = match.groups()
        label_text = label_text or ""
        if label_text not in interned:
            interned[label_text] = labels_json(_labels(label_text, number))
        try:
            value = float(value_text)
        except ValueError as error:
            raise BadPage(f"line {number} has no number behind the metric: {line:.80}") from error
        yield Sample(name, interned[label_text], value)


def _labels(text: str, number: int) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            if text[position:].strip():
                raise BadPage(f"line {number} has malformed labels: {{{text:.80}}}")
            break
        labels[match[1]] = _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[0]), match[2])
        position = match.end()
    return labels
