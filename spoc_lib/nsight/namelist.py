"""Kernel names out of what profilers print: a list, or the tables of `nsys stats` (csv, tsv, column, table, json, hdoc,
htable), ncu, rocprof and PyTorch's profiler, with the notices that stand around them."""

from __future__ import annotations

import csv
import gzip
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from spoc_lib.core.errors import InputError

#: Columns that hold a kernel's name, the surest first: letters of the heading only, units in brackets left out.
_COLUMNS = ("kernelname", "demangledname", "kernel", "name", "operation")
#: A table with `Name` and one of these lists calls of an API, or ranges.
_NO_KERNELS = {"numcalls", "result", "range", "eventid"}
_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}  # categories of PyTorch's trace events
_RULE = re.compile(r"^\s*-{3,}(\s+-{2,})*\s*$")
_NOTICE = re.compile(r"^\s*(#|\*\*|==|NOTICE|WARNING|ERROR|SKIPPED|Processing \[|Generating |Exporting |Using |Failed |"
                     r"It is assumed|Consider |Try |There are no |\S+ does not contain|\d+%)", re.IGNORECASE)

_ANNOTATION = re.compile(r"ProfilerStep|execute_|aten::|Torch-Compiled|CompiledFxGraph|## |gpu_model_runner")

Table = tuple[list[str], list[list[str]]]  # headings, rows


def kernel_names(path: str | Path) -> list[str]:
    """The names in a file, in order, without repeats. InputError where it holds none, or other tables only."""
    text = _text(Path(path))
    tables = list(_tables(text))
    names: list[str] = []
    for table in tables:
        names += _names(*table)
    if not names and tables:
        headings = "; ".join(", ".join(heading[:12]) for heading, _ in tables[:3])
        raise InputError("no-kernel-column", f"{path} holds no kernel names: none of its tables ({headings}) lists GPU "
                         f"kernels in a column 'Name' or 'Kernel Name'; give what nsys stats -r cuda_gpu_kern_sum "
                         f"prints, or one name a line")
    if not tables:
        names = _lines(text, path)
    if not names:
        raise InputError("empty-list", f"{path} holds no kernel names: give one a line, or a table with a "
                         f"column kernel_name")
    return list(dict.fromkeys(names))


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError) as error:
        raise InputError("unreadable", f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    sixteen = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # what PowerShell's > writes
    if not sixteen and b"\0" in data:
        raise InputError("not-text", f"{path} is not a text file of kernel names; spoc nsight decompose reads a trace")
    try:
        return data.decode("utf-16" if sixteen else "utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")  # a notice with the user's name in it; kernels have ASCII names


def _tables(text: str) -> Iterator[Table]:
    """Every table with a heading that may name kernels, or that is plainly one of something else."""
    if text.lstrip()[:1] in ("[", "{") or re.search(r"^\[\s*$|^\[\{", text, re.MULTILINE):
        found = list(_json(text))
        if found:
            yield from found
            return
    if re.search(r"<t[hd][ >]", text, re.IGNORECASE):
        yield from _html(text)
        return
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        table, at = _table_at(lines, at)
        if table is not None:
            yield table


def _table_at(lines: list[str], at: int) -> tuple[Table | None, int]:
    """The table whose heading stands in line `at`, and the line behind it; None and the next line where none begins."""
    line = lines[at]
    if at + 1 < len(lines) and _RULE.match(lines[at + 1]) and not _RULE.match(line) and _is_heading(line.split("  ")):
        return _columns(lines, at)
    if line.lstrip().startswith("|"):
        return _boxed(lines, at)
    for delimiter in ",\t;":
        heading = [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter), [])]
        if _is_heading(heading) and (len(heading) > 1 or not any(earlier.strip() for earlier in lines[:at])):
            return _separated(lines, at, heading, delimiter)
    return None, at + 1


def _key(heading: str) -> str:
    return re.sub(r"[^a-z]", "", heading.split("(")[0].replace("%", "percent").lower())


def _is_heading(cells: list[str]) -> bool:
    keys = {_key(cell) for cell in cells}
    known = {*_COLUMNS, "range"} if len(cells) > 1 else {"kernelname", "demangledname", "kernel", "name"}
    return bool(keys & known) and all(len(cell) < 60 and "<" not in cell for cell in cells)


def _separated(lines: list[str], at: int, heading: list[str], delimiter: str) -> tuple[Table, int]:
    """Rows until a blank line, a notice or another heading; a name in the last column may hold the delimiter bare."""
    rows: list[list[str]] = []
    width = len(heading)
    for end in range(at + 1, len(lines)):
        row = next(csv.reader([lines[end]], delimiter=delimiter), [])
        if len(row) > width and _key(heading[-1]) in _COLUMNS:
            row = [*row[:width - 1], delimiter.join(row[width - 1:])]
        if width == 1 and (not row or _NOTICE.match(lines[end])):
            continue
        if len(row) != width:
            if len(row) < 2 or _NOTICE.match(lines[end]) or _is_heading(row):
                return (heading, rows), end
            raise InputError("ragged-table", f"line {end + 1} has {len(row)} cells under a heading of {width}: put a "
                             f"name that holds '{delimiter}' in quotes")
        if [cell.strip() for cell in row] != heading:
            rows.append(row)
    return (heading, rows), len(lines)


def _columns(lines: list[str], at: int) -> tuple[Table, int]:
    """Columns two blanks apart, or, where cells are empty, as wide as the dashes under their headings."""
    spans = [(m.start(), m.end()) for m in re.finditer(r"-+", lines[at + 1])]

    def cut(line: str) -> list[str]:
        cells = re.split(r"\s{2,}", line.strip(), maxsplit=len(spans) - 1)
        if len(cells) == len(spans):
            return cells
        return [line[start:end].strip() for start, end in spans[:-1]] + [line[spans[-1][0]:].strip()]

    rows, end = [], at + 2
    while end < len(lines) and lines[end].strip() and not _RULE.match(lines[end]):
        rows.append(cut(lines[end]))
        end += 1
    return (cut(lines[at]), rows), end


def _boxed(lines: list[str], at: int) -> tuple[Table, int]:
    """A table drawn with | between its cells (nsys' `table`, Markdown)."""
    rows: list[list[str]] = []
    while at < len(lines) and lines[at].lstrip()[:1] in ("|", "+"):
        if not re.match(r"^\s*[|+][-=+|: ]*$", lines[at]):
            rows.append([cell.strip().strip("`") for cell in lines[at].strip().strip("|").split(" | ")])
        at += 1
    return (rows[0] if rows else [], rows[1:]), at


def _html(text: str) -> Iterator[Table]:
    for table in re.findall(r"<table\b.*?</table>", text, re.IGNORECASE | re.DOTALL):
        rows = [[html.unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in
                 re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.IGNORECASE | re.DOTALL)]
                for row in re.findall(r"<tr\b.*?</tr>", table, re.IGNORECASE | re.DOTALL)]
        if rows := [row for row in rows if row]:
            yield rows[0], rows[1:]


def _json(text: str) -> Iterator[Table]:
    """nsys' json (a list of rows), a list of names, or a trace of PyTorch's profiler; notices may stand before it."""
    decoder, at = json.JSONDecoder(), 0
    while found := re.compile(r"^\s*[\[{]", re.MULTILINE).search(text, at):
        try:
            value, at = decoder.raw_decode(text, found.end() - 1)
        except ValueError:
            at = found.end()
            continue
        events = value.get("traceEvents") if isinstance(value, dict) else None
        if isinstance(events, list):
            yield ["Kernel Name"], [[str(e["name"])] for e in events
                                    if isinstance(e, dict) and e.get("cat") in _KINDS and e.get("name")]
        elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            heading = list(dict.fromkeys(key for one in value for key in one))
            yield heading, [[str(one.get(key, "")) for key in heading] for one in value]
        elif isinstance(value, list) and value and all(isinstance(one, str) for one in value):
            yield ["Kernel Name"], [[one] for one in value]
        else:
            yield list(value)[:12] if isinstance(value, dict) else ["no rows"], []


def _names(heading: list[str], rows: list[list[str]]) -> list[str]:
    """The kernels of one table; none where it lists something else."""
    keys = [_key(cell) for cell in heading]
    column = next((keys.index(key) for key in _COLUMNS if key in keys), None)
    if column is None or (keys[column] in ("name", "operation") and _NO_KERNELS & set(keys)):
        return []
    names = []
    for row in rows:
        cells = dict(zip(keys, row, strict=False))
        name = row[column].strip() if column < len(row) else ""
        cpu = cells.get("selfcpu")
        if not name or "API" in cells.get("category", ""):
            continue
        if cpu is not None and (_amount(cpu) > 0 or _ANNOTATION.match(name) or not any(
                _amount(cell) > 0 for key, cell in cells.items() if key in ("selfcuda", "selfdevice", "selfhip"))):
            continue  # PyTorch's averages list operators and annotations beside the kernels
        names.append(name)
    return names


def _amount(text: str) -> float:
    found = re.match(r"[\d.]+", text.strip())
    return float(found.group()) if found else 0.0


def _lines(text: str, path: str | Path) -> list[str]:
    """One name a line. Separators belong inside the brackets of a name: a line with others is a table's."""
    names = []
    for number, line in enumerate(text.splitlines(), 1):
        name = line.strip().strip('"')
        if not name or _NOTICE.match(line) or _RULE.match(line):
            continue
        bare = name
        while (inner := re.sub(r"<[^<>]*>|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}", "", bare)) != bare:
            bare = inner
        if re.search(r"[,;\t]", bare) and not name.endswith(("…", "...")) and not re.search(r"[<(\[]", name):
            raise InputError("no-kernel-column", f"{path}, line {number}, is a table's: {name[:60]!r}; give it a "
                             f"heading with a column kernel_name, or write one name a line")
        names.append(name)
    return names
