"""Where a trace's tables come from: an SQLite file or a folder of Parquet files, read and never written."""

from __future__ import annotations

import operator
import os
import re
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import sqlitepages
from spoc_lib.nsight.sqlitepages import NULL

#: Tables that are never opened: an environment holds tokens, and nothing here needs it.
FORBIDDEN = frozenset({"TARGET_INFO_SYSTEM_ENV"})
#: How an exporter numbers the version of a table, e.g. CUPTI_ACTIVITY_KIND_KERNEL_V3.
_VERSION = re.compile(r"_V(\d+)$")
_ROWS_AT_ONCE = 1 << 18  # of Python objects, where SQLite itself must read
_BATCH_ROWS = 1 << 18
_BATCHES_AHEAD = 6


class TraceSource(Protocol):
    """Tables by name, columns by name. Absent tables and columns are normal: exporters leave out what is empty."""

    #: what the user gave, and what is read: a report is read through its export
    path: Path
    file: Path

    def tables(self) -> frozenset[str]:
        """Names of the tables that are there."""
        ...

    def columns(self, table: str) -> tuple[str, ...]:
        """Names of a table's columns; empty where there is no such table."""
        ...

    def rows(self, table: str, columns: Sequence[str], where: Mapping[str, Sequence] | None = None,
             starts: Mapping[str, Sequence[str]] | None = None) -> list[tuple]:
        """Rows as tuples; `where` keeps rows whose column is one of the given values, `starts` those whose text
        begins with one of the given."""
        ...

    def integers(self, table: str, columns: Sequence[str]) -> Iterator[np.ndarray]:
        """int64 arrays of shape (columns, rows), chunk by chunk, NULL as `sqlitepages.NULL`."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


def by_plain_name(tables: Iterable[str]) -> dict[str, str]:
    """{name without a version: the table to read}; of several versions of one table the highest."""
    found: dict[str, tuple[int, str]] = {}
    for table in tables:
        version = _VERSION.search(table)
        plain, number = (table[:version.start()], int(version.group(1))) if version else (table, 0)
        if number >= found.get(plain, (-1, ""))[0]:
            found[plain] = number, table
    return {plain: table for plain, (_, table) in found.items() if plain not in FORBIDDEN}


def cpu_threads() -> int:
    """Cores that this process may use, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


class SqliteSource:
    """An exported `.sqlite` file, opened read-only and immutable: no lock, no journal, no index is left in it."""

    def __init__(self, file: Path, path: Path | None = None) -> None:
        """file: what is opened; path: what the user gave, where that is something else."""
        self.file, self.path = file, path or file
        self._check_whole()
        uri = f"file:{quote(str(file.resolve()))}?mode=ro&immutable=1"
        try:
            self._connection = sqlite3.connect(uri, uri=True)
            self._connection.text_factory = lambda text: text.decode(errors="replace")  # a name may hold any bytes
            master = self._connection.execute(
                "SELECT name, type, rootpage, sql FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
            self._page_size = self._connection.execute("PRAGMA page_size").fetchone()[0]
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error
        self._roots = {name: root for name, kind, root, sql in master
                       if kind == "table" and root and "WITHOUT ROWID" not in (sql or "").upper()}
        self._named = by_plain_name(name for name, *_ in master)

    def _check_whole(self) -> None:
        size = self.file.stat().st_size
        with open(self.file, "rb") as opened:
            header = opened.read(100)
        if len(header) < 100:
            raise InputError("truncated", f"{self.path} is truncated: it holds {size} bytes, less than a "
                             f"header; copy or export it again")
        page = int.from_bytes(header[16:18], "big")
        page = 65536 if page == 1 else page
        pages = int.from_bytes(header[28:32], "big")
        if header[24:28] == header[92:96] and pages and size < pages * page:
            raise InputError("truncated", f"{self.path} is truncated: it holds {size} of {pages * page} bytes; "
                             f"copy or export it again")
        self._reserved = header[20]
        for suffix in ("-wal", "-journal"):
            beside = self.file.with_name(self.file.name + suffix)
            if beside.exists() and beside.stat().st_size:
                raise InputError("unfinished", f"{self.path} is still being written, or its writer was killed "
                                 f"({beside.name} is beside it): finish the export first, or let SQLite bring in what "
                                 f"lies there: sqlite3 {self.file.name} 'PRAGMA wal_checkpoint(TRUNCATE)'")

    def _damaged(self, error: Exception) -> InputError:
        return InputError("damaged", f"{self.path} is damaged ({error}): copy or export it again")

    def tables(self) -> frozenset[str]:
        """See `TraceSource`."""
        return frozenset(self._named)

    def columns(self, table: str) -> tuple[str, ...]:
        """See `TraceSource`."""
        return tuple(row[1] for row in self._info(table))

    def _info(self, table: str) -> list[tuple]:
        if table not in self._named:
            return []
        try:
            return self._connection.execute(f'PRAGMA table_info("{self._named[table]}")').fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error

    def rows(self, table: str, columns: Sequence[str], where: Mapping[str, Sequence] | None = None,
             starts: Mapping[str, Sequence[str]] | None = None) -> list[tuple]:
        """See `TraceSource`."""
        names = ", ".join(f'"{column}"' for column in columns)
        tests: list[str] = []
        values: list[object] = []
        for column, allowed in (where or {}).items():
            tests.append(f'"{column}" IN ({",".join("?" * len(allowed))})')
            values.extend(allowed)
        for column, beginnings in (starts or {}).items():
            tests.append("(" + " OR ".join(f'substr("{column}", 1, {len(b)}) = ?' for b in beginnings) + ")")
            values.extend(beginnings)
        condition = " WHERE " + " AND ".join(tests) if tests else ""
        try:
            return self._connection.execute(f'SELECT {names} FROM "{self._named[table]}"{condition}',
                                            values).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error

    def integers(self, table: str, columns: Sequence[str]) -> Iterator[np.ndarray]:
        """See `TraceSource`; plain tables are read page by page, past SQLite's own machine."""
        info = self._info(table)
        order = {row[1]: index for index, row in enumerate(info)}
        root = self._roots.get(self._named[table])
        plain = not any(row[5] or row[4] is not None for row in info)  # no primary key, no default value
        done = 0
        if root is not None and plain:
            handle = os.open(self.file, os.O_RDONLY)
            try:
                for chunk in sqlitepages.read_chunks(handle, root, self._page_size, self._reserved,
                                                     [order[column] for column in columns], cpu_threads()):
                    done += chunk.shape[1]
                    yield chunk
                return
            except ValueError as error:
                raise self._damaged(error) from error
            except sqlitepages.NotPlain:
                pass  # some value is no plain integer: SQLite reads the rest, and judges it
            finally:
                os.close(handle)
        yield from self._integers_by_sql(table, columns, done)

    def _integers_by_sql(self, table: str, columns: Sequence[str], skip: int) -> Iterator[np.ndarray]:
        names = ", ".join(f'"{column}"' for column in columns)
        try:
            named = self._named[table]
            ordered = " ORDER BY rowid LIMIT -1 OFFSET ?" if named in self._roots else " LIMIT -1 OFFSET ?"
            cursor = self._connection.execute(f'SELECT {names} FROM "{named}"{ordered}', (skip,))
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                whole = np.array([[_whole(value) for value in row] for row in rows], dtype=np.int64)
                yield whole.reshape(len(rows), len(columns)).T
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._damaged(error) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError("bad-table", f"{self.path}: table {table} holds something else than integers in one of "
                             f"the columns {', '.join(columns)}") from error

    def close(self) -> None:
        """See `TraceSource`."""
        self._connection.close()


def _whole(value: object) -> int:
    """An integer, also one that a column without a type holds as a float; ValueError or TypeError for all else."""
    if value is None:
        return NULL
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(value)
        return int(value)
    return operator.index(value)  # type: ignore[arg-type]


def _int64(values: pa.Array) -> np.ndarray:
    """Integers of any width, NULL as `sqlitepages.NULL`."""
    values = values.cast(pa.int64(), safe=False)  # an unsigned id keeps its bits, as in SQLite
    return (pc.fill_null(values, NULL) if values.null_count else values).to_numpy()


class ParquetSource:
    """A folder with one Parquet file a table, as `nsys export --type parquetdir` writes it."""

    def __init__(self, path: Path) -> None:
        self.path = self.file = path
        files = {file.stem: file for file in sorted(path.glob("*.parquet"))}
        self._files = {plain: files[name] for plain, name in by_plain_name(files).items()}

    def tables(self) -> frozenset[str]:
        """See `TraceSource`."""
        return frozenset(self._files)

    def _open(self, table: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self._files[table])
        except (OSError, pa.ArrowInvalid) as error:
            raise self._damaged(table, error) from error

    def _damaged(self, table: str, error: Exception) -> InputError:
        said = " ".join(str(error).split())
        return InputError("damaged", f"{self._files[table]} is damaged ({said}): export it again")

    def columns(self, table: str) -> tuple[str, ...]:
        """See `TraceSource`."""
        if table not in self._files:
            return ()
        with self._open(table) as file:
            return tuple(file.schema_arrow.names)

    def rows(self, table: str, columns: Sequence[str], where: Mapping[str, Sequence] | None = None,
             starts: Mapping[str, Sequence[str]] | None = None) -> list[tuple]:
        """See `TraceSource`."""
        with self._open(table) as file:
            try:
                found = file.read(columns=sorted({*columns, *(where or {}), *(starts or {})}))
            except (OSError, pa.ArrowInvalid) as error:
                raise self._damaged(table, error) from error
        for column, beginnings in (starts or {}).items():
            tests = [pc.starts_with(found.column(column).cast(pa.string()), pattern=b) for b in beginnings]
            found = found.filter(reduce(pc.or_, tests))
        for column, allowed in (where or {}).items():
            values = pa.array(list(allowed)).cast(found.schema.field(column).type)
            found = found.filter(pc.is_in(found.column(column), value_set=values))
        return list(zip(*(found.column(column).to_pylist() for column in columns), strict=True))

    def integers(self, table: str, columns: Sequence[str]) -> Iterator[np.ndarray]:
        """Decoded a few batches ahead of the reader, on another core."""
        with ThreadPoolExecutor(1) as pool:
            batches = self._batches(table, columns)
            pending = deque(pool.submit(next, batches, None) for _ in range(_BATCHES_AHEAD))
            while (batch := pending.popleft().result()) is not None:
                pending.append(pool.submit(next, batches, None))
                yield batch

    def _batches(self, table: str, columns: Sequence[str]) -> Iterator[np.ndarray]:
        with self._open(table) as file:
            wrong = [c for c in columns if not pa.types.is_integer(file.schema_arrow.field(c).type)]
            if wrong:
                raise InputError("bad-table", f"{self._files[table]}: column {wrong[0]} does not hold integers")
            try:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(columns), use_threads=False):
                    yield np.stack([_int64(batch.column(column)) for column in columns])
            except (OSError, pa.ArrowInvalid) as error:
                raise self._damaged(table, error) from error

    def close(self) -> None:
        """Nothing is held open."""
