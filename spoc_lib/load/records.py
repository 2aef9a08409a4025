"""The books of a rung: every request once, on disk as it happens.

A request is *planned* when it is about to be sent: one line in `planned.jsonl`, written at once, so that a killed
client loses none. Its end (completed, failed or censored) is a row of REQUESTS, its chunks rows of CHUNKS; both are
put on disk every second. `settle` closes the books after any ending: what was planned and has no row is censored.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from spoc_lib.core import schemas
from spoc_lib.core.tables import TableAppender, write_table

PLANNED = "planned.jsonl"
REPLIES = "uncounted.jsonl"
TABLES = {"requests": schemas.REQUESTS, "chunks": schemas.CHUNKS, "metrics": schemas.METRICS}
#: Censored by us, not by the end of the rung: their TTFT says nothing about the server.
CLIENT_CUTS = ("interrupted", "client_lost")


class PartWriter:
    """Parts of a table that `core.tables.TableAppender.recover` merges; for rows that are already columns."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self._folder = path.with_name(path.name + ".parts")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._count = 0

    def write(self, table: pa.Table) -> None:
        if table.num_rows:
            write_table(self._folder / f"{self._count:06d}.parquet", table, self.schema)
            self._count += 1


class Books:
    """Written by one client process. `flush_jobs` hands the buffered rows over, so that another thread may put
    them on disk (Arrow and fsync release the interpreter lock) while the users go on."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._planned = os.open(folder / PLANNED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._replies = folder / REPLIES
        self._replies.unlink(missing_ok=True)
        self._writers = {name: PartWriter(folder / f"{name}.parquet", schema) for name, schema in TABLES.items()}
        self.planned = self.completed = self.failed = self.censored = 0
        self.tokens = 0.0
        self._requests: list[Mapping[str, Any]] = []
        self._metrics: list[Mapping[str, Any]] = []
        self._chunks = (array("q"), array("d"), array("d"))

    def plan(self, row: Mapping[str, Any]) -> None:
        """`row`: the columns of REQUESTS that are known before sending."""
        os.write(self._planned, orjson.dumps(row) + b"\n")
        self.planned += 1

    def end(self, row: Mapping[str, Any], times_s: Sequence[float], tokens: Sequence[float]) -> None:
        """A request ended; `row` is a whole row of REQUESTS, `times_s` and `tokens` its chunks."""
        setattr(self, row["outcome"], getattr(self, row["outcome"]) + 1)
        self._requests.append(row)
        if times_s:
            requests, times, shares = self._chunks
            requests.extend([row["request"]] * len(times_s))
            times.extend(times_s)
            shares.extend(tokens)
            self.tokens += sum(tokens)

    def uncounted(self, request: int, text: str) -> None:
        """The server sent no usage: keep the reply, to be counted with a tokenizer after the rung."""
        with open(self._replies, "ab") as file:
            file.write(orjson.dumps({"request": request, "text": text}) + b"\n")

    def sample(self, time_s: float, values: Mapping[str, float]) -> None:
        """One client metric each (source `client`)."""
        self._metrics.extend({"source": "client", "metric": name, "labels": "{}", "time_s": time_s, "value": value}
                             for name, value in values.items())

    def take(self) -> dict[str, pa.Table]:
        """The rows since the last call, as tables."""
        requests, metrics, chunks = self._requests, self._metrics, self._chunks
        self._requests, self._metrics = [], []
        self._chunks = (array("q"), array("d"), array("d"))
        columns = [np.frombuffer(column, dtype=kind) if len(column) else np.empty(0, kind)
                   for column, kind in zip(chunks, ("i8", "f8", "f8"), strict=True)]
        return {"requests": pa.Table.from_pylist(requests, schema=schemas.REQUESTS),
                "metrics": pa.Table.from_pylist(metrics, schema=schemas.METRICS),
                "chunks": pa.table(columns, schema=schemas.CHUNKS)}

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Put what `take` gave on disk; may run in another thread, one call at a time."""
        for name, table in tables.items():
            self._writers[name].write(table)

    def close(self) -> None:
        self.write(self.take())
        os.close(self._planned)


def settle(folders: Sequence[Path], target: Path, cut_s: float, cut_class: str) -> dict[str, pd.DataFrame]:
    """Merge the books of all client processes into `target` and close them.

    What was planned and has no row of its own becomes a censored row, ended at `cut_s`, of class `cut_class`.
    Returns the three tables as DataFrames, by name.
    """
    merged = {name: [] for name in TABLES}
    planned: list[dict[str, Any]] = []
    for folder in folders:
        for name, schema in TABLES.items():
            path = TableAppender.recover(folder / f"{name}.parquet", schema)
            if path.exists():
                merged[name].append(pq.read_table(path))
        planned += read_lines(folder / PLANNED)
    tables = {name: pa.concat_tables(parts) if parts else TABLES[name].empty_table()
              for name, parts in merged.items()}
    known = set(tables["requests"].column("request").to_pylist())
    lost = [lost_row(row, cut_s, cut_class) for row in planned if row["request"] not in known]
    if lost:
        lost_table = pa.Table.from_pylist(lost, schema=schemas.REQUESTS)
        tables["requests"] = pa.concat_tables([tables["requests"], lost_table])
    tables["requests"] = tables["requests"].sort_by("send_s")
    tables["chunks"] = tables["chunks"].sort_by([("request", "ascending"), ("time_s", "ascending")])
    tables["metrics"] = tables["metrics"].sort_by("time_s")
    for name, table in tables.items():
        write_table(target / f"{name}.parquet", table, TABLES[name])
    return {name: table.to_pandas() for name, table in tables.items()}


def lost_row(planned: Mapping[str, Any], cut_s: float, cut_class: str) -> dict[str, Any]:
    """The censored row of a request whose end nobody saw."""
    empty = dict.fromkeys(schemas.REQUESTS.names)
    return {**empty, **planned, "end_s": max(cut_s, planned["send_s"]), "tokens_source": "none", "chunks": 0,
            "outcome": "censored", "error_class": cut_class}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [orjson.loads(line) for line in lines[:-1] if line]
