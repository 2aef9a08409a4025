"""One clock: seconds on the monotonic clock, plus one wall-clock anchor a run."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Anchor:
    """Ties `monotonic_s` (CLOCK_MONOTONIC, the same for all processes of a host) to `wall_s` (Unix time)."""

    monotonic_s: float
    wall_s: float

    @classmethod
    def now(cls) -> Anchor:
        """Both clocks, read one right after the other."""
        return cls(time.monotonic(), time.time())

    def to_wall(self, monotonic_s: float) -> float:
        """Seconds since 1970 of a monotonic time."""
        return self.wall_s + (monotonic_s - self.monotonic_s)

    def to_monotonic(self, wall_s: float) -> float:
        """Monotonic seconds of a wall-clock time."""
        return self.monotonic_s + (wall_s - self.wall_s)
