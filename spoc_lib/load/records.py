"""The books of a rung when it has ended, however it ended: merged over the client processes, and closed.

What was planned and has no row of its own is censored, so that planned = completed + failed + censored always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spoc_lib.core import schemas
from spoc_lib.core.tables import TableAppender, write_table
from spoc_lib.load.books import PARTIAL, PLANNED, TABLES

#: Censored by us, not by the end of the rung: their TTFT says nothing about the server.
CLIENT_CUTS = ("interrupted", "client_lost")


def planned_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Every request that a client process set out to send: the first columns of REQUESTS, and `layers.boundaries`."""
    return [row for folder in folders for row in read_lines(folder / PLANNED)]


def settle(folders: Sequence[Path], planned: Sequence[Mapping[str, Any]], target: Path, cut_s: float,
           cut_class: str) -> dict[str, pd.DataFrame]:
    """Merge the books of all client processes into `target` and close them.

    What was `planned` and has no row of its own becomes a censored row, ended at `cut_s`, of class `cut_class`.
    Returns the three tables as DataFrames, by name.
    """
    merged: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
    for folder in folders:
        for name, schema in TABLES.items():
            path = TableAppender.recover(folder / f"{name}.parquet", schema)
            if path.exists():
                merged[name].append(pq.read_table(path))
    tables = {name: pa.concat_tables(parts) if parts else TABLES[name].empty_table()
              for name, parts in merged.items()}
    known = set(tables["requests"].column("request").to_pylist())
    lost = [row for row in planned if row["request"] not in known]
    if lost:
        left = _open_chunks(folders, [row["request"] for row in lost])
        times = {request: own["time_s"].to_numpy() for request, own in left.to_pandas().groupby("request")}
        rows = [lost_row(row, cut_s, cut_class, times.get(row["request"], ())) for row in lost]
        tables["requests"] = pa.concat_tables([tables["requests"], pa.Table.from_pylist(rows, schemas.REQUESTS)])
        tables["chunks"] = pa.concat_tables([tables["chunks"], left])
    tables["requests"] = tables["requests"].sort_by("send_s")
    tables["chunks"] = tables["chunks"].sort_by([("request", "ascending"), ("time_s", "ascending")])
    tables["metrics"] = tables["metrics"].sort_by("time_s")
    for name, table in tables.items():
        write_table(target / f"{name}.parquet", table, TABLES[name])
    # an hour of 300 users is 50 million chunks: each column is handed over, not copied
    return {name: tables.pop(name).to_pandas(split_blocks=True, self_destruct=True) for name in list(tables)}


def _open_chunks(folders: Sequence[Path], requests: Sequence[int]) -> pa.Table:
    """The chunks of `requests` that were put on disk while their streams were open."""
    paths = [TableAppender.recover(folder / PARTIAL, schemas.CHUNKS) for folder in folders]
    partial = [pq.read_table(path) for path in paths if path.exists()]  # a client may end before it opens its books
    whole = pa.concat_tables([schemas.CHUNKS.empty_table(), *partial])
    return whole.filter(pc.is_in(whole.column("request"), pa.array(requests, pa.int64())))


def lost_row(planned: Mapping[str, Any], cut_s: float, cut_class: str, times_s: Sequence[float]) -> dict[str, Any]:
    """The censored row of a request whose end nobody saw; `times_s`: the chunks that are known of it."""
    first = float(times_s[0]) if len(times_s) else None
    return {**dict.fromkeys(schemas.REQUESTS.names), **planned, "end_s": max(cut_s, planned["send_s"]),
            "first_token_s": first, "ttft_s": None if first is None else first - planned["send_s"],
            "tokens_source": "none", "chunks": len(times_s), "outcome": "censored", "error_class": cut_class}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [orjson.loads(line) for line in lines[:-1] if line]
