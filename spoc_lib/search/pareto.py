"""Dominance, fronts, hypervolume and the knee, in the three objectives of the search.

Points are rows (output tokens/s, p95 TTFT s, p95 ITL s): the first is wanted high, the others low. On request the
first is goodput instead: requests a second that meet every SLO on latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from spoc_lib.config import Slo

Objectives = tuple[str, str, str]
Point = tuple[float, float, float]
THROUGHPUT, GOODPUT = "output_tokens_per_s", "goodput_per_s"
OBJECTIVES: Objectives = (THROUGHPUT, "ttft_p95_s", "itl_p95_s")
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("maximize", "minimize", "minimize")
_SIGNS = np.array([-1.0, 1.0, 1.0])
#: Differences of an objective below this share of its value decide nothing: spans of the front are widened to it
#: before the knee is looked for, and two engines that differ by less are alike.
RESOLUTION = 0.02


@dataclass(frozen=True, slots=True)
class Reference:
    """The corner that the hypervolume is measured from: no throughput, and each latency at its limit.

    Its unit is that of the first objective: throughput weighted by the share of TTFT room and of ITL room left under
    the limits.
    """

    ttft_s: float
    itl_s: float
    source: str

    def hypervolume(self, points: np.ndarray) -> float:
        """Volume that `points` (n, 3) dominate inside the box, latencies in units of their limits."""
        points = np.asarray(points, dtype=float).reshape(-1, 3)
        losses = points * _SIGNS / np.array([1.0, self.ttft_s, self.itl_s])
        return hypervolume_3d(losses, np.array([0.0, 1.0, 1.0]))


def reference_point(slos: list[Slo], ttft_s: float = 10.0, itl_s: float = 0.2) -> Reference:
    """The loosest p95-or-higher limit of each latency among `slos`; without one, the stated fallback."""
    ttft = max((slo.limit_s for slo in slos if slo.metric == "ttft"), default=None)
    itl = max((slo.limit_s for slo in slos if slo.metric in ("itl", "tpot")), default=None)
    known = [name for name, value in (("TTFT", ttft), ("ITL", itl)) if value is not None]
    source = f"no throughput and the SLO limits of {' and '.join(known)}" if known else "no throughput and fixed limits"
    return Reference(ttft or ttft_s, itl or itl_s, source)


def objectives(kind: Literal["throughput", "goodput"]) -> Objectives:
    """The names of the three objectives, as columns of TRIALS."""
    return (GOODPUT if kind == "goodput" else THROUGHPUT, *OBJECTIVES[1:])


def dominated(points: np.ndarray) -> np.ndarray:
    """(n,) whether some other row is at least as good everywhere and better somewhere."""
    losses = np.asarray(points, dtype=float).reshape(-1, 3) * _SIGNS
    no_worse = (losses[None, :, :] <= losses[:, None, :]).all(axis=2)
    better = (losses[None, :, :] < losses[:, None, :]).any(axis=2)
    return (no_worse & better).any(axis=1)


def front(points: np.ndarray, feasible: np.ndarray | None = None) -> np.ndarray:
    """(n,) membership of the Pareto front among the feasible rows; of equal rows only the first is a member."""
    points = np.asarray(points, dtype=float).reshape(-1, 3)
    keep = np.ones(len(points), dtype=bool) if feasible is None else np.asarray(feasible, dtype=bool)
    keep = keep & np.isfinite(points).all(axis=1)
    member = np.zeros(len(points), dtype=bool)
    rows = np.flatnonzero(keep)
    if rows.size:
        _, first = np.unique(points[rows], axis=0, return_index=True)
        rows = rows[np.sort(first)]
        member[rows] = ~dominated(points[rows])
    return member


def hypervolume_3d(losses: np.ndarray, corner: np.ndarray) -> float:
    """Exact hypervolume of three minimised objectives: slices along the third, a 2-D staircase in each.

    losses (n, 3); corner (3,): points that are not better than it everywhere add nothing. O(n² log n).
    """
    inside = losses[(losses < corner).all(axis=1)]
    if not len(inside):
        return 0.0
    inside = inside[np.argsort(inside[:, 2], kind="stable")]
    heights = np.append(inside[1:, 2], corner[2]) - inside[:, 2]
    total = 0.0
    for count, height in enumerate(heights, start=1):
        if height > 0:
            total += height * _area_2d(inside[:count, :2], corner)
    return float(total)


def _area_2d(losses: np.ndarray, corner: np.ndarray) -> float:
    ordered = losses[np.lexsort((losses[:, 1], losses[:, 0]))]
    lowest = np.minimum.accumulate(ordered[:, 1])
    widths = np.append(ordered[1:, 0], corner[0]) - ordered[:, 0]
    return float((widths * (corner[1] - lowest)).sum())


def hypervolume_history(points: np.ndarray, feasible: np.ndarray, reference: Reference) -> np.ndarray:
    """(n,) hypervolume of the feasible points among the first 1, 2, … n rows (row order = trial order)."""
    points = np.asarray(points, dtype=float).reshape(-1, 3)
    history = np.zeros(len(points))
    members = np.empty((0, 3))
    volume = 0.0
    for index, (point, usable) in enumerate(zip(points, feasible, strict=True)):
        if usable and np.isfinite(point).all():
            candidates = np.vstack([members, point])
            keep = front(candidates)
            if keep[-1]:
                members = candidates[keep]
                volume = reference.hypervolume(members)
        history[index] = volume
    return history


@dataclass(frozen=True, slots=True)
class Knee:
    """The point of the front that lies farthest below the plane through the ends of the normalised axes.

    index: row in the points given; distance: 0 on the plane, 1/√3 at the ideal; rule: the sentence for readers.
    """

    index: int
    distance: float
    rule: str


def as_good_as(points: np.ndarray, point: np.ndarray) -> np.ndarray:
    """(n,) whether each row is nowhere worse than `point` by more than RESOLUTION."""
    losses, best = np.asarray(points, dtype=float) * _SIGNS, np.asarray(point, dtype=float) * _SIGNS
    return (losses - best <= RESOLUTION * np.abs(best)).all(axis=1)


KNEE_RULE = ("the knee is the feasible front point farthest below the plane that joins the worst corners, after each "
             "objective is scaled to 0 (best on the front) … 1 (worst on the front); of trials that cannot be told "
             f"from it (within {RESOLUTION:.0%} in every objective) the one that changes the fewest flags is taken")


def knee(points: np.ndarray, member: np.ndarray) -> Knee | None:
    """The knee among the rows where `member` holds (ties: the first); None when there are none."""
    rows = np.flatnonzero(member)
    if not rows.size:
        return None
    losses = np.asarray(points, dtype=float)[rows] * _SIGNS
    best, worst = losses.min(axis=0), losses.max(axis=0)
    span = np.maximum(worst - best, RESOLUTION * np.abs(best))
    scaled = (losses - best) / np.where(span > 0, span, 1.0)
    distance = (1.0 - scaled.sum(axis=1)) / np.sqrt(3.0)
    chosen = int(np.argmax(distance))
    return Knee(int(rows[chosen]), float(distance[chosen]), KNEE_RULE)
