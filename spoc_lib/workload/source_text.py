"""Reading a directory of source code as units of text: lines that are safe to join (rule 1 of `corpus`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MAX_LINE_CHARS = 400
_MAX_FILE_BYTES = 1 << 20
_SUFFIXES = frozenset({
    ".py", ".pyi", ".js", ".jsx", ".ts", ".tsx", ".java", ".kt", ".scala", ".go", ".rs", ".c", ".h", ".cc", ".cpp",
    ".hpp", ".cu", ".cs", ".rb", ".php", ".swift", ".m", ".lua", ".pl", ".r", ".jl", ".sh", ".sql", ".proto", ".md",
    ".rst", ".txt", ".toml", ".yaml", ".yml", ".json", ".html", ".css", ".vue", ".tf", ".cmake", ".gradle", ".ex",
    ".erl", ".hs", ".ml", ".dart",
})
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"})


def read_units(root: Path, max_bytes: int) -> tuple[list[str], int, int]:
    """Units of all text files below `root`, (units, files read, files skipped)."""
    units: list[str] = []
    size = files = skipped = 0
    for path in _walk(root):
        if size >= max_bytes:
            break
        if path.suffix.lower() not in _SUFFIXES:
            skipped += 1
            continue
        try:
            raw = path.read_bytes()[:_MAX_FILE_BYTES]
            text = raw.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            skipped += 1
            continue
        if "\0" in text:
            skipped += 1
            continue
        before = len(units)
        for unit in _units(text):
            units.append(unit)
            size += len(unit)
            if size >= max_bytes:
                break
        files += len(units) > before
    return units, files, skipped


def _walk(root: Path) -> Iterator[Path]:
    """Files below `root` in the order of their names; hidden and generated folders are left out, links not followed."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _units(text: str) -> Iterator[str]:
    """Lines without trailing space, each with the blank lines that follow it.

    Overlong lines, lines with control characters and lines with template markers are left out. A line that begins with
    a slash gets a space before it, since a newline run may swallow a slash.
    """
    unit = ""
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        line = line.rstrip()
        if not line:
            if unit and not unit.endswith("\n\n\n"):
                unit += "\n"
            continue
        if unit:
            yield unit
            unit = ""
        if len(line) <= _MAX_LINE_CHARS and "<|" not in line and line.replace("\t", " ").isprintable():
            unit = (" " if line[0] == "/" else "") + line + "\n"
    if unit:
        yield unit
