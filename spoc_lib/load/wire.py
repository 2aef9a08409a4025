"""What master and workers tell each other, over Locust's own messages.

worker -> master: `spoc_prepared`, `spoc_refused`, `spoc_clock`, `spoc_planned` (at once), `spoc_rows` (once a
second), `spoc_end`;
master -> worker: `spoc_plan`, `spoc_clock`, `spoc_go`, `spoc_stop`.

Tables travel as Arrow streams, times in the sender's own clock; the master moves them onto its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: Columns that hold a moment, not a length.
MOMENTS = ("intended_send_s", "send_s", "first_token_s", "end_s", "time_s")
#: Exchanges of clocks with each worker; the one with the shortest way counts.
CLOCK_ROUNDS = 15


def packed(tables: Mapping[str, pa.Table]) -> dict[str, bytes]:
    """Tables as bytes."""
    out = {}
    for name, table in tables.items():
        if table.num_rows:
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
            out[name] = sink.getvalue().to_pybytes()
    return out


def unpacked(data: Mapping[str, bytes], offset_s: float) -> dict[str, pa.Table]:
    """The tables again, their moments moved back by `offset_s` (the sender's clock minus ours)."""
    tables = {}
    for name, piece in data.items():
        table = pa.ipc.open_stream(piece).read_all()
        for column in MOMENTS:
            if column in table.column_names:
                index = table.column_names.index(column)
                table = table.set_column(index, column, pc.subtract(table.column(column), offset_s))
        tables[name] = table
    return tables


def moved(row: Mapping[str, Any], offset_s: float) -> dict[str, Any]:
    """A planned request's row, moved likewise."""
    return {name: value - offset_s if name in MOMENTS else value for name, value in row.items()}


class ClockEstimate:
    """Worker's clock minus ours, from echoed times; of all echoes the fastest, whose half way bounds the error."""

    def __init__(self) -> None:
        self.offset_s, self.error_s = 0.0, float("inf")

    def add(self, sent_s: float, theirs_s: float, back_s: float) -> None:
        """One echo: sent and received back by our clock, answered by theirs."""
        half = (back_s - sent_s) / 2
        if half < self.error_s:
            self.offset_s, self.error_s = theirs_s - (sent_s + half), half
