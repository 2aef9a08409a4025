"""The books of a rung while it runs: every request once, on disk as it happens.

A request is *planned* when it is about to be sent: one line in `planned.jsonl`, written at once, so that a killed
client loses none. Its end (completed, failed or censored) is a row of REQUESTS, its chunks rows of CHUNKS; both are
put on disk every second; the chunks of streams still open too (`partial`), so that a kill loses one second of them.
`records.settle` closes the books after any ending.
"""

from __future__ import annotations

import os
import shutil
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from spoc_lib.core import schemas
from spoc_lib.core.tables import write_table

PLANNED = "planned.jsonl"
REPLIES = "uncounted.jsonl"
TABLES = {"requests": schemas.REQUESTS, "chunks": schemas.CHUNKS, "metrics": schemas.METRICS}
#: Chunks of streams that were open at a flush, one token each until the usage says better.
PARTIAL = "partial.parquet"


class PartWriter:
    """Parts of a table that `core.tables.TableAppender.recover` merges; for rows that are already columns."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self._folder = path.with_name(path.name + ".parts")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._count = 0

    def write(self, table: pa.Table) -> None:
        """One more part; nothing for an empty table."""
        if table.num_rows:
            write_table(self._folder / f"{self._count:06d}.parquet", table, self.schema)
            self._count += 1


def writers(folder: Path) -> dict[str, PartWriter]:
    """One writer for each table of a client's folder."""
    return {**{name: PartWriter(folder / f"{name}.parquet", schema) for name, schema in TABLES.items()},
            "partial": PartWriter(folder / PARTIAL, schemas.CHUNKS)}


def tried(work: Callable[..., None], *given: Any) -> Exception | None:
    """Do `work` in another thread; what failed is handed over rather than raised. Gevent prints what a thread raises;
    on a full disk, where the log lies too, that print fails in its turn, and whoever waits would wait for ever."""
    try:
        work(*given)
    except Exception as error:
        return error
    return None


class Books:
    """Written by one client process. `take` hands the buffered rows over, so that another thread may put them on disk
    (Arrow and fsync release the interpreter lock) while the users go on. `far`: a master elsewhere wants them too."""

    def __init__(self, folder: Path, process: int = 0, far: bool = False) -> None:
        self._far = far
        folder.mkdir(parents=True, exist_ok=True)
        self._labels = orjson.dumps({"client": str(process)}).decode()
        self._planned = os.open(folder / PLANNED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._replies = folder / REPLIES
        self._replies.unlink(missing_ok=True)
        self._writers = writers(folder)
        self._untold: list[Mapping[str, Any]] = []
        self._open: dict[int, tuple[list[float], int]] = {}
        self.planned = self.completed = self.failed = self.censored = 0
        self.tokens = 0.0
        self._requests: list[Mapping[str, Any]] = []
        self._metrics: list[Mapping[str, Any]] = []
        self._chunks = (array("q"), array("d"), array("d"))

    def plan(self, row: Mapping[str, Any]) -> None:
        """`row`: the columns of REQUESTS that are known before sending."""
        os.write(self._planned, orjson.dumps(row) + b"\n")
        if self._far:
            self._untold.append(row)
        self.planned += 1

    def opened(self, request: int, times_s: list[float]) -> None:
        """The request was sent; `times_s` is the list into which its stream writes the times of its chunks."""
        self._open[request] = (times_s, 0)

    def end(self, row: Mapping[str, Any], times_s: Sequence[float], tokens: Sequence[float]) -> None:
        """A request ended; `row` is a whole row of REQUESTS, `times_s` and `tokens` its chunks."""
        setattr(self, row["outcome"], getattr(self, row["outcome"]) + 1)
        self._requests.append(row)
        self._open.pop(row["request"], None)
        if times_s:
            requests, times, shares = self._chunks
            requests.extend([row["request"]] * len(times_s))
            times.extend(times_s)
            shares.extend(tokens)
            self.tokens += sum(tokens)

    def take_planned(self) -> list[Mapping[str, Any]]:
        """What was planned since the last call; for a master on another machine (`far`)."""
        rows, self._untold = self._untold, []
        return rows

    def replies(self) -> bytes:
        """The replies that wait to be counted, as JSON lines."""
        return self._replies.read_bytes() if self._replies.exists() else b""

    def uncounted(self, request: int, text: str) -> None:
        """The server sent no usage: keep the reply, to be counted with a tokenizer after the rung."""
        with open(self._replies, "ab") as file:
            file.write(orjson.dumps({"request": request, "text": text}) + b"\n")

    def sample(self, time_s: float, values: Mapping[str, float]) -> None:
        """One client metric each (source `client`)."""
        common = {"source": "client", "labels": self._labels, "time_s": time_s}
        self._metrics.extend({**common, "metric": name, "value": value} for name, value in values.items())

    def take(self) -> dict[str, pa.Table]:
        """The rows since the last call, as tables."""
        requests, metrics, chunks = self._requests, self._metrics, self._chunks
        self._requests, self._metrics = [], []
        self._chunks = (array("q"), array("d"), array("d"))
        return {"requests": pa.Table.from_pylist(requests, schema=schemas.REQUESTS),
                "metrics": pa.Table.from_pylist(metrics, schema=schemas.METRICS),
                "chunks": _columns(*chunks), "partial": self._partial()}

    def _partial(self) -> pa.Table:
        """The chunks of open streams since the last call."""
        requests, times = array("q"), array("d")
        for request, (seen, known) in self._open.items():
            if len(seen) > known:
                times.extend(seen[known:])
                requests.extend([request] * (len(seen) - known))
                self._open[request] = (seen, len(seen))
        return _columns(requests, times, array("d", [1.0]) * len(times))

    def write(self, tables: Mapping[str, pa.Table]) -> None:
        """Put what `take` gave on disk; may run in another thread, one call at a time."""
        for name, table in tables.items():
            self._writers[name].write(table)

    def close(self) -> None:
        """Write the rows that are left."""
        self.write(self.take())
        os.close(self._planned)


def _columns(requests: array, times: array, tokens: array) -> pa.Table:
    """Three columns of CHUNKS without copying them."""
    columns = [np.frombuffer(column, dtype=kind) if len(column) else np.empty(0, kind)
               for column, kind in ((requests, "i8"), (times, "f8"), (tokens, "f8"))]
    return pa.table(columns, schema=schemas.CHUNKS)
