"""A trace in memory: what ran on each GPU and when, by columns, whatever exporter version wrote it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import nsysrep
from spoc_lib.nsight.metadata import Metadata, read_metadata, refuse_without_kernels
from spoc_lib.nsight.sources import ParquetSource, SqliteSource, TraceSource
from spoc_lib.nsight.sqlitepages import NULL

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"

#: copyKind of CUPTI, as nsys writes it in its reports.
_COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
               6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host",
               10: "Peer-to-Peer"}


@dataclass(frozen=True, order=True)
class Rank:
    """One GPU of one process. `deviceId` counts per process, so the pair is what is unique."""

    global_pid: int
    device: int

    @property
    def pid(self) -> int:
        """The operating system's process id, which stands in bits 24–47 of globalPid."""
        return (self.global_pid >> 24) & 0xFFFFFF


@dataclass(frozen=True)
class Activity:
    """What one rank's GPU did, sorted by start. Times in ns of the trace's own clock; `name` indexes
    `Trace.names`; `correlation` ties an activity to the launch in the same process."""

    start: np.ndarray
    end: np.ndarray
    name: np.ndarray
    stream: np.ndarray
    correlation: np.ndarray

    def __len__(self) -> int:
        return self.start.size


@dataclass(frozen=True)
class Trace:
    """A whole trace. `activities` holds kernels, copies and fills of each rank; `notes` what a reader must know."""

    source: TraceSource
    metadata: Metadata
    ranks: tuple[Rank, ...]
    activities: dict[Rank, Activity]
    names: tuple[str, ...]
    notes: list[str] = field(default_factory=list)

    @property
    def span_ns(self) -> tuple[int, int]:
        """First start and last end of anything on any GPU."""
        return (min(int(a.start[0]) for a in self.activities.values()),
                max(int(a.end.max()) for a in self.activities.values()))


@contextmanager
def open_source(path: str | Path) -> Iterator[TraceSource]:
    """The tables of a `.sqlite`, a parquetdir, a `.nsys-rep` or a `.qdstrm`; InputError with one sentence."""
    path = Path(path)
    if not path.exists():
        raise InputError("unreadable", f"cannot read the trace {path}: no such file or folder")
    with tempfile.TemporaryDirectory(prefix="spoc-nsight-") as folder:
        found = path
        if found.suffix == ".qdstrm":
            found = nsysrep.convert_qdstrm(found, Path(folder))
        if found.suffix == ".nsys-rep":
            found = nsysrep.export_sqlite(found, Path(folder))
        try:
            source = ParquetSource(found) if found.is_dir() else SqliteSource(found)
        except OSError as error:
            raise InputError("unreadable", f"cannot read the trace {path}: {error.strerror}") from error
        try:
            yield source
        finally:
            source.close()


def load_trace(source: TraceSource, *, accept_graph_mode: bool = False) -> Trace:
    """Read all GPU activity of a trace. InputError when there is none, or when CUDA graphs hide it."""
    metadata = read_metadata(source)
    if not metadata.known_schema:
        raise InputError("unknown-schema", f"{source.path} is not a trace of Nsight Systems that this reader knows: "
                         f"it has neither StringIds nor any CUDA activity table (found: {_some(source.tables())})")
    if KERNEL not in source.tables():
        refuse_without_kernels(source, metadata)
    parts = _Parts()
    parts.add_kernels(source)
    if not parts.rows:
        refuse_without_kernels(source, metadata)
    parts.add_copies(source)
    trace = parts.assemble(source, metadata)
    metadata.check_graphs(trace, accept_graph_mode)
    return trace


def _some(tables: frozenset[str]) -> str:
    return ", ".join(sorted(tables)[:5]) or "no tables"


class _Parts:
    """Chunks of all activity tables, gathered rank by rank."""

    def __init__(self) -> None:
        self.rows = 0
        self.notes: list[str] = []
        self._chunks: dict[Rank, list[tuple[np.ndarray, ...]]] = {}
        self._synthetic: dict[str, int] = {}
        self._negative = 0

    def add_kernels(self, source: TraceSource) -> None:
        names = source.columns(KERNEL)
        column = next((c for c in ("demangledName", "shortName", "mangledName", "nameId") if c in names), None)
        missing = [c for c in ("start", "end", "deviceId") if c not in names]
        if column is None or missing:
            raise InputError("unknown-schema", f"{source.path}: table {KERNEL} lacks "
                             f"{', '.join(missing or ['demangledName'])}: this exporter version is not known")
        for chunk in self._read(source, KERNEL, ("start", "end", "deviceId", column)):
            self._put(chunk, chunk[3])

    def add_copies(self, source: TraceSource) -> None:
        if MEMCPY in source.tables():
            kinds = "copyKind" in source.columns(MEMCPY)
            for chunk in self._read(source, MEMCPY, ("start", "end", "deviceId", *(["copyKind"] * kinds))):
                codes = np.empty(chunk.shape[1], dtype=np.int64)
                for kind in np.unique(chunk[3]).tolist() if kinds else [None]:
                    label = _COPY_KINDS.get(kind, "other kind")
                    where = chunk[3] == kind if kinds else slice(None)
                    codes[where] = self._synthetic_code(f"[CUDA memcpy {label}]")
                self._put(chunk, codes)
        if MEMSET in source.tables():
            for chunk in self._read(source, MEMSET, ("start", "end", "deviceId")):
                self._put(chunk, np.full(chunk.shape[1], self._synthetic_code("[CUDA memset]"), dtype=np.int64))

    def _synthetic_code(self, name: str) -> int:
        """Negative codes, so that they never meet an id of StringIds."""
        return self._synthetic.setdefault(name, -1 - len(self._synthetic))

    def _read(self, source: TraceSource, table: str, columns: tuple[str, ...]) -> Iterator[np.ndarray]:
        """Rows start, end, deviceId, the fourth of `columns` if given (else 0), globalPid, streamId, correlationId;
        0 where the exporter has no such column or value."""
        have = source.columns(table)
        optional = [c for c in ("globalPid", "streamId", "correlationId") if c in have]
        slots = [*range(len(columns)), *(("globalPid", "streamId", "correlationId").index(c) + 4 for c in optional)]
        for chunk in source.integers(table, [*columns, *optional]):
            full = np.zeros((7, chunk.shape[1]), dtype=np.int64)
            full[slots] = chunk
            full[full == NULL] = 0
            yield full

    def _put(self, chunk: np.ndarray, codes: np.ndarray) -> None:
        start, end, device, _, pid, stream, correlation = chunk
        self.rows += start.size
        self._negative += int(np.count_nonzero(end < start))
        key = pid * 4096 + device  # devices of one process are few, and globalPid ends in 24 zero bits
        for value in np.unique(key).tolist():
            where = np.flatnonzero(key == value)
            rank = Rank(int(pid[where[0]]), int(device[where[0]]))
            self._chunks.setdefault(rank, []).append((
                start[where], end[where], codes[where], stream[where].astype(np.int32),
                correlation[where].astype(np.int64)))

    def assemble(self, source: TraceSource, metadata: Metadata) -> Trace:
        if self._negative:
            self.notes.append(f"{self._negative} activities end before they start; they count as having no length")
        codes = np.unique(np.concatenate([np.unique(part[2]) for parts in self._chunks.values() for part in parts]))
        names = self._resolve(source, codes)
        activities = {}
        for rank in sorted(self._chunks):
            parts = self._chunks.pop(rank)
            start, end, code, stream, correlation = (np.concatenate(column) for column in zip(*parts, strict=True))
            name = np.searchsorted(codes, code).astype(np.int32)
            if np.any(start[1:] < start[:-1]):
                order = np.argsort(start, kind="stable")
                start, end, name, stream, correlation = (
                    column[order] for column in (start, end, name, stream, correlation))
            activities[rank] = Activity(start, end, name, stream, correlation)
        return Trace(source, metadata, tuple(activities), activities, tuple(names), [*metadata.notes, *self.notes])

    def _resolve(self, source: TraceSource, codes: np.ndarray) -> list[str]:
        ids = [int(code) for code in codes if code >= 0]
        known: dict[int, str] = {}
        if "StringIds" in source.tables():
            for i in range(0, len(ids), 500):
                known.update(source.rows("StringIds", ("id", "value"), {"id": ids[i:i + 500]}))
        lost = [i for i in ids if i not in known]
        if lost:
            self.notes.append(f"{len(lost)} kernel names are missing from StringIds; they appear as their ids")
        synthetic = {code: name for name, code in self._synthetic.items()}
        return [synthetic[int(c)] if c < 0 else known.get(int(c), f"kernel with name id {int(c)}") for c in codes]
