"""A search result as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pareto_text(result: Mapping[str, Any]) -> str:
    """The front as a table (the knee marked), the defaults beside it, the findings and the command.

    result: `StudyResult.to_dict()`.
    """
    flags = [row["flag"] for row in result["space"]]
    rows = list(result["front"])
    for other in (result["defaults"], result["nearest"]):
        if other is not None and all(other["trial"] != row["trial"] for row in rows):
            rows.append(other)
    good = ["goodput/s"] if result["objectives"][0] == "goodput_per_s" else []
    header = ["", "trial", *good, "tokens/s", "p95 TTFT s", "p95 ITL ms", *flags]
    body = [[_mark(row, result), str(row["trial"]), *_objectives(row, bool(good)),
             *(str(row["flags"].get(flag, "")) for flag in flags)] for row in rows]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in [header, *body]]
    label = "simulated on the twin" if result["simulated"] else "measured on the real engine"
    title = f"{result['cluster']}: Pareto front at {result['users']} users ({label})"
    return "\n".join([title, *lines, "", *result["findings"], "", result["command"]])


def _mark(row: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    marks = [name for name in ("knee", "defaults", "nearest")
             if result[name] is not None and result[name]["trial"] == row["trial"]]
    return "+".join(marks)


def _objectives(row: Mapping[str, Any], goodput: bool) -> list[str]:
    values = (row["output_tokens_per_s"], row["ttft_p95_s"], row["itl_p95_s"])
    if any(value is None or value != value for value in values):
        return [str(row["failure_class"]), "", "", *([""] if goodput else [])]
    return [*([f"{row['goodput_per_s']:,.2f}"] if goodput else []),
            f"{values[0]:,.0f}", f"{values[1]:.2f}", f"{1000 * values[2]:.1f}"]
