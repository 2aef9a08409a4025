"""What every table of a run carries in its Parquet metadata: where it came from, in one JSON object.

The pipeline puts the stamp into this process's environment, so the load's child processes write it too. A table that
is written outside of a run has none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spoc_lib.core.files import plain

VARIABLE = "SPOC_STAMP"
KEY = b"spoc"


def put(record: Mapping[str, Any]) -> None:
    """From now on every table that this process and its children write carries `record`."""
    os.environ[VARIABLE] = json.dumps(plain(dict(record)), sort_keys=True)


def stamped(table: pa.Table) -> pa.Table:
    """`table` with the stamp of this process in its metadata; as it is without one."""
    text = os.environ.get(VARIABLE)
    if not text:
        return table
    return table.replace_schema_metadata({**(table.schema.metadata or {}), KEY: text.encode()})


def read(path: str | Path) -> dict[str, Any] | None:
    """The stamp of a Parquet file, None where it has none."""
    metadata = pq.read_schema(path).metadata or {}
    return json.loads(metadata[KEY]) if KEY in metadata else None
