"""A trace in memory: what ran on each GPU and when, by columns, whatever exporter version wrote it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import nsysrep, nvtx
from spoc_lib.nsight.gather import NameCodes, RankGatherer
from spoc_lib.nsight.metadata import RECAPTURE, Metadata, read_metadata, refuse_without_kernels
from spoc_lib.nsight.sources import ParquetSource, SqliteSource, TraceSource

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"

#: copyKind of CUPTI, as nsys writes it in its reports.
_COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
               6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host",
               10: "Peer-to-Peer"}


#: In graph mode, kernels that fill less of the window than this show that the work ran where none are recorded.
_REPRESENTATIVE_RATIO = 0.01


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
    `Trace.names`; `correlation` ties an activity to the launch in the same process (empty where nothing asks)."""

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
    uuids: dict[Rank, str] = field(default_factory=dict)

    @property
    def span_ns(self) -> tuple[int, int]:
        """First start and last end of anything on any GPU."""
        return (min(int(a.start[0]) for a in self.activities.values()),
                max(int(a.end.max()) for a in self.activities.values()))

    def require_gpus(self, expected: int | None) -> None:
        """InputError unless `expected` GPUs (where somebody said) have kernels: a part of a capture proves nothing."""
        if expected is None or len(self.ranks) == expected:
            return
        seen = ", ".join(f"GPU {r.device} of process {r.pid}" for r in self.ranks)
        if len(self.ranks) < expected:
            told = (f"{len(self.ranks)} of {expected} GPUs ({seen}): a rank was not captured; start the workers with "
                    f"VLLM_WORKER_MULTIPROC_METHOD=spawn and nsys with --trace-fork-before-exec=true")
        else:
            told = (f"{len(self.ranks)} GPUs where {expected} were expected ({seen}): another process's kernels are in "
                    f"it, or the engine has more ranks than was said")
        raise InputError("wrong-ranks", f"{self.source.path} holds kernels of {told}")


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
            source = ParquetSource(found) if found.is_dir() else SqliteSource(found, path)
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
    reader = _Reader(source)
    reader.kernels()
    if not reader.gathered.rows:
        refuse_without_kernels(source, metadata)
    reader.copies()
    trace = reader.trace(metadata)
    _check_graphs(trace, accept_graph_mode)
    return trace


def _check_graphs(trace: Trace, accept: bool) -> None:
    """InputError when CUDA graphs ran and the trace shows them whole, not their kernels."""
    metadata, path = trace.metadata, trace.source.path
    if metadata.graph_launches:
        raise InputError("graph-mode", f"{path} holds {metadata.graph_launches} CUDA graphs as single entries, so "
                         f"their kernels are not in it: {RECAPTURE}")
    if (metadata.graph_mode or "").lower() != "graph":
        return
    first, last = trace.span_ns
    kernels = sum(len(a) for a in trace.activities.values())
    busy = sum(int(np.maximum(a.end - a.start, 0).sum()) for a in trace.activities.values())
    share = busy / max(1, (last - first) * len(trace.ranks))
    if share < _REPRESENTATIVE_RATIO and not accept:
        raise InputError("graph-mode", f"{path} was captured in CUDA graph mode, which hides the kernels of graphs, "
                         f"and the {kernels} activities that it shows fill {share:.2%} of the window: {RECAPTURE} "
                         f"(or pass --accept-graph-mode if nothing ran in graphs)")
    trace.notes.append("the capture used CUDA graph mode; no graph launch is recorded, so all kernels are here. "
                       "For an engine that uses graphs, capture with --cuda-graph-trace=node")


def _some(tables: frozenset[str]) -> str:
    return ", ".join(sorted(tables)[:5]) or "no tables"


class _Reader:
    """Reads all activity tables, chunk by chunk, into arrays by rank."""

    def __init__(self, source: TraceSource) -> None:
        self.source = source
        self.gathered = RankGatherer()
        self.names = NameCodes()
        # the launches' ids only serve to tie kernels to NVTX ranges
        self._correlate = nvtx.NVTX in source.tables()

    def kernels(self) -> None:
        have = self.source.columns(KERNEL)
        column = next((c for c in ("demangledName", "shortName", "mangledName") if c in have), None)
        missing = [c for c in ("start", "end", "deviceId") if c not in have]
        if column is None or missing:
            raise InputError("unknown-schema", f"{self.source.path}: table {KERNEL} lacks "
                             f"{', '.join(missing or ['demangledName'])}: this exporter version is not known")
        for chunk in self._read(KERNEL, column):
            self._add(chunk, self.names.encode(chunk[column]))

    def copies(self) -> None:
        kind = "copyKind" if "copyKind" in self.source.columns(MEMCPY) else None
        for chunk in self._read(MEMCPY, kind):
            codes = np.empty(chunk["start"].size, dtype=np.int32)
            kinds = chunk[kind] if kind else np.zeros(codes.size, dtype=np.int64)
            for value in np.unique(kinds).tolist():
                label = _COPY_KINDS.get(value, "of another kind")
                codes[kinds == value] = self.names.synthetic(f"[CUDA memcpy {label}]")
            self._add(chunk, codes)
        for chunk in self._read(MEMSET):
            self._add(chunk, np.full(chunk["start"].size, self.names.synthetic("[CUDA memset]"), dtype=np.int32))

    def _read(self, table: str, extra: str | None = None) -> Iterator[dict[str, np.ndarray]]:
        have = self.source.columns(table)
        if not {"start", "end", "deviceId"} <= set(have):
            return
        optional = ("globalPid", "streamId", *(["correlationId"] if self._correlate else []))
        wanted = ["start", "end", "deviceId", *([extra] if extra else []), *(c for c in optional if c in have)]
        for chunk in self.source.integers(table, wanted):
            yield dict(zip(wanted, chunk, strict=True))

    def _add(self, chunk: dict[str, np.ndarray], codes: np.ndarray) -> None:
        try:
            self.gathered.add(chunk, codes)
        except ValueError as error:
            raise InputError("bad-table", f"{self.source.path} is damaged: {error}") from error

    def trace(self, metadata: Metadata) -> Trace:
        notes = list(metadata.notes)
        if self.gathered.negative:
            notes.append(f"{self.gathered.negative} activities end before they start; they count as having no length")
        if self.gathered.unfinished:
            notes.append(f"{self.gathered.unfinished} activities have no start or no end and are left out: they ran "
                         f"when the capture stopped")
        names = self._texts(notes)
        activities = {Rank(pid, device): Activity(*columns) for pid, device, columns in self.gathered.ranks()}
        ranks = tuple(sorted(activities))
        return Trace(self.source, metadata, ranks, activities, names, notes, self._uuids(ranks))

    def _uuids(self, ranks: tuple[Rank, ...]) -> dict[Rank, str]:
        """The board of each rank, where the exporter maps a process's device to it."""
        boards = {}
        if {"id", "uuid"} <= set(self.source.columns("TARGET_INFO_GPU")):
            boards = {i: u for i, u in self.source.rows("TARGET_INFO_GPU", ("id", "uuid")) if u}
        if not {"gpuId", "cudaId", "pid"} <= set(self.source.columns("TARGET_INFO_CUDA_DEVICE")):
            return {}
        mapped = {(pid, cuda): boards.get(gpu) for gpu, cuda, pid in
                  self.source.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid"))}
        return {rank: uuid for rank in ranks if (uuid := mapped.get((rank.pid, rank.device)))}

    def _texts(self, notes: list[str]) -> tuple[str, ...]:
        ids = list(self.names.ids())
        strings: dict[int, str] = {}
        if {"id", "value"} <= set(self.source.columns("StringIds")):
            for i in range(0, len(ids), 500):
                strings.update(self.source.rows("StringIds", ("id", "value"), {"id": ids[i:i + 500]}))
        lost = sum(i not in strings for i in ids)
        if lost:
            notes.append(f"{lost} kernel names are missing from StringIds; they appear as their ids")
        return tuple(self.names.texts(strings))
