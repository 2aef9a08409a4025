"""Files that are whole or absent: everything is written beside its name and moved into place."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from spoc_lib.core.errors import InputError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; move it onto `path` when the block ends without error.

    The new file is synced before the move, so neither a killed process nor a power cut leaves half a file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write `text` as UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numpy scalars become numbers, infinities 'inf', NaN null, paths strings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    return value


def to_json(value: Any) -> str:
    """Readable JSON of any result of the workbench (see `plain`)."""
    whole = plain(value)
    try:
        return orjson.dumps(whole, option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONEncodeError:  # text that is no UTF-8, such as a file's name
        return json.dumps(whole, indent=2, ensure_ascii=False).encode(errors="replace").decode()


def write_json(path: str | Path, value: Any) -> Path:
    """Write `value` as JSON, whole or not at all."""
    return write_text(path, to_json(value) + "\n")


def read_json(path: str | Path, what: str = "file") -> Any:
    """Parse a JSON file; InputError with one sentence when it is absent, unreadable or malformed."""
    path = Path(path)
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise InputError("unreadable", f"cannot read the {what} {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise InputError("bad-json", f"the {what} {path} is not valid JSON: {error}") from error


def read_record(path: str | Path, what: str, *needed: str) -> dict[str, Any]:
    """A JSON file that is an object with the fields `needed`; InputError naming what is wrong or missing."""
    found = read_json(path, what)
    if not isinstance(found, dict):
        raise InputError("bad-json", f"the {what} {path} is no JSON object: it was not written by the workbench")
    for name in needed:
        if name not in found:
            raise InputError("bad-json", f"the {what} {path} has no '{name}': it was not written by the workbench")
    return found
