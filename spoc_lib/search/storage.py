"""Where a study is kept: the run's own SQLite file, or a database that many workers share."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import SQLITE_FULL
from typing import Any
from urllib.parse import quote, unquote

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, ProgrammingError, SQLAlchemyError

from spoc_lib.core import sqlite
from spoc_lib.core.errors import InputError
from spoc_lib.core.sqlite import full_disk_told

HEARTBEAT_S, GRACE_S = 15, 60
LOCK_WAIT_S = 60.0
SCHEMA_ATTEMPTS, SCHEMA_WAIT_S = 5, 0.5


def storage_from_environment() -> str | None:
    """`SPOC_STORAGE`, the database that many workers share; None = the run's own SQLite file."""
    return os.environ.get("SPOC_STORAGE") or None


def file_url(path: Path) -> str:
    """The URL of an SQLite file, whatever its folders are called: `?` begins a URL's query, Optuna fills in braces, and
    a URI of SQLite's own writes both otherwise."""
    uri = f"file:{quote(str(path.resolve()))}"
    decoded = make_url("sqlite:///%41").database == "A"  # by SQLAlchemy since 2.1, before SQLite does it
    return f"sqlite:///{quote(uri) if decoded else uri}?uri=true"


def open_storage(url: str, *, heartbeat: bool = False) -> RDBStorage:
    """Optuna's storage at `url`; InputError (without the password) when it cannot be reached."""
    with full_disk_told(_file_of(url)):
        return _opened(url, heartbeat)


def _file_of(url: str) -> str:
    """The path of an SQLite file; of any other database its URL."""
    return unquote(str(make_url(url).database).removeprefix("file:")) if url.startswith("sqlite:") else url


def _opened(url: str, heartbeat: bool) -> RDBStorage:
    for attempt in range(SCHEMA_ATTEMPTS):
        try:
            return _connect(url, heartbeat)
        except ArgumentError as error:
            raise InputError("bad-storage", "SPOC_STORAGE is not a database URL: use "
                             "postgresql+psycopg://user@host/database") from error
        except (SQLAlchemyError, ImportError, ValueError) as error:
            # Two workers that meet an empty database both create Optuna's tables; one of them loses, once.
            if isinstance(error, (IntegrityError, ProgrammingError)) and attempt < SCHEMA_ATTEMPTS - 1:
                time.sleep(SCHEMA_WAIT_S)
                continue
            code = sqlite.code_of(error)
            if code == SQLITE_FULL:
                raise
            shown = _file_of(url) if url.startswith("sqlite:") else make_url(url).render_as_string(hide_password=True)
            fix = f": remove {_file_of(url)}, and its trials are measured again" if code in sqlite.BROKEN else ""
            raise InputError("bad-storage", f"the study's database {shown} cannot be used ({type(error).__name__}){fix}"
                             ) from error
    raise AssertionError("unreachable")


@contextmanager
def answering(folder: Path) -> Iterator[None]:
    """InputError in one sentence when the study's database stops answering (locked for a minute, gone); OSError when
    its disk is full."""
    try:
        with full_disk_told(folder / "study.db"):
            yield
    except (StorageInternalError, SQLAlchemyError) as error:
        cause = error.__cause__ or error
        raise InputError("study-database", f"the study's database stopped answering ({type(cause).__name__}: locked by "
                         f"another program, or gone): what was answered is kept; free it, then go on with `spoc search "
                         f"resume {folder}`") from error


def _connect(url: str, heartbeat: bool) -> RDBStorage:
    connect = {"timeout": LOCK_WAIT_S} if url.startswith("sqlite") else {}
    with warnings.catch_warnings():  # Optuna still calls heartbeats experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        options: dict[str, Any] = {}
        if heartbeat:  # a worker that dies leaves RUNNING trials: the others put them back
            options = {"heartbeat_interval": HEARTBEAT_S, "grace_period": GRACE_S,
                       "heartbeat_stale_trial_callback": RetryHeartbeatStaleTrialCallback()}
        return RDBStorage(url, engine_kwargs={"connect_args": connect}, **options)
