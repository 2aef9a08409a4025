"""The one Parquet writer and reader. Every table has a schema (`schemas.py`), checked on write and on read."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import replacing
from spoc_lib.core.stamp import stamped

if TYPE_CHECKING:  # half a second, for those who only write
    import pandas as pd

Rows: TypeAlias = "pd.DataFrame | Sequence[Mapping[str, Any]] | pa.Table"


def as_table(rows: Rows, schema: pa.Schema) -> pa.Table:
    """`rows` with exactly the columns of `schema`, in its order; ValueError when one lacks or does not fit."""
    if isinstance(rows, Sequence):
        unknown = {key for row in rows for key in row} - set(schema.names)
        if unknown:
            raise ValueError(f"unknown columns: {sorted(unknown)}")
        return pa.Table.from_pylist(list(rows), schema=schema)
    names = rows.column_names if isinstance(rows, pa.Table) else rows.columns
    missing = set(schema.names) - set(names)
    if missing:
        raise ValueError(f"missing columns: {sorted(missing)}")
    if isinstance(rows, pa.Table):
        return rows.select(schema.names).cast(schema)
    return pa.Table.from_pandas(rows[schema.names], schema=schema, preserve_index=False)


def write_table(path: str | Path, rows: Rows, schema: pa.Schema) -> Path:
    """Write `rows` as Parquet under `schema`, whole or not at all; the run's stamp goes into its metadata."""
    table = stamped(as_table(rows, schema))
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")
    return Path(path)


def need_whole(path: Path) -> None:
    """InputError where a Parquet file is cut off or none at all; reads its footer only."""
    try:
        pq.read_schema(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError("bad-table", f"{path} is not a readable Parquet file: {error}") from error


def read_table(path: str | Path, schema: pa.Schema) -> pd.DataFrame:
    """Read a table of the workbench; InputError when it is absent, damaged, or lacks columns of `schema`."""
    path = Path(path)
    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise InputError("missing-table", f"{path} does not exist: run the stage that writes it first") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError("bad-table", f"{path} is not a readable Parquet file: {error}") from error
    try:
        return as_table(table, schema).to_pandas()
    except (ValueError, pa.ArrowInvalid) as error:
        raise InputError("bad-table", f"{path} does not hold the expected table: {error}") from error


class TableAppender:
    """A table written as it grows: parts land in `<path>.parts/`, `close` merges them into `path`.

    A part is whole or absent, so a killed process loses only the rows since the last `flush`;
    `recover` merges what a killed writer left.
    """

    def __init__(self, path: str | Path, schema: pa.Schema) -> None:
        self.path = Path(path)
        self.schema = schema
        self._parts = self.path.with_name(self.path.name + ".parts")
        shutil.rmtree(self._parts, ignore_errors=True)
        self._parts.mkdir(parents=True)
        self._rows: list[Mapping[str, Any]] = []
        self._count = 0

    def append(self, row: Mapping[str, Any]) -> None:
        """One more row; it is written with the next `flush`."""
        self._rows.append(row)

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Several more rows."""
        self._rows.extend(rows)

    def flush(self) -> None:
        """Put the buffered rows on disk as one part."""
        if self._rows:
            write_table(self._parts / f"{self._count:06d}.parquet", self._rows, self.schema)
            self._count += 1
            self._rows = []

    def close(self) -> Path:
        """Write what is left and join the parts into the table; its path."""
        self.flush()
        return self.recover(self.path, self.schema)

    @staticmethod
    def recover(path: str | Path, schema: pa.Schema) -> Path:
        """Merge the parts that are there into `path` and remove them; an existing whole `path` wins."""
        path = Path(path)
        parts = path.with_name(path.name + ".parts")
        if parts.is_dir():
            tables = [pq.read_table(part) for part in sorted(parts.glob("[0-9]*.parquet"))]
            write_table(path, pa.concat_tables(tables) if tables else schema.empty_table(), schema)
            shutil.rmtree(parts)
        return path
