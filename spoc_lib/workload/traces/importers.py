"""Foreign traces in: which format a file has, its sessions, and what had to be left out.

A broken record is skipped and reported with its reason. A file that cannot be read at all, or that nothing in it can
be used of, is the caller's mistake and ends with one sentence (InputError).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spoc_lib.core.errors import InputError
from spoc_lib.workload.tokenizer import Tokenizer, offline_tokenizer
from spoc_lib.workload.traces import files_in, hub, session_logs
from spoc_lib.workload.traces import formats_blocks as blocks
from spoc_lib.workload.traces import formats_text as texts
from spoc_lib.workload.traces.files_in import SUFFIXES, parsed
from spoc_lib.workload.traces.messages_in import UNTOLD, Lost, is_message
from spoc_lib.workload.traces.result import ImportResult
from spoc_lib.workload.traces.sessions import PrefixIndex, Reject, Session

#: A record is held in memory as a whole, so none may be larger; nor may a file that is one JSON value.
LARGEST_BYTES = 1 << 30
FORMATS = ("SWE-agent .traj, OpenAI-style or ShareGPT messages, agents' session logs and logged requests (json, jsonl, "
           "parquet), kv-cache-tester (json, parquet), Mooncake (jsonl), each also packed (gz, bz2, xz, zst), "
           "hub:OWNER/NAME[:SPLIT]")


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
    notes = reader.told()
    return ImportResult(tuple(reader.sessions), tuple(reader.skipped), tuple(map(str, paths)), notes)


class _Reader:
    """Collects sessions from sources of any format; positions in `sessions` are the owners that requests refer to.
    A table of sessions (kv-cache-tester's conversations) only tells the sizes of tools and system prompt."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None) -> None:
        self.sessions: list[Session] = []
        self.skipped: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self._lost = Lost()
        self._names: set[str] = set()
        self._tokenizer, self._limit = tokenizer, limit
        self._global = PrefixIndex()
        self._roots: dict[str, tuple[int, int]] = {}

    def told(self) -> tuple[str, ...]:
        """What is to be said of an import besides records left out. What cost tokens but has no text here joins
        `skipped`, a line a kind with its count."""
        kinds = dict(self._lost.kinds)
        self.skipped += [(f"{kinds.pop(kind)} x {kind}", "it has no text here: its tokens are missing from the prompts")
                         for kind in sorted(kinds) if kind in UNTOLD]
        kept = kinds.pop("reasoning kept", 0)
        left = [f"left out: {', '.join(f'{count} x {kind}' for kind, count in sorted(kinds.items()))}"] if kinds else []
        return (*left, *([f"{kept} messages hold reasoning: it counts as output, and stays in the history"] if kept else
                         []), *dict.fromkeys(self.notes))

    def path(self, path: Path) -> None:
        if not path.exists() and hub.NAME.fullmatch(str(path)) and files_in.suffix(path) not in SUFFIXES:
            self.hub(f"{hub.HUB}{path}")  # no such file, but it has the form of a hub set
            return
        if not path.exists():
            raise InputError("no-trace", f"there is no trace at {path}: name a file or folder that exists ({FORMATS})")
        if path.is_file():
            self._file(path, alone=True)
            return
        files, notes = files_in.found(path)
        self.notes += notes
        if not files:
            raise InputError("no-trace", f"folder {path} holds no trace{': ' + '; '.join(notes) if notes else ''}; "
                             f"known are {FORMATS}")
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

        self._many(records(), dataset)

    def _file(self, path: Path, alone: bool) -> None:
        """Read one file. An unusable one is an error when the user named it (`alone`); in a folder it is skipped."""
        try:
            with open(path, "rb") as handle:
                table = handle.read(4) == b"PAR1" or files_in.suffix(path) == ".parquet"
            if table:
                self._parquet(path)
            elif files_in.suffix(path) in files_in.LINES:
                self._lines(path)
            else:
                self._json(path)
        except (OSError, *files_in.DAMAGED) as error:
            told = getattr(error, "strerror", None) or error
            if alone:
                raise InputError("unreadable", f"cannot read the trace {path}: {told}") from error
            self.skipped.append((path.name, f"it cannot be read: {told}"))
        except Reject as reason:
            if alone:
                raise InputError("unknown-format", f"the trace {path} cannot be read: {reason}; known are {FORMATS}"
                                 ) from reason
            self.skipped.append((path.name, str(reason)))

    def _json(self, path: Path) -> None:
        data = b""
        try:
            data = files_in.whole(path, LARGEST_BYTES)
            value = parsed(data)
        except Reject as reason:
            if files_in.suffix(path) != ".traj" and _looks_like_lines(path):
                self._lines(path)
                return
            values = files_in.several(data) if data else None
            if values is None:
                raise
            del reason
            value = values
        self._value(value, path)

    def _value(self, value: Any, path: Path) -> None:
        """A file that is one JSON value: a record, or a list of them."""
        if isinstance(value, list) and texts.find_messages(value) is None:
            if not any(self._known(record) for record in value):
                raise Reject("its format is unknown")
            self._many(((f"{path.name} record {k}", record) for k, record in enumerate(value)), path.stem)
        elif (entries := _har(value)) is not None:
            self._many(((f"{path.name} entry {k}", entry) for k, entry in enumerate(entries)), path.stem)
        elif self._known(value):
            self._record(value, path.stem)
        else:
            raise Reject("its format is unknown")

    def _lines(self, path: Path) -> None:
        def records() -> Iterator[tuple[str, Any]]:
            number = 0
            try:
                for number, line in files_in.lines(path, LARGEST_BYTES):
                    try:
                        values = [parsed(line)]
                    except Reject as reason:
                        values = files_in.several(line) or []
                        if not values:
                            self.skipped.append((f"{path.name} line {number}", str(reason)))
                    for value in values:
                        nested = isinstance(value, list) and texts.find_messages(value) is None
                        yield from ((f"{path.name} line {number}", one) for one in (value if nested else [value]))
            except (OSError, *files_in.DAMAGED) as error:
                if not number:
                    raise
                self.skipped.append((f"{path.name} line {number + 1} and all after it",
                                     f"the file is damaged: {error}"))

        before, failed = len(self.sessions), len(self.skipped)
        self._many(records(), path.stem)
        if len(self.sessions) == before and all("not valid JSON" in why or "unknown" in why
                                                for _, why in self.skipped[failed:]):
            values = files_in.several(files_in.whole(path, LARGEST_BYTES))
            why = self.skipped[failed][1] if len(self.skipped) > failed else "it is empty"
            if not values:
                raise Reject(f"no line of it has a known format: {why}")
            del self.skipped[failed:]
            self._value(values, path)  # values written over several lines

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
        elif columns >= {"cid", "tool", "system"}:
            for row in handle.read(["cid", "tool", "system"]).to_pylist():
                try:
                    self._roots[str(row["cid"])] = (blocks.tokens(row, "tool", default=0),
                                                    blocks.tokens(row, "system", default=0))
                except Reject as reason:
                    self.skipped.append((f"{name} {row['cid']}"[:100], str(reason)))
        else:
            rows = (row for batch in handle.iter_batches(batch_size=64) for row in batch.to_pylist())
            first = list(islice(rows, 64))
            if not columns & set(texts.LISTS) and not any(map(self._known, first)):
                raise Reject(f"its columns ({', '.join(sorted(columns))[:120]}) are those of no known format")
            self._many(((f"{name} row {k}", row) for k, row in enumerate(_both(first, rows))), Path(name).stem)

    def _many(self, records: Iterable[tuple[str, Any]], source: str) -> None:
        """Records of one source: whole sessions, requests of a length-only trace, or messages of a log."""
        requests, log = [], []
        for name, record in islice(records, self._limit):
            if blocks.is_mooncake(record):
                requests.append((name, record))
            elif not self._is_session(record) and is_message(record):
                log.append(record)
            else:
                self._record(record, name)
        if requests:
            self._mooncake(requests)
        for name, messages, parent in session_logs.conversations(log, source, self._lost) if log else ():
            self._messages(messages, name, parent=parent)

    def _known(self, record: Any) -> bool:
        return blocks.is_mooncake(record) or self._is_session(record) or is_message(record)

    def _is_session(self, record: Any) -> bool:
        return (blocks.is_kv_cache_tester(record) or texts.is_trajectory(record)
                or texts.find_messages(record) is not None
                or (not is_message(record) and texts.logged(record) is not None))

    def _record(self, record: Any, name: str) -> None:
        """One record that is a whole session, of any format."""
        at = len(self.sessions)
        try:
            if blocks.is_kv_cache_tester(record):
                self._add(*blocks.kv_cache_tester(record, name, at, self._global))
            elif blocks.is_mooncake(record):
                self._mooncake([(name, record)])
            elif texts.is_trajectory(record):
                self._add([texts.trajectory(record, name, at, self._tokenizer, self._lost)], [])
            elif isinstance(record, dict) and (messages := texts.logged(record)) is not None:
                self._messages(messages, name, record)
            elif (messages := texts.find_messages(record)) is not None:
                for own, group, parent in session_logs.conversations(messages, name, self._lost):
                    self._messages(group, own, parent=parent)
            else:
                raise Reject("its format is unknown")
        except Reject as reason:
            self.skipped.append((name, str(reason)))

    def _messages(self, messages: list, name: str, record: Any = None, parent: str | None = None) -> None:
        try:
            stated = texts.stated_output(record)
            session = texts.conversation(messages, name, len(self.sessions), self._tokenizer, self._lost, parent=parent,
                                         unanswered=stated)
            if stated is not None and texts.unanswered(messages):
                self._lost += "reply that is not logged (its length is taken from its usage, or max_tokens)"
            self._add([session], [])
        except Reject as reason:
            self.skipped.append((name, str(reason)))

    def _mooncake(self, requests: list[tuple[str, Any]]) -> None:
        sessions, skipped, notes = blocks.mooncake(requests, len(self.sessions), self._tokenizer)
        self.notes += notes
        self._add(sessions, skipped)

    def _add(self, sessions: list[Session], skipped: list[tuple[str, str]]) -> None:
        self.sessions += [replace(session, root_tokens=self._roots[session.name])
                          if not session.root_tokens and session.name in self._roots else session
                          for session in sessions]
        self._names |= {session.name for session in sessions}
        self.skipped += skipped


def _both(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from first
    yield from rest


def _har(value: Any) -> list[Any] | None:
    """The exchanges of a browser's or proxy's HTTP archive."""
    log = value.get("log") if isinstance(value, dict) else None
    return log["entries"] if isinstance(log, dict) and isinstance(log.get("entries"), list) else None


def _looks_like_lines(path: Path) -> bool:
    try:
        parsed(next(files_in.lines(path, LARGEST_BYTES))[1])
    except (Reject, StopIteration):
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
