"""Foreign traces in: which format a file has, its sessions, and what had to be left out.

A broken record is skipped and reported with its reason. A file that cannot be read at all, or that nothing in it can
be used of, is the caller's mistake and ends with one sentence (InputError).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from spoc_lib.core.errors import InputError
from spoc_lib.workload.tokenizer import Tokenizer, offline_tokenizer
from spoc_lib.workload.traces import formats_blocks as blocks
from spoc_lib.workload.traces import formats_text as texts
from spoc_lib.workload.traces import hub
from spoc_lib.workload.traces.result import ImportResult
from spoc_lib.workload.traces.sessions import PrefixIndex, Reject, Session

#: A record is held in memory as a whole, so none may be larger; nor may a file that is one JSON value.
LARGEST_BYTES = 1 << 30
SUFFIXES = (".json", ".jsonl", ".ndjson", ".traj", ".parquet")
FORMATS = ("SWE-agent .traj, OpenAI-style or ShareGPT messages (json, jsonl, parquet), kv-cache-tester (json, "
           "parquet), Mooncake (jsonl), hub:OWNER/NAME[:SPLIT]")


def import_path(path: str | Path, *, tokenizer: Tokenizer | None = None, limit: int | None = None) -> ImportResult:
    """Sessions of one file, of a folder's files, or of a hub set (`hub:OWNER/NAME[:SPLIT]`)."""
    return import_paths([path], tokenizer=tokenizer, limit=limit)


def import_paths(paths: list[str | Path], *, tokenizer: Tokenizer | None = None, limit: int | None = None,
                 ) -> ImportResult:
    """As `import_path` for several. `limit`: most records to read from each source."""
    reader = _Reader(tokenizer or offline_tokenizer(), limit)
    for path in paths:
        if str(path).startswith(hub.HUB):
            reader.hub(str(path))
        else:
            reader.path(Path(path))
    if all(session.parent is not None for session in reader.sessions):
        record, reason = reader.skipped[0] if reader.skipped else (str(paths[0]), "only sub-agents' requests are in it"
                                                                   if reader.sessions else "it is empty")
        raise InputError("nothing-imported", f"nothing in {', '.join(map(str, paths))} can be played: {record}: "
                         f"{reason}")
    return ImportResult(tuple(reader.sessions), tuple(reader.skipped), tuple(map(str, paths)))


class _Reader:
    """Collects sessions from sources of any format; positions in `sessions` are the owners that requests refer to.
    A table of sessions (kv-cache-tester's conversations) only tells the sizes of tools and system prompt."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None) -> None:
        self.sessions: list[Session] = []
        self.skipped: list[tuple[str, str]] = []
        self._names: set[str] = set()
        self._tokenizer, self._limit = tokenizer, limit
        self._global = PrefixIndex()
        self._roots: dict[str, tuple[int, int]] = {}

    def path(self, path: Path) -> None:
        if not path.exists() and hub.NAME.fullmatch(str(path)) and path.suffix.lower() not in SUFFIXES:
            self.hub(f"{hub.HUB}{path}")  # no such file, but it has the form of a hub set
            return
        if not path.exists():
            raise InputError("no-trace", f"there is no trace at {path}: name a file or folder that exists ({FORMATS})")
        if path.is_file():
            self._file(path, alone=True)
            return
        files = sorted((p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()),
                       key=lambda p: (p.suffix.lower() == ".parquet", str(p)))
        if not files:
            raise InputError("no-trace", f"folder {path} holds no trace: known are {FORMATS}")
        for file in files:
            self._file(file, alone=False)

    def hub(self, name: str) -> None:
        dataset, _, split = name.removeprefix(hub.HUB).partition(":")

        def records() -> Iterator[tuple[str, Any]]:
            count = 0
            try:
                for count, record in enumerate(hub.records(dataset, split or "train", self._limit), 1):
                    try:
                        yield f"{dataset} record {count - 1}", parsed(record) if isinstance(record, bytes) else record
                    except Reject as reason:
                        self.skipped.append((f"{dataset} record {count - 1}", str(reason)))
            except InputError as error:
                if not count:
                    raise
                self.skipped.append((f"{dataset} record {count} and all after it", error.message))

        self._many(records())

    def _file(self, path: Path, alone: bool) -> None:
        """Read one file. An unusable one is an error when the user named it (`alone`); in a folder it is skipped."""
        try:
            if path.suffix.lower() == ".parquet":
                self._parquet(path)
            elif path.suffix.lower() in (".jsonl", ".ndjson"):
                self._lines(path)
            else:
                self._json(path)
        except OSError as error:
            if alone:
                raise InputError("unreadable", f"cannot read the trace {path}: {error.strerror or error}") from error
            self.skipped.append((path.name, f"it cannot be read: {error.strerror or error}"))
        except Reject as reason:
            if alone:
                raise InputError("unknown-format", f"the trace {path} cannot be read: {reason}; known are {FORMATS}"
                                 ) from reason
            self.skipped.append((path.name, str(reason)))

    def _json(self, path: Path) -> None:
        try:
            if path.stat().st_size > LARGEST_BYTES:
                raise Reject(f"it is larger than {LARGEST_BYTES:,} bytes: write one record a line (.jsonl)")
            value = parsed(path.read_bytes())
        except Reject:
            if path.suffix.lower() == ".json" and _looks_like_lines(path):
                self._lines(path)
                return
            raise
        if isinstance(value, list) and texts.find_messages(value) is None:
            if not any(self._known(record) for record in value):
                raise Reject("its format is unknown")
            self._many((f"{path.name} record {k}", record) for k, record in enumerate(value))
        elif self._known(value):
            self._record(value, path.stem)
        else:
            raise Reject("its format is unknown")

    def _lines(self, path: Path) -> None:
        def records() -> Iterator[tuple[str, Any]]:
            with open(path, "rb") as handle:
                for k, line in enumerate(iter(lambda: handle.readline(LARGEST_BYTES + 1), b""), 1):
                    if len(line) > LARGEST_BYTES:
                        raise Reject(f"its line {k} is longer than {LARGEST_BYTES:,} bytes")
                    if line.strip():
                        try:
                            yield f"{path.name} line {k}", parsed(line)
                        except Reject as reason:
                            self.skipped.append((f"{path.name} line {k}", str(reason)))

        before, failed = len(self.sessions), len(self.skipped)
        self._many(records())
        if len(self.sessions) == before and all("not valid JSON" in why or "unknown" in why
                                                for _, why in self.skipped[failed:]):
            raise Reject("no line of it has a known format")

    def _parquet(self, path: Path) -> None:
        try:
            self._table(pq.ParquetFile(path), path.name)
        except (pa.ArrowException, OSError) as error:  # of a damaged page, too; a file that is absent was told before
            raise Reject(f"it is not a readable Parquet file ({_first_line(error)})") from error

    def _table(self, handle: pq.ParquetFile, name: str) -> None:
        columns = set(handle.schema_arrow.names)
        if columns >= blocks.TABLE_COLUMNS:
            frame = handle.read().to_pandas()
            known = frame["cid"].astype(str).isin(self._names)
            for cid in frame.loc[known, "cid"].astype(str).unique():
                self.skipped.append((f"{name} {cid}", "the same session was read from its own file"))
            self._add(*blocks.table(frame[~known], len(self.sessions)))
        elif columns & set(texts.LISTS):
            count = 0
            for batch in handle.iter_batches(batch_size=64):
                for record in batch.to_pylist():
                    if self._limit is not None and count >= self._limit:
                        return
                    self._record(record, f"{name} row {count}")
                    count += 1
        elif columns >= {"cid", "tool", "system"}:
            for row in handle.read(["cid", "tool", "system"]).to_pylist():
                try:
                    self._roots[str(row["cid"])] = (blocks.tokens(row, "tool", default=0),
                                                    blocks.tokens(row, "system", default=0))
                except Reject as reason:
                    self.skipped.append((f"{name} {row['cid']}"[:100], str(reason)))
        else:
            raise Reject(f"its columns ({', '.join(sorted(columns))[:120]}) are those of no known format")

    def _many(self, records: Iterator[tuple[str, Any]]) -> None:
        requests = []
        for k, (name, record) in enumerate(records):
            if self._limit is not None and k >= self._limit:
                break
            if blocks.is_mooncake(record):
                requests.append((name, record))
            else:
                self._record(record, name)
        if requests:
            self._add(*blocks.mooncake(requests, len(self.sessions)))

    def _known(self, record: Any) -> bool:
        return blocks.is_kv_cache_tester(record) or blocks.is_mooncake(record) or texts.is_trajectory(record) or (
            texts.find_messages(record) is not None)

    def _record(self, record: Any, name: str) -> None:
        """One record that is a whole session, of any format."""
        at = len(self.sessions)
        try:
            if blocks.is_kv_cache_tester(record):
                self._add(*blocks.kv_cache_tester(record, name, at, self._global))
            elif blocks.is_mooncake(record):
                self._add(*blocks.mooncake([(name, record)], at))
            elif texts.is_trajectory(record):
                self._add([texts.trajectory(record, name, at, self._tokenizer)], [])
            elif (messages := texts.find_messages(record)) is not None:
                self._add([texts.conversation(messages, name, at, self._tokenizer)], [])
            else:
                raise Reject("its format is unknown")
        except Reject as reason:
            self.skipped.append((name, str(reason)))

    def _add(self, sessions: list[Session], skipped: list[tuple[str, str]]) -> None:
        self.sessions += [replace(session, root_tokens=self._roots[session.name])
                          if not session.root_tokens and session.name in self._roots else session
                          for session in sessions]
        self._names |= {session.name for session in sessions}
        self.skipped += skipped


def parsed(data: bytes) -> Any:
    """A JSON value. NaN and Infinity, which Python writes but JSON lacks, are read: so their field can be named."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        try:
            value = json.loads(data)
            orjson.dumps(value)  # refuses what no text can hold, such as half a surrogate pair
        except (ValueError, TypeError, RecursionError):
            raise Reject(f"it is not valid JSON ({error})") from error
        return value


def _looks_like_lines(path: Path) -> bool:
    with open(path, "rb") as handle:
        first = handle.readline(LARGEST_BYTES)
    try:
        parsed(first)
    except Reject:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
