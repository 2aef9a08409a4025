"""The files that traces lie in: compressed or not, in any Unicode, one value or many, in folders as they are kept."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import orjson
import pyarrow as pa

from spoc_lib.workload.traces.sessions import Reject

LINES = (".jsonl", ".ndjson")
SUFFIXES = (".json", *LINES, ".traj", ".parquet", ".har")
PACKED = (".gz", ".bz2", ".xz", ".zst")
#: First bytes of a compressed file, whatever its name says, and how to open it.
_MAGIC: tuple[tuple[bytes, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b", lambda path: gzip.open(path, "rb")),  # noqa: SIM115
    (b"BZh", lambda path: bz2.open(path, "rb")),  # noqa: SIM115
    (b"\xfd7zXZ\x00", lambda path: lzma.open(path, "rb")),  # noqa: SIM115
    (b"\x28\xb5\x2f\xfd", lambda path: io.BufferedReader(pa.input_stream(str(path), compression="zstd"))),
)
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
#: What reading a damaged file raises besides OSError.
DAMAGED = (EOFError, lzma.LZMAError, pa.ArrowException)


def suffix(path: Path) -> str:
    """The suffix that names the format: that before a compression's."""
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() if last in PACKED else last


def opened(path: Path) -> IO[bytes]:
    """The file's bytes as UTF-8, unpacked by what they are. Reject for an archive."""
    with open(path, "rb") as handle:
        head = handle.read(64)
    if head[:4] == b"PK\x03\x04":
        raise Reject("it is a zip archive: unpack it")
    unpack = next((unpack for magic, unpack in _MAGIC if head.startswith(magic)), None)
    stream = cast(IO[bytes], unpack(path) if unpack else open(path, "rb"))  # noqa: SIM115
    if unpack:
        head = stream.read(64)
        stream.close()
        stream = cast(IO[bytes], unpack(path))
    encoding = _UTF16.get(head[:2])
    if encoding is None and len(head) > 3 and not head[1] and not head[3] and head[0] and head[2]:
        encoding = "utf-16-le"  # Latin letters with zeros between them, no mark before
    if encoding:
        return cast(IO[bytes], codecs.EncodedFile(cast(Any, stream), "utf-8", encoding, errors="surrogatepass"))
    return stream


def lines(path: Path, largest: int) -> Iterator[tuple[int, bytes]]:
    """(number, text) of the lines that hold something."""
    with opened(path) as handle:
        for number, line in enumerate(iter(lambda: handle.readline(largest + 1), b""), 1):
            if len(line) > largest:
                raise Reject(f"its line {number} is longer than {largest:,} bytes")
            line = _clean(line)
            if line:
                yield number, line


def whole(path: Path, largest: int) -> bytes:
    """All bytes of a file that is one value."""
    with opened(path) as handle:
        data = handle.read(largest + 1)
    if len(data) > largest:
        raise Reject(f"it is larger than {largest:,} bytes: write one record a line (.jsonl)")
    return _clean(data)


def _clean(data: bytes) -> bytes:
    return data.removeprefix(codecs.BOM_UTF8).strip(b" \t\r\n\0\x1e")


def parsed(data: bytes) -> Any:
    """A JSON value. NaN and Infinity, which Python writes but JSON lacks, are read: so their field can be named."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        try:
            value = json.loads(data)
            orjson.dumps(value)  # refuses what no text can hold, such as half a surrogate pair
        except UnicodeDecodeError as fault:
            raise Reject(
                f"it is not valid JSON (byte {fault.object[fault.start]:#x} at {fault.start} is not UTF-8: save "
                "the file as UTF-8)"
            ) from error
        except (ValueError, TypeError, RecursionError):
            raise Reject(f"it is not valid JSON ({error})") from error
        return value


def several(data: bytes) -> list[Any] | None:
    """The values of a text that holds several, one after another, over any lines; None when it does not."""
    decoder, values, at = json.JSONDecoder(), [], 0
    try:
        text = data.decode()
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            values.append(value)
            while at < len(text) and text[at] in " \t\r\n,\x1e":
                at += 1
        orjson.dumps(values)
    except (ValueError, TypeError, RecursionError):
        return None
    return values if len(values) > 1 else None


def found(folder: Path) -> tuple[list[Path], list[str]]:
    """(files of a folder that may be traces, links followed, each file once; sentences on what was left out)."""
    files: dict[str, Path] = {}
    seen: set[str] = set()
    hidden: list[str] = []
    other: list[str] = []
    twice: list[str] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link that leads back, or to what was read
            folders[:] = []
            continue
        seen.add(real)
        hidden += [f"{name}/" for name in folders if name.startswith(".")]
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if name.startswith("."):
                hidden.append(name)
            elif suffix(path) not in SUFFIXES or not path.is_file():
                other.append(name)
            elif os.path.realpath(path) in files:
                twice.append(name)
            else:
                files[os.path.realpath(path)] = path
    notes = [
        f"{len(names)} {what}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}"
        for names, what in (
            (hidden, "hidden files and folders were left out"),
            (other, "files of other kinds were left out"),
            (twice, "links to files that were read already were left out"),
        )
        if names
    ]
    return sorted(files.values(), key=lambda p: (suffix(p) == ".parquet", str(p))), notes
