"""Interval algebra in integer nanoseconds: one pass over a GPU's activities that gives every instant one owner.

Intervals are half open, [start, end). All functions take arrays sorted by start unless they say otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from spoc_lib.nsight.sqlitepages import NULL


class Ownership(NamedTuple):
    """Result of `own`. Rows are the segments between `boundaries`, columns the categories.

    busy_ns[s, c]: time that category c owns; gap_ns[s]: idle time between activities inside the segment;
    tail_ns[s]: idle time that reaches the segment's end; any_ns[s]: time in which an activity of category `watch`
    runs, owned or hidden; counts[s, c]: activities that start in the segment; gaps[k], gap_sum_ns[k]: idle
    intervals by length, see `GAP_LIMITS_NS`. For each segment: busy_ns.sum() + gap_ns + tail_ns = its length.
    late_ns[s, k], early_ns[s, k]: of the idle time of gaps (k = 0) and tails (k = 1) what ends with an activity that
    was launched after the GPU had gone idle, and what ends with one that was launched before; what is in neither ends
    with an activity whose launch is not known, or with none.
    """

    busy_ns: np.ndarray
    gap_ns: np.ndarray
    tail_ns: np.ndarray
    any_ns: np.ndarray
    counts: np.ndarray
    gaps: np.ndarray
    gap_sum_ns: np.ndarray
    late_ns: np.ndarray
    early_ns: np.ndarray


#: Upper ends of the classes of idle intervals, and how a table calls them.
GAP_LIMITS_NS = np.array([10_000, 100_000, 1_000_000, 10_000_000], dtype=np.int64)
GAP_CLASSES = ("up to 10 us", "10 to 100 us", "0.1 to 1 ms", "1 to 10 ms", "above 10 ms")


@numba.njit(cache=True, nogil=True)
def _push(ends, owners, size, end, owner):
    """Put an active interval into the heap ordered by end."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        if ends[above] <= end:
            break
        ends[at] = ends[above]
        owners[at] = owners[above]
        at = above
    ends[at] = end
    owners[at] = owner


@numba.njit(cache=True, nogil=True)
def _pop(ends, owners, size):
    """Remove the first to end; the heap holds size - 1 afterwards."""
    end, owner = ends[size - 1], owners[size - 1]
    at, last = 0, size - 1
    while True:
        child = 2 * at + 1
        if child >= last:
            break
        if child + 1 < last and ends[child + 1] < ends[child]:
            child += 1
        if end <= ends[child]:
            break
        ends[at] = ends[child]
        owners[at] = owners[child]
        at = child
    ends[at] = end
    owners[at] = owner


@numba.njit(cache=True, nogil=True)
def _own(start, end, code, owner, launched, unknown, boundaries, watch, limits, active, ends, owners, busy, gap, tail,
         watched, count, gaps, gap_sum, late, early):
    # every array is made by the caller: making them here would double the time that compiling takes on a first run
    segments, categories = busy.shape
    size = 0
    top = categories  # the active category that owns the instant; `categories` when idle
    now, last = boundaries[0], boundaries[segments]
    segment = 0
    n = start.size
    reached = unknown  # how far the activities so far reach, also outside the window: since then the GPU is idle
    for i in range(n + 1):
        told = i < n and launched.size > 0 and launched[i] != unknown
        begin = last if i == n else min(max(start[i], boundaries[0]), last)
        # let everything end that ends before the next start
        while now < begin or (size and ends[0] <= begin):
            until = begin
            if size and ends[0] < until:
                until = ends[0]
            if top == categories and until > now:
                length = until - now
                k = 0
                while k < limits.size and length > limits[k]:
                    k += 1
                gaps[k] += 1
                gap_sum[k] += length
            while now < until:
                while boundaries[segment + 1] <= now:
                    segment += 1
                cut = min(until, boundaries[segment + 1])
                if top < categories:
                    busy[segment, top] += cut - now
                    if active[watch]:
                        watched[segment] += cut - now
                else:
                    place = 1 if cut == boundaries[segment + 1] else 0
                    if place:
                        tail[segment] += cut - now
                    else:
                        gap[segment] += cut - now
                    if told and launched[i] >= reached:
                        late[segment, place] += cut - now
                    elif told:
                        early[segment, place] += cut - now
                now = cut
            while size and ends[0] <= now:
                gone = owners[0]
                _pop(ends, owners, size)
                size -= 1
                active[gone] -= 1
                if active[gone] == 0 and gone == top:
                    while top < categories and active[top] == 0:
                        top += 1
        if i == n:
            break
        reached = max(reached, end[i], start[i])
        if start[i] >= last or (end[i] <= boundaries[0] and start[i] < boundaries[0]):
            continue
        c = owner[code[i]]
        where = segment
        while where < segments - 1 and boundaries[where + 1] <= begin:
            where += 1
        count[where, c] += 1
        if end[i] <= begin:
            continue
        _push(ends, owners, size, min(end[i], last), c)
        size += 1
        active[c] += 1
        if c < top:
            top = c


def own(start: np.ndarray, end: np.ndarray, code: np.ndarray, owner: np.ndarray, boundaries: np.ndarray,
        categories: int, watch: int, launched: np.ndarray | None = None) -> Ownership:
    """Give every nanosecond between the first and last of `boundaries` (ascending, at least two) to the active
    category with the smallest index, or to idle.

    start, end: int64 ns, sorted by start; an interval that ends before it starts has no length. owner[code[i]]:
    category index of interval i. watch: the category whose hidden time is wanted. launched: when each interval's launch
    began, `NULL` where that is not known; None where nothing is. Intervals are clipped to the window.
    """
    segments = len(boundaries) - 1
    result = Ownership(*(np.zeros(shape, dtype=np.int64) for shape in (
        (segments, categories), segments, segments, segments, (segments, categories), GAP_LIMITS_NS.size + 1,
        GAP_LIMITS_NS.size + 1, (segments, 2), (segments, 2))))
    # the heap holds what runs at one instant: few, but untouched memory of the size of the worst case costs nothing
    heap = np.empty(start.size + 1, dtype=np.int64), np.empty(start.size + 1, dtype=np.int64)
    _own(start, end, code, np.ascontiguousarray(owner, dtype=np.int64),
         np.empty(0, np.int64) if launched is None else launched, NULL,
         np.ascontiguousarray(boundaries, dtype=np.int64), watch, GAP_LIMITS_NS,
         np.zeros(categories, dtype=np.int64), *heap, *result)
    return result


@numba.njit(cache=True, nogil=True)
def _sums(start, end, code, low, high, count, total):
    for i in range(start.size):
        if start[i] < high and (end[i] > low or start[i] >= low):
            count[code[i]] += 1
            total[code[i]] += max(min(end[i], high) - max(start[i], low), 0)


def sums(start: np.ndarray, end: np.ndarray, code: np.ndarray, codes: int, window: tuple[int, int]
         ) -> tuple[np.ndarray, np.ndarray]:
    """(intervals, ns) by code in [0, codes), clipped to the window, overlaps counted twice."""
    count, total = np.zeros(codes, dtype=np.int64), np.zeros(codes, dtype=np.int64)
    _sums(start, end, code, window[0], window[1], count, total)
    return count, total
