"""Fronts, hypervolume and the knee against brute force and by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.config import Slo
from spoc_lib.search import pareto

REFERENCE = pareto.Reference(ttft_s=5.0, itl_s=0.05, source="test")
GRID = st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))


def union_volume(losses: list[tuple[int, int, int]], corner: int) -> int:
    """Unit cells that some point dominates: the hypervolume of whole numbers, counted."""
    return sum(any(all(p <= c for p, c in zip(point, cell, strict=True)) for point in losses)
               for cell in itertools.product(range(corner), repeat=3))


@settings(max_examples=100, deadline=None)
@given(st.lists(GRID, max_size=9))
def test_hypervolume_counts_the_cells(losses):
    found = pareto.hypervolume_3d(np.array(losses, dtype=float).reshape(-1, 3), np.full(3, 6.0))
    assert found == pytest.approx(union_volume(losses, 6))


@settings(max_examples=100, deadline=None)
@given(st.lists(GRID, min_size=1, max_size=9), GRID)
def test_hypervolume_never_falls(losses, extra):
    corner = np.full(3, 6.0)
    before = pareto.hypervolume_3d(np.array(losses, dtype=float), corner)
    assert pareto.hypervolume_3d(np.array([*losses, extra], dtype=float), corner) >= before - 1e-9


@settings(max_examples=100, deadline=None)
@given(st.lists(GRID, min_size=1, max_size=9))
def test_the_front_has_the_whole_hypervolume_and_no_dominated_point(points):
    array = np.array(points, dtype=float)
    member = pareto.front(array)
    assert member.any() and not pareto.dominated(array[member]).any()
    box = pareto.Reference(7.0, 7.0, "test")
    assert box.hypervolume(array[member]) == pytest.approx(box.hypervolume(array))


def test_hypervolume_in_words():
    # 1000 tokens/s with half of the TTFT room and a quarter of the ITL room left
    assert REFERENCE.hypervolume(np.array([[1000, 2.5, 0.0375]])) == pytest.approx(125)
    assert REFERENCE.hypervolume(np.array([[1000, 6.0, 0.01]])) == 0  # beyond a limit
    assert REFERENCE.hypervolume(np.empty((0, 3))) == 0


def test_infeasible_and_failed_points_never_reach_the_front():
    points = np.array([[100, 1, 0.02], [900, 1, 0.01], [np.nan] * 3])
    assert pareto.front(points, np.array([True, False, True])).tolist() == [True, False, False]


def test_equal_points_are_on_the_front_once():
    assert pareto.front(np.array([[1, 1, 1], [1, 1, 1]])).tolist() == [True, False]


def test_history_grows_by_trial():
    points = np.array([[1000, 2.5, 0.025], [np.nan] * 3, [500, 2.5, 0.025], [1000, 1.25, 0.025]])
    history = pareto.hypervolume_history(points, np.array([True, False, True, True]), REFERENCE)
    assert history == pytest.approx([250, 250, 250, 375])


def test_the_knee_is_the_bulge():
    points = np.array([[1000, 4.0, 0.04], [950, 1.0, 0.02], [600, 0.9, 0.019]])
    found = pareto.knee(points, pareto.front(points))
    assert found.index == 1 and found.distance > 0


def test_differences_within_the_resolution_do_not_make_a_knee():
    points = np.array([[1000.0, 1.000, 0.020], [999.0, 0.999, 0.015]])  # only ITL really differs
    assert pareto.knee(points, pareto.front(points)).index == 1


def test_no_feasible_point_no_knee():
    assert pareto.knee(np.array([[1.0, 1, 1]]), np.array([False])) is None


def test_the_reference_is_the_loosest_limit_of_each_latency():
    slos = [Slo(metric="ttft", limit_s=5), Slo(persona="p", metric="ttft", limit_s=8), Slo(metric="itl", limit_s=0.05)]
    found = pareto.reference_point(slos)
    assert (found.ttft_s, found.itl_s) == (8, 0.05) and "TTFT" in found.source
    assert pareto.reference_point([Slo(metric="e2e", limit_s=60)]).source.endswith("fixed limits")
