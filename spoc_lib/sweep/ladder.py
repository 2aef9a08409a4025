"""Which number of users to try next: a coarse search over the ladder's rungs, then ever closer to the
edge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.sweep.fit import Crossing, cross, draw, margins

#: The interval that is aimed at, relative to the capacity.
TARGET_WIDTH = 0.08
#: The highest number of users that is tried, as a multiple of the ladder's top.
HEADROOM = 4.0


@dataclass(frozen=True, slots=True)
class Step:
    """The next rung: `users`, and why."""

    users: int
    why: str


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs of a sweep, chosen one by one.

    rungs: the coarse ladder, ascending users; level: of the capacity's interval; target_width: relative
    width of the interval at which it stops; seeds: repeats of the rungs on both sides of the edge; shared_noise: see
    `fit.cross`.
    """

    rungs: Sequence[int]
    level: float = 0.9
    target_width: float = TARGET_WIDTH
    seeds: int = 1
    shared_noise: bool = False

    def crossing(self, verdicts: pd.DataFrame) -> Crossing:
        """The capacity that the SLO_VERDICTS rows of the valid rungs so far show."""
        return cross(margins(verdicts, self.level), self.level, shared_noise=self.shared_noise)

    def next(self, verdicts: pd.DataFrame, refused: Sequence[int] = ()) -> Step | None:
        """The next rung after those in `verdicts` (valid ones) and `refused` (users of invalid ones); None:
        done."""
        tried = sorted({int(users) for users in verdicts["users"]} | set(refused))
        if not len(verdicts):
            left = [users for users in self.rungs if users not in tried]
            return Step(left[len(left) // 2 - (len(left) > 1 and len(left) % 2 == 0)], "the ladder's middle") \
                if left else None
        found = self.crossing(verdicts)
        low, high = found.bracket
        inner = [users for users in self.rungs if low < users < high and users not in tried]
        if math.isinf(high):
            return self._upward(low, inner, tried)
        if low == 0 and not inner:
            return self._downward(int(high), tried)
        if inner and high - low > self.target_width * high:
            return Step(inner[(len(inner) - 1) // 2], f"between {low:g} and {high:g} users on the ladder")
        return self._refine(found, verdicts, refused)

    def _upward(self, low: float, inner: list[int], tried: list[int]) -> Step | None:
        if inner:
            return Step(inner[len(inner) // 2], f"met at {low:g} users: further up the ladder")
        users = math.ceil(max(low, self.rungs[-1]) * 1.5)
        if users > self.rungs[-1] * HEADROOM or users in tried:
            return None
        return Step(users, "met at the ladder's top: beyond it")

    def _downward(self, high: int, tried: list[int]) -> Step | None:
        users = high // 2
        return Step(users, "missed at the ladder's foot: below it") if users >= 1 and users not in tried else None

    def _refine(self, found: Crossing, verdicts: pd.DataFrame, refused: Sequence[int]) -> Step | None:
        """Into the gap between rungs that keeps the interval wide; where all are narrow, once more at the edge.

        A gap weighs its width times the chance that the edge lies in it.
        """
        low, high = found.bracket
        edge = found.users if 0 < found.users < math.inf else (low + high) / 2
        if found.relative_width <= self.target_width or found.high - found.low <= 1:
            return self._confirm(found, verdicts, refused)
        for begin, end in self._gaps(verdicts):
            if end - begin > max(1.0, self.target_width * edge / 2):
                users = self._between(begin, end, edge)
                if users not in refused:
                    return Step(users, f"the edge may lie between {begin:g} and {end:g} users")
        users = max(1, round(edge))
        return None if users in refused else Step(users, "undecided at the edge: once more, with other users")

    def _confirm(self, found: Crossing, verdicts: pd.DataFrame, refused: Sequence[int]) -> Step | None:
        """The two rungs at the edge once more with other users, `seeds` + 1 times each: where a server tips over may
        depend on who its users are, which a single rung on either side does not show."""
        for users, side in ((round(found.high), "upper"), (round(found.low), "lower")):
            runs = verdicts.loc[verdicts["users"] == users, "rung"].nunique()
            if 0 < runs <= self.seeds and users not in refused:
                return Step(users, f"the {side} side of the edge once more, with other users")
        return None

    def _gaps(self, verdicts: pd.DataFrame) -> list[tuple[float, float]]:
        """Gaps between rungs, heaviest first; those with a chance below half of the interval's tail do not count."""
        lows, highs = draw(margins(verdicts, self.level), shared_noise=self.shared_noise)
        top = 1.5 * float(verdicts["users"].max())
        brackets, counts = np.unique(np.stack([lows, np.minimum(highs, top)]), axis=1, return_counts=True)
        chances = counts / counts.sum()
        ordered = sorted(zip(chances * (brackets[1] - brackets[0]), chances, *brackets, strict=True), reverse=True)
        return [(float(begin), float(end)) for _, chance, begin, end in ordered if chance > (1 - self.level) / 4]

    def _between(self, begin: float, end: float, edge: float) -> int:
        """Whole users strictly between two rungs: where the fit sees the edge, if it is between them, but never so
        near to a rung that little is learnt; else the middle."""
        if begin < edge < end:
            margin = min(max(1.0, self.target_width * edge / 3, 0.2 * (end - begin)), (end - begin) / 2)
            aimed = min(max(edge, begin + margin), end - margin)
        else:
            aimed = math.sqrt(max(begin, 1.0) * end)
        return int(min(max(round(aimed), math.floor(begin) + 1), math.ceil(end) - 1))
