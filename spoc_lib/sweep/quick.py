"""Capacity within seconds, on the virtual clock: a bisection over users for questions asked beside a sweep.

A sweep answers how many users and how sure; this answers how far that moves when one assumption does. All rungs of
one answer play the same users (one salt, one seed), so that answers differ by what was asked, not by luck: compare
them with each other, and take the interval from the sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from spoc_lib.config import SHARES, Slo
from spoc_lib.core.errors import InputError
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.metrics import SHARE_MARK, Measured
from spoc_lib.sweep.record import RungRecord

#: The bracket at which a bisection stops, relative to its upper end.
TOLERANCE = 0.04
#: A capacity beyond this many users is not looked for.
MOST_USERS = 4000
#: The first step of the search for a bracket, relative to the users; each next one is twice as wide.
STRIDE = 0.08


@dataclass(frozen=True)
class QuickCapacity:
    """users: the most that met every SLO (0: not even one); missed: the fewest that did not (None: up to
    `MOST_USERS` all are met); binding: name of the SLO that was furthest beyond its limit there; rungs: one row a
    number of users tried (users, met, and the percentile of each SLO by its name, in seconds; of an SLO on a share of
    requests: 0 where it is met, else inf); passport: the engine's, `outside` being that of the rung at `users`."""

    users: int
    missed: int | None
    binding: str | None
    rungs: pd.DataFrame
    passport: dict[str, Any]


def quick_capacity(engine: EmbeddedEngine, play: Callable[[int], RungRecord], slos: Sequence[Slo], *, near: int = 60,
                   tolerance: float = TOLERANCE) -> QuickCapacity:
    """The most users whose percentiles stay within all `slos` on `engine`.

    play: the rung of a number of users; near: where the search begins; tolerance: width of the final bracket relative
    to it. InputError without SLOs.
    """
    if not slos:
        raise InputError("no-slo", "a capacity needs at least one SLO to hold")
    rows: dict[int, dict] = {}
    outside: dict[int, list[str]] = {}

    def met(users: int) -> bool:
        if users not in rows:
            record = play(users)
            values = percentiles(record, slos)
            outside[users] = record.outside
            rows[users] = {"users": users, "met": all(values[slo.name] <= _limit(slo) for slo in slos), **values}
        return rows[users]["met"]

    low, high = bracket(met, near, tolerance)
    ordered = pd.DataFrame([rows[users] for users in sorted(rows)])
    binding = None
    if high is not None:
        binding = max(slos, key=lambda slo: rows[high][slo.name] / _limit(slo)).name
    return QuickCapacity(low, high, binding, ordered,
                         engine.passport() | {"outside": outside.get(low, engine.outside())})


def _limit(slo: Slo) -> float:
    """What a sample must not be beyond."""
    return SHARE_MARK if slo.metric in SHARES else slo.limit_s


def percentiles(record: RungRecord, slos: Sequence[Slo]) -> dict[str, float]:
    """The percentile of each SLO in the rung's window, as figures show it, by the SLO's name; inf where nothing was
    answered."""
    seen = Measured(record.requests, record.chunks, record.window, record.end_s)
    found = {}
    for slo in slos:
        values = seen.of(slo, slos) if slo.metric in SHARES else seen.samples(slo.metric, slo.persona)
        found[slo.name] = values.percentile(slo.within_percent) if len(values) else float("inf")
    return found


def bracket(met: Callable[[int], bool], near: int, tolerance: float = TOLERANCE) -> tuple[int, int | None]:
    """(most users met, fewest missed): outwards from `near` until both are known, then by bisection.

    (0, 1) when a single user is too many, (…, None) when `MOST_USERS` are met.
    """
    low, high = 0, None
    users, stride = max(1, min(near, MOST_USERS)), STRIDE
    while high is None or low == 0:
        if met(users):
            low = users
            if high is not None or low == MOST_USERS:
                break
            users = min(MOST_USERS, max(users + 1, round(users * (1 + stride))))
        else:
            high = users
            if low or users == 1:
                break
            users = max(1, min(users - 1, round(users / (1 + stride))))
        stride = min(2 * stride, 1.0)
    while high is not None and high - low > max(1, tolerance * high):
        middle = (low + high) // 2
        low, high = (middle, high) if met(middle) else (low, middle)
    return low, high
