"""Values of one metric with what a percentile and its interval must know of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spoc_lib.core.stats import Ranked


@dataclass(frozen=True, slots=True)
class Samples:
    """Latencies with what they share: all arrays (n,).

    value_s: seconds, +inf for a failure; weight: tokens that the value stands for (1 for a request);
    user: number of the user; time_s: when it happened; cut: nobody saw its end, so it is at least that long (None:
    all are known).
    """

    value_s: np.ndarray
    weight: np.ndarray
    user: np.ndarray
    time_s: np.ndarray
    cut: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.value_s)

    def where(self, mask: np.ndarray) -> Samples:
        """Those that `mask` picks."""
        return Samples(self.value_s[mask], self.weight[mask], self.user[mask], self.time_s[mask],
                       None if self.cut is None else self.cut[mask])

    @classmethod
    def concatenate(cls, parts: Sequence[Samples]) -> Samples:
        """All parts as one."""
        cuts = [np.zeros(len(part), bool) if part.cut is None else part.cut for part in parts]
        value_s, weight, user, time_s = (np.concatenate([getattr(part, name) for part in parts])
                                         for name in ("value_s", "weight", "user", "time_s"))
        return cls(value_s, weight, user, time_s, None if all(part.cut is None for part in parts)
                   else np.concatenate(cuts))

    @property
    def at_least(self) -> Samples:
        """The same, those that were cut taken for as long as they were seen: every percentile is a lower bound."""
        return Samples(self.value_s, self.weight, self.user, self.time_s)

    def ranked(self) -> Ranked:
        """Ready for quantiles."""
        return Ranked(self.value_s, self.weight, self.cut)

    def percentile(self, q: float) -> float:
        """Nearest rank over the weights; see `core.stats.Ranked` for those that were cut. NaN without samples."""
        return self.ranked().quantiles([q / 100.0])[0]

    def percentiles(self, qs: Sequence[float] = (50, 95, 99)) -> dict[str, float]:
        """{'p50': …, 'p95': …, 'p99': …}, likewise."""
        return self.ranked().percentiles(qs)
