"""What a driver brings home from one rung, whichever it is, and whether the rung was long enough."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.core.schemas import METRICS, REQUESTS
from spoc_lib.core.tables import write_table

Say = Callable[[str], None]
#: Added to a rung's salt when it is played again: other users, since the first try has warmed the cache with its own.
AGAIN_SALT = 500


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a rung: `duration_s` of sending, of which `warmup_s` are not measured."""

    duration_s: float
    warmup_s: float


@dataclass(frozen=True, slots=True)
class Needs:
    """A rung was too short: how long it should have been, and why."""

    timing: Timing
    sentence: str


@dataclass(frozen=True)
class RungRecord:
    """What a driver brings home from one rung. Times of one rung share a clock; `window` is its steady part.

    steps: the engine's own steps (virtual clock only); problems: sentences about its telemetry;
    overhead_ratio: share of the time that the server spent on being scraped; host_busy_ratio: of this host's
    processors during the rung;
    alignment_error_s: how far a metric's time stamp may be off; load: the load run's summary
    (locust only); needs: what it lacked in length (locust only); outside: sentences on where it left the measured range
    of its step time (virtual clock only).
    """

    driver: str
    requests: pd.DataFrame
    chunks: pd.DataFrame
    metrics: pd.DataFrame
    window: tuple[float, float]
    start_s: float
    end_s: float
    planned: int
    client_limited: bool = False
    steps: pd.DataFrame | None = None
    problems: list[str] = field(default_factory=list)
    overhead_ratio: float | None = None
    host_busy_ratio: float | None = None
    alignment_error_s: float = 0.0
    load: dict[str, Any] | None = None
    needs: Needs | None = None
    outside: list[str] = field(default_factory=list)


def needed(requests: pd.DataFrame, users: int, timing: Timing, start_s: float) -> Needs | None:
    """What a rung of REQUESTS begun at `start_s` lacked in length; None where its warm-up outlasted the cold start
    (until every user had its first answer) and its window a user's turn (answer and think time).

    A cold start that the rung did not see the end of is taken to last half as long again as the rung.
    """
    measured_s, settled_s = timing.duration_s - timing.warmup_s, settled(requests, users)
    cold_s = 1.5 * timing.duration_s if settled_s is None else settled_s - start_s
    sent = requests["send_s"].between(start_s + timing.warmup_s, start_s + timing.duration_s, inclusive="left").sum()
    turn_s = users * measured_s / max(int(sent), 1)
    if cold_s <= timing.warmup_s and turn_s <= measured_s:
        return None
    warmup_s = max(timing.warmup_s, 1.1 * cold_s)
    longer = Timing(math.ceil(warmup_s + max(measured_s, 1.1 * turn_s)), warmup_s)
    why = f"a user's turn (answer and think time) takes {turn_s:.0f} s, the window {measured_s:.0f} s"
    if cold_s > timing.warmup_s:
        lasted = f"longer than the rung of {timing.duration_s:.0f} s" if settled_s is None else f"{cold_s:.0f} s"
        why = f"the cold start lasted {lasted}, the warm-up {timing.warmup_s:.0f} s (its latencies are a cold cache's)"
    return Needs(longer, f"with {users} users over HTTP {why}; a rung of {longer.duration_s:.0f} s is needed: "
                 f"'http_rung_s' in the profile, or in a sweep over HTTP 'http_longest_s'")


def long_enough(play: Callable[[Timing, int], RungRecord], timing: Timing, longest_s: float | None,
                say: Say) -> RungRecord:
    """`play(timing, attempt)`, and again with the length that it turned out to need, where `longest_s` allows it: for
    other users, since the first attempt has warmed the cache with its own."""
    record = play(timing, 0)
    if record.needs is None or longest_s is None or record.needs.timing.duration_s > longest_s:
        return record
    say(f"{record.needs.sentence}; it is played again for that long")
    return play(record.needs.timing, 1)


def settled(requests: pd.DataFrame, users: int) -> float | None:
    """When the last of `users` users had its first answer begin; None while one has had none."""
    answered = requests.sort_values("send_s", kind="stable").groupby("user")["first_token_s"].first()
    return float(answered.max()) if answered.notna().sum() >= users else None


def store(record: RungRecord, folder: Path) -> None:
    """Requests and metrics of a rung, as Parquet. The load runner has written its own requests and chunks;
    the virtual clock's chunks are left out: the seed plays them again."""
    if record.driver == "virtual":
        write_table(folder / "requests.parquet", record.requests, REQUESTS)
    write_table(folder / "metrics.parquet", record.metrics, METRICS)
