"""Integer columns of a big SQLite table straight from its B-tree pages, compiled and in parallel.

Python's sqlite3 makes an object of every value: 14 s for ten million kernels. The file format is documented and
guaranteed stable (https://www.sqlite.org/fileformat2.html), and a trace's big tables hold small integers only, so
their leaf pages are decoded here. Whatever does not fit (text, overflow pages, rowid aliases) raises
`NotPlain`, and the caller asks SQLite itself. The file is only ever read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np

INTERIOR, LEAF = 0x05, 0x0D
#: What a NULL becomes; no time, id or count of a trace is this small.
NULL = np.iinfo(np.int64).min
_PAGES_AT_ONCE = 4096  # 16 MiB of pages of the usual size


class NotPlain(Exception):
    """The table holds something else than integers in its pages' local part; read it through SQLite."""


@numba.njit(cache=True, nogil=True, inline="always")
def _varint(data, at):
    value = np.uint64(0)
    for i in range(8):
        byte = data[at + i]
        value = (value << np.uint64(7)) | np.uint64(byte & 0x7F)
        if byte < 0x80:
            return np.int64(value), at + i + 1
    return np.int64((value << np.uint64(8)) | np.uint64(data[at + 8])), at + 9


@numba.njit(cache=True, nogil=True, inline="always")
def _width(serial):
    if serial < 5:
        return serial
    if serial == 5:
        return 6
    if serial < 8:
        return 8
    if serial < 12:
        return 0
    return (serial - 12) // 2


@numba.njit(cache=True, nogil=True, inline="always")
def _integer(data, at, width):
    value = np.int64(data[at])
    if value >= 128:
        value -= 256
    for i in range(1, width):
        value = (value << 8) | np.int64(data[at + i])
    return value


@numba.njit(cache=True, nogil=True)
def _count(data, pages, page_size, first):
    """Cells on all pages of the buffer; -1 when a page is no leaf of a table."""
    total = np.int64(0)
    for p in range(pages):
        base = p * page_size + (100 if p == 0 and first else 0)
        if data[base] != LEAF:
            return -1
        total += np.int64(data[base + 3]) * 256 + np.int64(data[base + 4])
    return total


@numba.njit(cache=True, nogil=True)
def _decode(data, pages, page_size, usable, first, slots, out):
    """Fill out[k, row] with the columns where slots[column] = k.

    Returns the rows; -2 where a value is no integer of the page's local part, -3 where the page is damaged.
    """
    row = 0
    last = slots.size - 1
    for p in range(pages):
        page = p * page_size
        base = page + (100 if p == 0 and first else 0)
        cells = np.int64(data[base + 3]) * 256 + np.int64(data[base + 4])
        for c in range(cells):
            pointer = base + 8 + 2 * c
            if pointer + 2 > page + usable:
                return -3
            offset = np.int64(data[pointer]) * 256 + np.int64(data[pointer + 1])
            if offset >= usable:
                return -3
            at = page + offset
            payload, at = _varint(data, at)
            _rowid, at = _varint(data, at)
            if payload < 0 or payload > usable - 35 or at + payload > page + usable:
                return -2
            header, scan = _varint(data, at)
            end = at + header
            stop = at + payload
            if header < 1 or end > stop:
                return -3
            value = at + header
            column = 0
            while scan < end and column <= last:
                serial, scan = _varint(data, scan)
                slot = slots[column]
                width = _width(serial)
                if width < 0 or value + width > stop:
                    return -3
                if slot >= 0:
                    if serial == 0:
                        out[slot, row] = NULL
                    elif serial < 7:
                        out[slot, row] = _integer(data, value, width)
                    elif serial == 8:
                        out[slot, row] = 0
                    elif serial == 9:
                        out[slot, row] = 1
                    else:
                        return -2
                value += width
                column += 1
            while column <= last:  # a row older than an ALTER TABLE ADD COLUMN ends early
                if slots[column] >= 0:
                    out[slots[column], row] = NULL
                column += 1
            row += 1
    return row


def _page(handle: int, number: int, page_size: int) -> bytes:
    data = os.pread(handle, page_size, (number - 1) * page_size)
    if len(data) != page_size:
        raise ValueError(f"page {number} lies beyond the end of the file")
    return data


def leaf_pages(handle: int, root: int, page_size: int) -> list[int]:
    """Numbers of the table's leaf pages, in rowid order. ValueError when the tree is damaged."""
    leaves: list[int] = []
    seen: set[int] = set()

    def walk(number: int, depth: int) -> None:
        if number in seen or depth > 20:
            raise ValueError(f"page {number} is linked twice")
        seen.add(number)
        data = _page(handle, number, page_size)
        at = 100 if number == 1 else 0
        if data[at] == LEAF:
            leaves.append(number)
            return
        if data[at] != INTERIOR:
            raise ValueError(f"page {number} is not a table page")
        cells = int.from_bytes(data[at + 3:at + 5], "big")
        pointers = np.frombuffer(data, ">u2", cells, at + 12)
        children = [int.from_bytes(data[p:p + 4], "big") for p in pointers.tolist()]
        children.append(int.from_bytes(data[at + 8:at + 12], "big"))
        # all children stand on one level: looking at the first tells whether this is the last interior level
        probe = _page(handle, children[0], page_size)[100 if children[0] == 1 else 0]
        if probe == LEAF:
            if seen.intersection(children):
                raise ValueError(f"page {number} links a page twice")
            seen.update(children)
            leaves.extend(children)
        else:
            for child in children:
                walk(child, depth + 1)

    walk(root, 0)
    return leaves


def _buffer(handle: int, numbers: list[int], page_size: int) -> np.ndarray:
    """The pages, one after the other, read run by run."""
    data = np.empty(len(numbers) * page_size, dtype=np.uint8)
    view = data.data
    pages = np.asarray(numbers, dtype=np.int64)
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    starts = np.concatenate(([0], cuts)).tolist()
    ends = np.concatenate((cuts, [pages.size])).tolist()
    for start, end in zip(starts, ends, strict=True):
        target = view[start * page_size:end * page_size]
        offset = (numbers[start] - 1) * page_size
        while target:
            got = os.preadv(handle, [target], offset)
            if got <= 0:
                raise ValueError(f"page {numbers[start]} lies beyond the end of the file")
            target, offset = target[got:], offset + got
    return data


def read_chunks(handle: int, root: int, page_size: int, reserved: int, positions: Sequence[int],
                threads: int) -> Iterator[np.ndarray]:
    """The columns at `positions` of the table whose root page is `root`, as int64 arrays of shape
    (columns, rows), chunk by chunk in rowid order. NotPlain or ValueError (damaged) as above."""
    slots = np.full(max(positions) + 1, -1, dtype=np.int64)
    for slot, position in enumerate(positions):
        slots[position] = slot
    leaves = leaf_pages(handle, root, page_size)
    # a little more than the last buffer holds, so that a damaged page cannot be read past its end
    chunks = [leaves[i:i + _PAGES_AT_ONCE] for i in range(0, len(leaves), _PAGES_AT_ONCE)]

    def decode(numbers: list[int]) -> np.ndarray:
        data = np.concatenate((_buffer(handle, numbers, page_size), np.zeros(64, dtype=np.uint8)))
        first = numbers[0] == 1
        rows = _count(data, len(numbers), page_size, first)
        if rows < 0:
            raise ValueError("a page of the table is not a leaf page")
        out = np.empty((len(positions), rows), dtype=np.int64)
        got = _decode(data, len(numbers), page_size, page_size - reserved, first, slots, out)
        if got == -2:
            raise NotPlain("the table does not hold plain integers")
        if got != rows:
            raise ValueError("a page of the table is damaged")
        return out

    with ThreadPoolExecutor(max_workers=threads) as pool:
        pending = []
        for numbers in chunks:
            pending.append(pool.submit(decode, numbers))
            if len(pending) > threads:  # keep only a few chunks in memory
                yield pending.pop(0).result()
        for future in pending:
            yield future.result()
