"""Were there really N users? Little's law, N = X (R + Z), in the form that holds for a window of any length.

Averages of R and Z over a short window miss what its edges cut off, and fail a valid short rung by noise. So
the law is taken as its own integral: the time that the records account for as waiting or streaming (R), the time
that the script accounts for as thinking (Z) and the time from the intended to the actual sending (the client was
late), all cut at the window's edges and added over users, must be N times the window's length. Time that nobody
accounts for (a user that died, a slot freed while thinking) makes it too small; extra users make it too large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.metrics.registry import METRICS

#: Little's law must hold this closely, or the rung says nothing about N users.
LITTLE_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Mean users in the window: `live` = `thinking` + `late` + `in_flight`; `little_error_ratio` = |live − N| / N.
    late: users whose next request was due and not yet sent, so the load generator's own doing."""

    live: float
    thinking: float
    late: float
    in_flight: float
    little_error_ratio: float
    overlaps: int
    seen: int

    def numbers(self, *names: str) -> dict[str, float]:
        """Metrics of users by name."""
        return {name: METRICS[name].of(self) for name in names}


def occupancy(requests: pd.DataFrame, users: int, window: tuple[float, float], start_s: float, end_s: float,
              gap_cap_s: float = 60.0) -> Occupancy:
    """Account for every user's time in `window` (start_s, end_s: the whole load's).

    A user thinks from the end of a reply until the next *intended* send. Before its first and after its last
    request it is taken to think for at most `gap_cap_s`, as is a user that never got to send (0 where users come as
    they send and go with their last answer). An empty window has no users: NaN.
    """
    from_s, to_s = window
    span = to_s - from_s or np.nan
    user = requests["user"].to_numpy(np.int64)
    send = requests["send_s"].to_numpy(float, na_value=np.nan)
    intended = requests["intended_send_s"].to_numpy(float, na_value=np.nan)
    send = np.where(np.isnan(send), intended, send)
    intended = np.where(np.isnan(intended), send, intended)
    end = requests["end_s"].to_numpy(float, na_value=np.nan)
    cut_off = requests["outcome"].to_numpy(str) == "censored"
    end = np.where(np.isnan(end), end_s, end)
    order = np.lexsort((send, user))
    user, send, intended, end, cut_off = (array[order] for array in (user, send, intended, end, cut_off))

    def clipped(begin: np.ndarray, finish: np.ndarray) -> float:
        return float(np.maximum(np.minimum(finish, to_s) - np.maximum(begin, from_s), 0.0).sum())

    in_flight, late = clipped(send, end), clipped(intended, send)
    same = user[1:] == user[:-1]
    thinking = clipped(end[:-1][same], intended[1:][same])
    first = np.concatenate([[True], ~same]) if len(user) else np.zeros(0, bool)
    last = np.concatenate([~same, [True]]) if len(user) else np.zeros(0, bool)
    thinking += clipped(np.maximum(start_s, intended[first] - gap_cap_s), intended[first])
    open_end = last & ~cut_off
    thinking += clipped(end[open_end], np.minimum(end[open_end] + gap_cap_s, end_s))
    unseen = max(users - int(first.sum()), 0)
    thinking += unseen * clipped(np.array([start_s]), np.array([min(start_s + gap_cap_s, end_s)]))
    live = (in_flight + late + thinking) / span
    return Occupancy(
        live=live, thinking=thinking / span, late=late / span, in_flight=in_flight / span,
        little_error_ratio=abs(live - users) / users,
        overlaps=int((same & (send[1:] < end[:-1] - 1e-6)).sum()) if len(user) else 0, seen=int(first.sum()),
    )


def little(requests: pd.DataFrame, live: float, start_s: float, end_s: float,
           first_think_s: float = np.nan) -> dict[str, float]:
    """Little's law in the window by its means, N = X (R + Z + L): mean response, think and lateness of the client (from
    the intended to the actual sending), and the error ratio X (R + Z + L) / N - 1. Requests that ended count, with the
    think time and the lateness that went before them. `first_think_s`: what went before a user's first request;
    unknown in a closed loop, nothing where users come as they send."""
    ordered = requests.sort_values(["user", "send_s"], kind="stable")
    thought = (ordered["intended_send_s"] - ordered.groupby("user")["end_s"].shift()).fillna(first_think_s)
    ended = ordered[(ordered["end_s"] >= start_s) & (ordered["end_s"] < end_s) & (ordered["outcome"] != "censored")]
    response, late, think = (float(one.mean()) for one in (
        ended["end_s"] - ended["send_s"], ended["send_s"] - ended["intended_send_s"], thought[ended.index]))
    rate = len(ended) / (end_s - start_s or np.nan)
    error = rate * (response + think + late) / live - 1 if live else np.nan
    return {"response_s": response, "think_s": think, "late_s": late, "little_error_ratio": error}
