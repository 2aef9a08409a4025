"""Interval algebra against a list of nanoseconds, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.nsight.intervals import own, sums

CATEGORIES, WATCH = 4, 2
interval = st.tuples(st.integers(-20, 120), st.integers(-4, 60), st.integers(0, CATEGORIES - 1))
intervals = st.lists(interval, max_size=90)


def columns(rows):
    rows = sorted(rows, key=lambda row: row[0])
    start = np.array([r[0] for r in rows], dtype=np.int64)
    return start, start + np.array([r[1] for r in rows], dtype=np.int64), np.array([r[2] for r in rows], dtype=np.int64)


def instants(start, end):
    return {t for a, b in zip(start.tolist(), end.tolist(), strict=True) for t in range(a, b)}


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(rows=intervals, bounds=st.lists(st.integers(-10, 130), min_size=2, max_size=8, unique=True))
def test_every_nanosecond_has_one_owner(rows, bounds):
    start, end, owner = columns(rows)
    bounds = np.array(sorted(bounds))
    result = own(start, end, owner, np.arange(CATEGORIES), bounds, CATEGORIES, WATCH)
    for s, (low, high) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        expected, watched = [0] * (CATEGORIES + 1), 0
        for t in range(low, high):
            active = {c for a, b, c in zip(start.tolist(), end.tolist(), owner.tolist(), strict=True) if a <= t < b}
            expected[min(active, default=CATEGORIES)] += 1
            watched += WATCH in active
        assert result.busy_ns[s].tolist() == expected[:CATEGORIES]
        assert result.gap_ns[s] + result.tail_ns[s] == expected[CATEGORIES]
        assert result.any_ns[s] == watched
    assert result.busy_ns.sum() + result.gap_ns.sum() + result.tail_ns.sum() == bounds[-1] - bounds[0]
    assert result.gap_sum_ns.sum() == result.gap_ns.sum() + result.tail_ns.sum()
    inside = (start >= bounds[0]) & (start < bounds[-1])
    before = (start < bounds[0]) & (end > bounds[0])
    assert result.counts.sum() == np.count_nonzero(inside | before)


def test_idle_at_a_segments_end_is_its_tail():
    result = own(np.array([0, 20, 50]), np.array([10, 30, 60]), np.zeros(3, int), np.array([0]),
                 np.array([0, 50, 60]), 1, 0)
    assert result.gap_ns.tolist() == [10, 0] and result.tail_ns.tolist() == [20, 0]


def test_many_intervals_may_run_at_once():
    n = 5000
    start = np.arange(n)
    result = own(start, np.full(n, 2 * n), np.arange(n) % 12, np.arange(12), np.array([0, 2 * n]), 12, 10)
    assert result.busy_ns[0, 0] == 2 * n


@settings(deadline=None)
@given(rows=intervals, cut=st.integers(-9, 129), shift=st.integers(-2**40, 2**40))
def test_a_window_is_the_sum_of_its_parts_wherever_it_is_cut_and_the_clock_may_begin_anywhere(rows, cut, shift):
    start, end, owner = columns(rows)

    def owned(*bounds, by=0):
        return own(start + by, end + by, owner, np.arange(CATEGORIES), np.array(bounds) + by, CATEGORIES, WATCH)

    whole, parts, moved = owned(-10, 130), owned(-10, cut, 130), owned(-10, 130, by=shift)
    assert parts.busy_ns.sum(axis=0).tolist() == whole.busy_ns[0].tolist() == moved.busy_ns[0].tolist()
    assert parts.any_ns.sum() == whole.any_ns[0] and moved.gaps.tolist() == whole.gaps.tolist()
    assert parts.counts.sum(axis=0).tolist() == whole.counts[0].tolist()


@settings(deadline=None)
@given(rows=intervals, low=st.integers(-20, 60), length=st.integers(1, 80))
def test_sums_count_each_interval_in_the_window_and_overlaps_twice(rows, low, length):
    start, end, code = columns(rows)
    window = range(low, low + length)
    count, total = sums(start, end, code, CATEGORIES, (low, low + length))
    for c in range(CATEGORIES):
        mine = [range(a, b) for a, b, k in zip(start.tolist(), end.tolist(), code.tolist(), strict=True) if k == c]
        assert total[c] == sum(max(0, min(r.stop, window.stop) - max(r.start, window.start)) for r in mine)
        assert count[c] == sum(r.start in window or (r.start < low < r.stop) for r in mine)
