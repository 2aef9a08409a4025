"""Up and down: one and the same server through rungs of more and more users, and back through the same rungs.

A server without hysteresis answers N users as it did before, once an overload is over. One that keeps something of it
(a queue that never empties, a prefix cache that lost everybody's history) does not, and a capacity measured upwards is
not the one after a busy hour.

On the virtual clock the whole staircase is one run: its users join at the foot of a step and leave at its end. A script
cannot know the time, so the run is played once a step downwards: up to the moment at which users leave, runs are the
same, and the turns that a user had sent until then are all it gets in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.config import SHARES, Slo
from spoc_lib.core.errors import InputError
from spoc_lib.engine import virtual
from spoc_lib.metrics import METRICS, Measured
from spoc_lib.sweep.rung import name_of
from spoc_lib.sweep.slo import LEVEL, evaluate
from spoc_lib.workload.script import NEVER_S, AroundScript, ConversationScript, Turn, UserScript


@dataclass(frozen=True)
class Staircase(AroundScript):
    """`script`'s users, of whom number k joins at `joins_s[k]` seconds and sends `turns[k]` turns (absent: no end)."""

    script: ConversationScript
    joins_s: Sequence[float]
    turns: Mapping[int, int] = field(default_factory=dict)

    def user(self, number: int) -> UserScript:
        return _Guest(self.script.user(number), self.joins_s[number], self.turns.get(number))


class _Guest:
    """A user who comes late and leaves early."""

    def __init__(self, user: UserScript, joins_s: float, turns: int | None) -> None:
        self._user, self._joins_s, self._turns = user, joins_s, turns
        self.persona, self.user = user.persona, user.user
        self._sent = 0

    def next(self, history_tokens: int) -> Turn:
        turn = self._user.next(history_tokens)
        self._sent += 1
        if self._turns is not None and self._sent > self._turns:
            return replace(turn, think_time_s=NEVER_S)
        return replace(turn, think_time_s=turn.think_time_s + self._joins_s) if self._sent == 1 else turn


def up_and_down(engine: Any, script: ConversationScript, levels: Sequence[int], slos: Sequence[Slo], *,
                settle_s: float, measured_s: float, seed: int = 0, level: float = LEVEL) -> pd.DataFrame:
    """Each SLO at each of `levels` users on the way up, and again on the way down from the last, on one twin.

    levels: ascending; a step lasts `settle_s` and then `measured_s`, simulated seconds. One row an SLO and step, in the
    order of time: leg (up, top, down), the step's window (start_s, end_s), and SLO_VERDICTS' columns. InputError for
    fewer than two levels or such as do not ascend.
    """
    if len(levels) < 2 or sorted(set(levels)) != list(levels):
        raise InputError("bad-levels", f"up and down needs two numbers of users or more, ascending; given: "
                         f"{', '.join(map(str, levels))}")
    steps = [*levels, *reversed(levels[:-1])]
    step_s, most = settle_s + measured_s, levels[-1]
    joins = np.zeros(most)
    for index, (before, now) in enumerate(zip(levels, levels[1:], strict=False), start=1):
        joins[before:now] = index * step_s
    stairs, run = Staircase(script, joins.tolist()), None
    for index in range(len(levels), len(steps) + 1):
        run = virtual.play(stairs, most, engine=engine, duration_s=index * step_s, seed=seed)
        if index < len(steps):
            sent = run.requests["user"].value_counts()
            leaving = range(steps[index], steps[index - 1])
            stairs = replace(stairs, turns={**stairs.turns, **{user: int(sent.get(user, 0)) for user in leaving}})
    assert run is not None  # two levels make three steps
    rows = []
    for index, users in enumerate(steps):
        window = (index * step_s + settle_s, (index + 1) * step_s)
        samples = Measured(run.requests, run.chunks, window, run.simulated_s)
        leg = "up" if index < len(levels) - 1 else "top" if index == len(levels) - 1 else "down"
        rows += [dict(leg=leg, start_s=window[0], end_s=window[1], **row) for row in evaluate(
            samples, slos, rung=index, users=users, driver="virtual", level=level)]
    return pd.DataFrame(rows)


def differences(table: pd.DataFrame) -> pd.DataFrame:
    """What an overload left: one row an SLO and number of users that was met with before and after more of them.

    table: rows of SLO_VERDICTS in the order in which they were run (`rung`), of one and the same server. Columns users,
    top_users (the most in between), slo; before, before_low, before_high, after, after_low, after_high: the percentile
    in seconds, of a share of requests the share beyond (unit: s | s/token | %); moved: worse | better where the two
    intervals do not meet, else ''. The first and the last run of a number of users stand for before and after; where
    nobody sent anything after the overload, because all still wait, it is infinite.
    """
    rows: list[dict[str, Any]] = []
    for _, group in table.groupby(["persona", "metric", "percentile", "limit_s"], sort=False):
        ordered = group.sort_values("rung", kind="stable").to_dict("records")
        for users in dict.fromkeys(one["users"] for one in ordered):
            own = [index for index, one in enumerate(ordered) if one["users"] == users]
            if not ordered[own[0]]["samples"]:
                continue
            between = max((one["users"] for one in ordered[own[0]:own[-1]] if one["verdict"] == "missed"), default=0)
            if between > users:
                rows.append(_difference(ordered[own[0]], ordered[own[-1]], between))
    return pd.DataFrame(rows)


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], top: int) -> dict[str, Any]:
    names = ("beyond_ratio", "beyond_low_ratio", "beyond_high_ratio") if before["metric"] in SHARES else \
        ("value_s", "low_s", "high_s")
    first, last = ([float(one[name]) for name in names] for one in (before, after))
    if not after["samples"]:  # who still waits sends nothing
        last = [math.inf] * 3
    unit = METRICS[before["metric"]].unit or "%"
    return dict(
        users=before["users"], top_users=top, slo=name_of(before).split(" <= ")[0].split(" >= ")[0], unit=unit,
        before=first[0], before_low=first[1], before_high=first[2], after=last[0], after_low=last[1],
        after_high=last[2], moved="worse" if last[1] > first[2] else "better" if last[2] < first[1] else "")
