"""What an error of SQLite means, however deep it lies: Optuna wraps SQLAlchemy's, which wraps SQLite's."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The file is none of SQLite's, or is broken: no waiting and no room will mend it.
BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def code_of(error: BaseException | None) -> int | None:
    """SQLite's primary code of what an error goes back to; None where that is no error of SQLite's."""
    while error is not None:
        if isinstance(error, sqlite3.Error):
            code: int | None = getattr(error, "sqlite_errorcode", None)
            return None if code is None else code & 0xFF
        error = getattr(error, "orig", None) or error.__cause__
    return None


@contextmanager
def full_disk_told(path: str | Path) -> Iterator[None]:
    """SQLite has an error of its own for a full disk; outside of the block it is the one that any other file meets."""
    try:
        yield
    except Exception as error:
        if code_of(error) != sqlite3.SQLITE_FULL:
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
