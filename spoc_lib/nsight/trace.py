"""A trace in memory: what ran on each GPU and when, by columns, whatever exporter version wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import nvtx
from spoc_lib.nsight.gather import NameCodes, RankGatherer
from spoc_lib.nsight.metadata import RECAPTURE, Metadata, read_metadata, refuse_without_kernels
from spoc_lib.nsight.reports import open_source, report_paths
from spoc_lib.nsight.sources import TraceSource
from spoc_lib.nsight.sqlitepages import NULL

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"

#: copyKind of CUPTI, as nsys writes it in its reports.
_COPY_KINDS = {1: "Host-to-Device", 2: "Device-to-Host", 3: "Host-to-Array", 4: "Array-to-Host", 5: "Array-to-Array",
               6: "Array-to-Device", 7: "Device-to-Array", 8: "Device-to-Device", 9: "Host-to-Host",
               10: "Peer-to-Peer", 11: "Unified Host-to-Device", 12: "Unified Device-to-Host",
               13: "Unified Device-to-Device"}
_PAGEABLE, _PINNED, _DEVICE = 0, 1, 2  # srcKind and dstKind
#: How the names of copies begin that cross the link between host and device.
HOST_COPIES = tuple(f"[CUDA memcpy {_COPY_KINDS[kind]}" for kind in (1, 2, 3, 4, 11, 12))

#: In graph mode, kernels that fill less of the window than this show that the work ran where none are recorded.
_REPRESENTATIVE_RATIO = 0.01


@dataclass(frozen=True, order=True)
class Rank:
    """One GPU of one process. `deviceId` counts per process, so the pair is what is unique."""

    global_pid: int
    device: int
    report: int = 0  # of several reports of one trace, which

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
class Board:
    """A GPU as the exporter describes it; None where it does not. clock_hz: its highest. mapped: whether the trace ties
    the rank to this very board."""

    name: str | None = None
    memory_bytes: int | None = None
    dram_bytes_per_s: int | None = None
    sm_count: int | None = None
    clock_hz: int | None = None
    uuid: str | None = None
    mapped: bool = True


@dataclass(frozen=True)
class Report:
    """One of a trace's reports. shift_ns: what its clock's times need to stand on the trace's clock."""

    source: TraceSource
    metadata: Metadata
    launches: dict[int, nvtx.Launches]
    shift_ns: int = 0


@dataclass(frozen=True)
class Trace:
    """A whole trace, of one report or of several that ran together (one a node, or one a rank).

    `activities` holds kernels, copies and fills of each rank, on one clock; `notes` what a reader must know; `uuids`
    and `boards` what the exporter says of each rank's GPU; `clock`: whether times of different reports compare.
    """

    reports: tuple[Report, ...]
    ranks: tuple[Rank, ...]
    activities: dict[Rank, Activity]
    names: tuple[str, ...]
    notes: list[str] = field(default_factory=list)
    uuids: dict[Rank, str] = field(default_factory=dict)
    boards: dict[Rank, Board] = field(default_factory=dict)
    clock: bool = True

    @property
    def path(self) -> str:
        """What the user gave; of several reports, all of them."""
        return ", ".join(str(report.source.path) for report in self.reports)

    @property
    def metadata(self) -> Metadata:
        """What the first report says of itself."""
        return self.reports[0].metadata

    @cached_property
    def pids(self) -> dict[Rank, int]:
        """The process of each rank as it is shown: the operating system's pid; the whole globalPid where machines of
        one report share a pid; with ten million a report added where the pid stands in several."""
        places: dict[int, set[tuple[int, int]]] = {}
        for rank in self.ranks:
            places.setdefault(rank.pid, set()).add((rank.report, rank.global_pid))
        shown = {}
        for rank in self.ranks:
            alike = places[rank.pid]
            if len(alike) == 1:
                shown[rank] = rank.pid or rank.global_pid
            elif len({report for report, _ in alike}) == len(alike):
                shown[rank] = (rank.report + 1) * 10_000_000 + rank.pid
            else:
                shown[rank] = rank.global_pid + (rank.report << 56)
        return shown

    def launched(self, rank: Rank) -> tuple[np.ndarray, np.ndarray]:
        """(host ns, globalTid) of the call that launched each activity, `NULL` where the report holds none; empty
        where it ties no launch to any."""
        report, activity = self.reports[rank.report], self.activities[rank]
        calls = report.launches.get(rank.global_pid)
        if calls is None or not activity.correlation.size:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        start, thread = calls.of(activity.correlation)
        return (np.where(start == NULL, NULL, start + report.shift_ns) if report.shift_ns else start), thread

    @cached_property
    def span_ns(self) -> tuple[int, int]:
        """First start and last end of anything on any GPU; of several reports, the time that all of them cover."""
        spans = [self._span([r for r in self.ranks if r.report == n]) for n in range(len(self.reports))]
        return max(first for first, _ in spans), min(last for _, last in spans)

    def _span(self, ranks: list[Rank]) -> tuple[int, int]:
        """First start and last end of anything on these GPUs."""
        activities = [self.activities[rank] for rank in ranks]
        return min(int(a.start[0]) for a in activities), max(int(a.end.max()) for a in activities)

    def require_gpus(self, expected: int | None) -> None:
        """InputError unless `expected` GPUs (where somebody said) have kernels: a part of a capture proves nothing."""
        if expected is None or len(self.ranks) == expected:
            return
        seen = ", ".join(f"GPU {r.device} of process {self.pids[r]}" for r in self.ranks)
        if len(self.ranks) < expected:
            told = (f"{len(self.ranks)} of {expected} GPUs ({seen}): a rank was not captured; start the workers with "
                    f"VLLM_WORKER_MULTIPROC_METHOD=spawn and nsys with --trace-fork-before-exec=true")
        else:
            told = (f"{len(self.ranks)} GPUs where {expected} were expected ({seen}): another process's kernels are in "
                    f"it, or the engine has more ranks than was said")
        raise InputError("wrong-ranks", f"{self.path} holds kernels of {told}")


@contextmanager
def open_trace(given: str | Path | Sequence[str | Path], *, accept_graph_mode: bool = False) -> Iterator[Trace]:
    """The trace of one report, or of several that ran at the same time, while its tables are open. See `report_paths`;
    InputError with one sentence for whatever cannot be read."""
    with ExitStack() as stack:
        parts = [load_trace(stack.enter_context(open_source(path)), accept_graph_mode=accept_graph_mode)
                 for path in report_paths(given)]
        yield parts[0] if len(parts) == 1 else _merged(parts)


def _merged(parts: list[Trace]) -> Trace:
    """Several reports as one trace, on the first one's clock, by the wall-clock time at which each session began."""
    epochs = [part.metadata.utc_epoch_ns for part in parts]
    clock = None not in epochs
    codes: dict[str, int] = {}
    reports, activities, notes = [], {}, []
    uuids, boards = {}, {}
    for number, part in enumerate(parts):
        shift = ((epochs[number] or 0) - (epochs[0] or 0) if clock else parts[0].span_ns[0] - part.span_ns[0])
        recode = np.array([codes.setdefault(name, len(codes)) for name in part.names], dtype=np.int32)
        reports.append(replace(part.reports[0], shift_ns=shift))
        for rank, a in part.activities.items():
            here = replace(rank, report=number)
            activities[here] = Activity(a.start + shift, a.end + shift, recode[a.name], a.stream, a.correlation)
            if rank in part.uuids:
                uuids[here] = part.uuids[rank]
            if rank in part.boards:
                boards[here] = part.boards[rank]
        name = part.reports[0].source.path.name
        notes += [f"{name}: {note}" for note in part.notes]
    ranks = tuple(sorted(activities, key=lambda r: (r.report, r.global_pid, r.device)))
    if not clock:
        notes.append("not every report tells when its session began, so their first activities are laid at the same "
                     "time, and waiting across reports is not judged")
    trace = Trace(tuple(reports), ranks, activities, tuple(codes), notes, uuids, boards, clock)
    first, last = trace.span_ns
    if last <= first:
        apart = "; ".join(f"{part.reports[0].source.path.name} {(part.span_ns[0] + report.shift_ns) / 1e9:.3f} s to "
                          f"{(part.span_ns[1] + report.shift_ns) / 1e9:.3f} s"
                          for part, report in zip(parts, reports, strict=True))
        raise InputError("apart", f"the reports share no time, so they are no one trace ({apart}): decompose each "
                         f"alone, or compare two with 'spoc nsight diff A B'")
    hosts = [part.metadata.host for part in parts]
    named = ", ".join(f"{part.reports[0].source.path.name}{f' of {host}' if host else ''} (processes "
                      f"{', '.join(dict.fromkeys(str(trace.pids[r]) for r in ranks if r.report == number))})"
                      for number, (part, host) in enumerate(zip(parts, hosts, strict=True)))
    notes.insert(0, f"{len(parts)} reports as one trace: {named}; the window is the time that all of them cover")
    return trace


def load_trace(source: TraceSource, *, accept_graph_mode: bool = False) -> Trace:
    """Read all GPU activity of a trace. InputError when there is none, or when CUDA graphs hide it."""
    metadata = read_metadata(source)
    if not metadata.known_schema:
        raise InputError("unknown-schema", f"{source.path} is not a trace of Nsight Systems that this reader knows: "
                         f"it has neither StringIds nor any CUDA activity table (found: {_some(source.tables())}); "
                         f"export the report again with 'nsys export --type sqlite'")
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
    metadata, path = trace.metadata, trace.path
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
                         f"(or say that nothing ran in graphs: --accept-graph-mode, accept_graph_mode=true in notebook "
                         f"04)")
    trace.notes.append("the capture used CUDA graph mode; no graph launch is recorded, so all kernels are here. "
                       "For an engine that uses graphs, capture with --cuda-graph-trace=node")


def _some(tables: frozenset[str]) -> str:
    return ", ".join(sorted(tables)[:5]) or "no tables"


def _copy_name(kind: int, source: int, target: int) -> str:
    """A copy as nsys' reports name it; by the kinds of memory at its ends where its own kind does not tell, and with
    the word for host memory that is not pinned, from which a copy is slow and stops the host."""
    host = _PAGEABLE, _PINNED
    if kind not in _COPY_KINDS:
        kind = 1 if source in host and target == _DEVICE else 2 if source == _DEVICE and target in host else kind
    if kind not in _COPY_KINDS:
        return "[CUDA memcpy of another kind]"
    pageable = kind in (1, 2) and _PAGEABLE in (source, target)
    return f"[CUDA memcpy {_COPY_KINDS[kind]}{', pageable' if pageable else ''}]"


class _Reader:
    """Reads all activity tables, chunk by chunk, into arrays by rank."""

    def __init__(self, source: TraceSource) -> None:
        self.source = source
        self.gathered = RankGatherer()
        self.names = NameCodes()
        self.launches = nvtx.read_launches(source)

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
        columns = [c for c in ("copyKind", "srcKind", "dstKind") if c in self.source.columns(MEMCPY)]
        for chunk in self._read(MEMCPY, *columns):
            codes = np.empty(chunk["start"].size, dtype=np.int32)
            told = np.stack([chunk[c] if c in chunk else np.full(codes.size, NULL) for c in
                             ("copyKind", "srcKind", "dstKind")])
            kinds, which = np.unique(told, axis=1, return_inverse=True)
            for number, kind in enumerate(kinds.T.tolist()):
                codes[which.ravel() == number] = self.names.synthetic(_copy_name(*kind))
            self._add(chunk, codes)
        for chunk in self._read(MEMSET):
            self._add(chunk, np.full(chunk["start"].size, self.names.synthetic("[CUDA memset]"), dtype=np.int32))

    def _read(self, table: str, *extra: str) -> Iterator[dict[str, np.ndarray]]:
        have = self.source.columns(table)
        if not {"start", "end", "deviceId"} <= set(have):
            return
        optional = ("globalPid", "streamId", *(["correlationId"] if self.launches else []))
        wanted = ["start", "end", "deviceId", *extra, *(c for c in optional if c in have)]
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
        boards = self._boards(ranks)
        return Trace((Report(self.source, metadata, self.launches),), ranks, activities, names, notes,
                     {rank: board.uuid for rank, board in boards.items() if board.uuid and board.mapped}, boards)

    def _boards(self, ranks: tuple[Rank, ...]) -> dict[Rank, Board]:
        """The GPU of each rank: where the exporter maps a process's device to it, or where all GPUs are alike."""
        have = self.source.columns("TARGET_INFO_GPU")
        if "id" not in have:
            return {}
        wanted = [c for c in ("name", "totalMemory", "memoryBandwidth", "smCount", "clockRate", "uuid") if c in have]
        boards = {}
        for number, *values in self.source.rows("TARGET_INFO_GPU", ("id", *wanted)):
            told = dict(zip(wanted, values, strict=True))
            boards[number] = Board(told.get("name"), told.get("totalMemory"), told.get("memoryBandwidth"),
                                   told.get("smCount"), told.get("clockRate"), told.get("uuid"))
        if {"gpuId", "cudaId", "pid"} <= set(self.source.columns("TARGET_INFO_CUDA_DEVICE")):
            mapped = {(pid, cuda): boards[gpu] for gpu, cuda, pid in
                      self.source.rows("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")) if gpu in boards}
            found = {rank: board for rank in ranks if (board := mapped.get((rank.pid, rank.device)))}
            if found:
                return found
        alike = {replace(board, uuid=None) for board in boards.values()}
        return dict.fromkeys(ranks, replace(alike.pop(), mapped=False)) if len(alike) == 1 else {}

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
