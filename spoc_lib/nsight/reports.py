"""What a user hands over as a trace: one report or several, told by their content; other kinds are named, with the
command that makes a readable one."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import nsysrep
from spoc_lib.nsight.sources import ParquetSource, SqliteSource, TraceSource

_SQLITE, _REPORT, _GZIP = b"SQLite format 3\0", b"NVIDIA Tegra Profiler Report", b"\x1f\x8b"
_EXPORT = "export the report with 'nsys export --type sqlite' and give that file"
_UNPACK = "unpack it and give what is in it"
#: How a file begins, what it is, and what to do with it.
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89HDF", "an HDF5 export", _EXPORT),
    (b"ARROW1", "one table of an arrowdir", _EXPORT),
    (b"PAR1", "one table of a parquetdir", "give its folder"),
    (b"NVR\0", "a report of Nsight Compute, which shows single kernels", "capture with nsys: 'spoc nsight plan' tells "
                                                                         "how"),
    (b"PK\x03\x04", "a zip archive", _UNPACK),
    (b"\x28\xb5\x2f\xfd", "packed by zstd", "unpack it with 'zstd -d' and give the file"),
    (b"\xfd7zXZ", "packed by xz", "unpack it with 'unxz' and give the file"),
    (b"BZh", "packed by bzip2", "unpack it with 'bunzip2' and give the file"),
    (b"version https://git-lfs", "a pointer of Git LFS", "fetch the file with 'git lfs pull'"),
    (b"<", "an HTML or XML page", _EXPORT),
)
_SUFFIXES = (".sqlite", ".sqlite3", ".db", ".nsys-rep", ".qdrep", ".qdstrm")


def report_paths(given: str | Path | Sequence[str | Path]) -> list[Path]:
    """The reports that `given` means: files, parquetdirs, or folders of them (a report and its export count once).

    InputError for what is not there, for a folder without reports, and for a report that is given twice.
    """
    found: list[Path] = []
    for one in [given] if isinstance(given, (str, Path)) else given:
        path = Path(one)
        if not path.exists():
            raise InputError("unreadable", f"cannot read the trace {path}: no such file or folder")
        found += _in_folder(path) if path.is_dir() and not any(path.glob("*.parquet")) else [path]
    twice = next((p for n, p in enumerate(found) if p.resolve() in {q.resolve() for q in found[:n]}), None)
    if twice is not None:
        raise InputError("twice", f"{twice} is given twice: give each report once")
    return found


def _in_folder(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise InputError("unreadable", f"cannot read the trace {folder}: {error.strerror}") from error
    if not entries:
        raise InputError("not-a-trace", f"{folder} is an empty folder, no Parquet files, no report: {_EXPORT}")
    if any(entry.suffix in (".arrow", ".feather") for entry in entries):
        raise InputError("not-a-trace", f"{folder} is an arrowdir export: {_EXPORT}, or use --type parquetdir")
    best: dict[str, Path] = {}
    files = [(entry, entry.name.removesuffix(".gz")) for entry in entries if entry.is_file()]
    for suffix in _SUFFIXES:
        for entry, name in files:
            if name.endswith(suffix):
                best.setdefault(name.removesuffix(suffix), entry)
    for entry in entries:
        if entry.is_dir() and any(entry.glob("*.parquet")):
            best.setdefault(entry.name.removesuffix("_pqtdir"), entry)
    if not best:
        raise InputError("not-a-trace", f"{folder} holds no report of Nsight Systems ({entries[0].name} …): give "
                         f"{', '.join(_SUFFIXES[:1])} or .nsys-rep files, or the folder that 'nsys export --type "
                         f"parquetdir' wrote")
    return sorted(best.values())


@contextmanager
def open_source(path: str | Path) -> Iterator[TraceSource]:
    """The tables of a `.sqlite`, a parquetdir, a `.nsys-rep` or a `.qdstrm`, also packed by gzip; InputError with one
    sentence for everything else."""
    path = Path(path)
    if not path.exists():
        raise InputError("unreadable", f"cannot read the trace {path}: no such file or folder")
    with ExitStack() as stack:
        try:
            found = path
            if path.is_dir():
                if not any(path.glob("*.parquet")):
                    raise InputError("not-a-trace", f"{path} holds no Parquet files: give one report, or the folder "
                                     f"that 'nsys export --type parquetdir' wrote")
                source: TraceSource = ParquetSource(path)
            else:
                if _head(found).startswith(_GZIP):
                    found = _unpacked(found, _scratch(stack))
                if found.suffix == ".qdstrm":
                    found = nsysrep.convert_qdstrm(found, _scratch(stack))
                if found.suffix in (".nsys-rep", ".qdrep") or _head(found).startswith(_REPORT):
                    found = nsysrep.export_sqlite(found, path, _scratch(stack))
                _refuse_other_kinds(found, path)
                source = SqliteSource(found, path)
        except OSError as error:
            raise InputError("unreadable", f"cannot read the trace {path}: {error.strerror or error}") from error
        stack.callback(source.close)
        yield source


def _scratch(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spoc-nsight-")))


def _head(path: Path, count: int = 512) -> bytes:
    with open(path, "rb") as opened:
        return opened.read(count)


def _unpacked(path: Path, folder: Path) -> Path:
    target = folder / (path.name.removesuffix(".gz") if path.suffix == ".gz" else f"{path.name}.sqlite")
    try:
        with gzip.open(path) as packed, open(target, "wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (EOFError, gzip.BadGzipFile) as error:
        raise InputError("truncated", f"{path} is packed by gzip and torn ({error}): copy it again") from error
    return target


def _refuse_other_kinds(file: Path, path: Path) -> None:
    """InputError for a file that is no SQLite, naming what it is."""
    head = _head(file)
    if head.startswith(_SQLITE):
        return
    if not head:
        raise InputError("not-a-trace", f"{path} is empty: {_EXPORT}")
    what, remedy = _kind(head)
    raise InputError("not-a-trace", f"{path} is not an SQLite file but {what}: {remedy}")


def _kind(head: bytes) -> tuple[str, str]:
    for start, what, remedy in _KINDS:
        if head.startswith(start):
            return what, remedy
    if head[257:262] == b"ustar":
        return "a tar archive", _UNPACK
    if head.lstrip()[:1] in (b"{", b"["):
        if any(word in head for word in (b"traceEvents", b"deviceProperties", b"schemaVersion", b'"ph"')):
            return "a trace of torch's profiler (JSON)", "capture with nsys: 'spoc nsight plan' tells how"
        return "a JSON export", _EXPORT
    if b"Time (%)" in head or b"Total Time (ns)" in head:
        return "a summary of 'nsys stats', which holds sums and no times", \
            f"{_EXPORT} ('spoc nsight classify' takes the summary's names)"
    if b"\0" not in head:
        return "text", _EXPORT
    return "of an unknown kind", f"{_EXPORT} (or give a .nsys-rep, or a parquetdir)"
