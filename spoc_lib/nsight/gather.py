"""Rows of activity tables, in the exporter's order, gathered by rank: compiled, a chunk at a time, compact."""

from __future__ import annotations

from collections.abc import Iterator

import numba
import numpy as np

from spoc_lib.nsight.sqlitepages import NULL

_DENSE_IDS = 1 << 24  # name ids up to here are looked up in an array, larger ones in a dictionary
_MOST_RANKS = 1 << 12


@numba.njit(cache=True, nogil=True)
def _rank_rows(pid, device, pids, devices, ranks, rank, null):
    """rank[i]: index of (pid, device) among the known pairs; new pairs are appended. Returns their number, or -1
    when there is no room for more."""
    last = 0
    for i in range(pid.size):
        p = 0 if pid[i] == null else pid[i]
        d = 0 if device[i] == null else device[i]
        if not (last < ranks and pids[last] == p and devices[last] == d):
            last = 0
            while last < ranks and not (pids[last] == p and devices[last] == d):
                last += 1
            if last == ranks:
                if ranks == pids.size:
                    return -1
                pids[ranks], devices[ranks] = p, d
                ranks += 1
        rank[i] = last
    return ranks


@numba.njit(cache=True, nogil=True)
def _scatter(rank, at, start, end, code, stream, correlation, out_start, out_end, out_code, out_stream, out_correlation,
             null):
    """Write each row at its rank's next place; returns the rows that end before they start."""
    negative = 0
    for i in range(rank.size):
        place = at[rank[i]]
        at[rank[i]] = place + 1
        out_start[place] = start[i]
        out_end[place] = end[i]
        negative += end[i] < start[i]
        out_code[place] = code[i]
        if stream.size:
            out_stream[place] = 0 if stream[i] == null else stream[i]
        if correlation.size:
            out_correlation[place] = 0 if correlation[i] == null else correlation[i]
    return negative


@numba.njit(cache=True, nogil=True)
def _encode(ids, lookup, known, codes):
    """codes[i] = lookup[ids[i]]; ids that are new get the next code. Returns the number of codes."""
    for i in range(ids.size):
        code = lookup[ids[i]]
        if code < 0:
            code = known
            lookup[ids[i]] = code
            known += 1
        codes[i] = code
    return known


class NameCodes:
    """Dense codes for name ids, in order of appearance. Synthetic names get codes of the same range."""

    def __init__(self) -> None:
        self._lookup = np.full(1 << 10, -1, dtype=np.int32)
        self._sparse: dict[int, int] = {}
        self._synthetic: dict[str, int] = {}
        self.size = 0

    def encode(self, ids: np.ndarray) -> np.ndarray:
        """Codes (int32) of the ids of StringIds."""
        if not ids.size:
            return np.empty(0, dtype=np.int32)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= _DENSE_IDS:
            return self._encode_sparse(ids)
        if high >= self._lookup.size:
            grown = np.full(1 << (high + 1).bit_length(), -1, dtype=np.int32)
            grown[:self._lookup.size] = self._lookup
            self._lookup = grown
        codes = np.empty(ids.size, dtype=np.int32)
        self.size = _encode(ids, self._lookup, self.size, codes)
        return codes

    def _encode_sparse(self, ids: np.ndarray) -> np.ndarray:
        unique, inverse = np.unique(ids, return_inverse=True)
        codes = np.array([self._code(int(i)) for i in unique], dtype=np.int32)
        return codes[inverse]

    def _code(self, name_id: int) -> int:
        if 0 <= name_id < self._lookup.size and self._lookup[name_id] >= 0:
            return int(self._lookup[name_id])
        if name_id not in self._sparse:
            if 0 <= name_id < self._lookup.size:
                self._lookup[name_id] = self.size
                self.size += 1
                return self.size - 1
            self._sparse[name_id] = self.size
            self.size += 1
        return self._sparse[name_id]

    def synthetic(self, name: str) -> int:
        """The code of a name that no table holds (copies and fills)."""
        if name not in self._synthetic:
            self._synthetic[name] = self.size
            self.size += 1
        return self._synthetic[name]

    def texts(self, strings: dict[int, str]) -> list[str]:
        """The name of each code, given texts by id; ids without text appear as such."""
        names = [""] * self.size
        for name_id, code in self.ids().items():
            names[code] = strings.get(name_id, f"kernel with name id {name_id}")
        for name, code in self._synthetic.items():
            names[code] = name
        return names

    def ids(self) -> dict[int, int]:
        """{id of StringIds: code}."""
        dense = np.flatnonzero(self._lookup >= 0)
        return dict(zip(dense.tolist(), self._lookup[dense].tolist(), strict=True)) | self._sparse


class _Columns:
    """The rows of one rank: start, end, code, stream, correlation. Grows in place, so that hundreds of chunks leave
    no holes in memory."""

    def __init__(self) -> None:
        self.rows = 0
        dtypes = (np.int64, np.int64, np.int32, np.int32, np.int64)
        self._arrays: list[np.ndarray] = [np.empty(0, dtype) for dtype in dtypes]

    def append(self, parts: list[np.ndarray]) -> None:
        """Rows of one chunk; the last part is empty where the chunk has no correlation ids."""
        rows = self.rows + parts[0].size
        for array, part in zip(self._arrays, parts, strict=True):
            if part.size:
                if array.size < rows:
                    array.resize(max(rows, array.size * 5 // 4), refcheck=False)  # new places hold zeros
                array[self.rows:rows] = part
        self.rows = rows

    def sorted(self) -> tuple[np.ndarray, ...]:
        """The columns, by start; correlation is empty where no chunk had one and 0 where only some had."""
        for array in self._arrays:
            if array.size:
                array.resize(self.rows, refcheck=False)
        start = self._arrays[0]
        if np.any(start[1:] < start[:-1]):
            order = np.argsort(start, kind="stable")
            return tuple(array[order] if array.size else array for array in self._arrays)
        return tuple(self._arrays)


class RankGatherer:
    """Activities by (globalPid, deviceId). `rows`: how many; `negative`: those that end before they start;
    `unfinished`: those left out, for they have no start or no end."""

    def __init__(self) -> None:
        self._pids = np.zeros(_MOST_RANKS, dtype=np.int64)
        self._devices = np.zeros(_MOST_RANKS, dtype=np.int64)
        self._ranks: list[_Columns] = []
        self.rows = 0
        self.negative = 0
        self.unfinished = 0

    def add(self, columns: dict[str, np.ndarray], codes: np.ndarray) -> None:
        """One chunk: start, end, deviceId and, where the exporter has them, globalPid, streamId, correlationId."""
        open_ended = (columns["start"] == NULL) | (columns["end"] == NULL)
        if open_ended.any():
            self.unfinished += int(open_ended.sum())
            columns, codes = {name: values[~open_ended] for name, values in columns.items()}, codes[~open_ended]
        start = np.ascontiguousarray(columns["start"])
        rows, none = start.size, np.empty(0, dtype=np.int64)
        pid = columns.get("globalPid", np.zeros(rows, dtype=np.int64))
        rank = np.empty(rows, dtype=np.int32)
        ranks = _rank_rows(pid, columns["deviceId"], self._pids, self._devices, len(self._ranks), rank, NULL)
        if ranks < 0:
            raise ValueError(f"more than {_MOST_RANKS} pairs of process and device")
        self._ranks += [_Columns() for _ in range(ranks - len(self._ranks))]
        edges = np.concatenate(([0], np.cumsum(np.bincount(rank, minlength=ranks))))
        stream, correlation = columns.get("streamId", none), columns.get("correlationId", none)
        out = (np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.int32),
               np.zeros(rows, np.int32), np.zeros(rows if correlation.size else 0, np.int64))
        self.negative += _scatter(rank, edges[:-1].copy(), start, columns["end"], codes, stream, correlation, *out,
                                  NULL)
        self.rows += rows
        for index in range(ranks):
            if edges[index + 1] > edges[index]:
                self._ranks[index].append([column[edges[index]:edges[index + 1]] for column in out])

    def ranks(self) -> Iterator[tuple[int, int, tuple[np.ndarray, ...]]]:
        """(globalPid, deviceId, (start, end, code, stream, correlation)) of each rank, sorted by start."""
        for index, columns in enumerate(self._ranks):
            yield int(self._pids[index]), int(self._devices[index]), columns.sorted()
