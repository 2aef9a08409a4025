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


def occupancy(requests: pd.DataFrame, users: int, window: tuple[float, float], start_s: float, end_s: float,
              gap_cap_s: float = 60.0) -> Occupancy:
    """Account for every user's time in `window` (start_s, end_s: the whole rung's).

    A user thinks from the end of a reply until the next *intended* send. Before its first and after its last
    request it is taken to think for at most `gap_cap_s`, as is a user that never got to send in the rung.
    """
    from_s, to_s = window
    span = to_s - from_s
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
