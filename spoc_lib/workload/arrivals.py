"""Open arrivals: for those who plan by request rate instead of by users.

New conversations arrive by themselves, whatever the server does; each is one user that plays one conversation and then
falls silent. The drivers need nothing new: an arrival is the think time before a user's first turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import special

from spoc_lib.core.errors import InputError
from spoc_lib.workload.build import Script
from spoc_lib.workload.identity import Uniforms
from spoc_lib.workload.script import NEVER_S, AroundScript, ConversationScript, Segment, Turn, UserScript
from spoc_lib.workload.traces.imported import ImportedScript

#: More conversations than any run plays; beyond it a rate or a duration was mistyped.
MOST_ARRIVALS = 1e7


def kind_of(cv: float) -> Literal["poisson", "gamma"]:
    """The kind of arrivals that a coefficient of variation of gaps means."""
    return "poisson" if cv == 1 else "gamma"


def arrival_times(rate_per_s: float, duration_s: float, seed: int, *, kind: Literal["poisson", "gamma"] = "poisson",
                  cv: float = 1.0) -> np.ndarray:
    """Times of arrivals in [0, duration_s), ascending, in seconds.

    poisson: independent arrivals; gamma: gaps of coefficient of variation `cv` (above 1: bursts, below 1: regular).
    """
    if not rate_per_s > 0 or not duration_s > 0:
        raise InputError("bad-arrivals", f"rate_per_s ({rate_per_s:g}) and duration_s ({duration_s:g}) must be above 0")
    if rate_per_s * duration_s > MOST_ARRIVALS:
        raise InputError("bad-arrivals", f"rate_per_s times duration_s is {rate_per_s * duration_s:g} arrivals: at "
                         f"most {MOST_ARRIVALS:g} can be played")
    if kind not in ("poisson", "gamma"):
        raise InputError("bad-arrivals", f"kind of arrivals must be 'poisson' or 'gamma', not '{kind}'")
    if not cv > 0:
        raise InputError("bad-arrivals", f"cv must be above 0, not {cv:g}")
    shape = 1.0 if kind == "poisson" else 1 / cv**2
    uniforms = Uniforms(seed, 81)
    times: list[np.ndarray] = []
    now = 0.0
    while now < duration_s:
        u = uniforms.draw(max(64, int(rate_per_s * duration_s)))
        gaps = special.gammaincinv(shape, u) / (rate_per_s * shape)
        batch = now + np.cumsum(gaps)
        times.append(batch)
        now = float(batch[-1])
    every = np.concatenate(times)
    return np.round(every[every < duration_s], 6)


@dataclass(frozen=True)
class OpenScript(AroundScript):
    """A `ConversationScript` of arrivals: user n comes at `times_s[n]`, plays one conversation of `script` and ends.

    Ask for `len(times_s)` users; more of them are never due.
    """

    script: ConversationScript
    times_s: tuple[float, ...]

    def user(self, number: int) -> UserScript:
        at = self.times_s[number] if number < len(self.times_s) else NEVER_S
        return _Arrival(self.script.user(number), at)

    def describe(self) -> dict[str, Any]:
        """The script's own description, and the arrivals."""
        return {**getattr(self.script, "describe", dict)(), "arrivals": len(self.times_s)}


def open_script(script: Script | ImportedScript, rate_per_s: float, duration_s: float, *,
                kind: Literal["poisson", "gamma"] = "poisson", cv: float = 1.0) -> OpenScript:
    """Conversations of `script` (started cold) that arrive at a rate of `rate_per_s` conversations a second."""
    times = arrival_times(rate_per_s, duration_s, script.seed, kind=kind, cv=cv)
    return OpenScript(script.from_the_beginning(), tuple(times.tolist()))


def replayed(script: Script | ImportedScript) -> ImportedScript:
    """Recorded sessions at their recorded times, each once, from its beginning."""
    if not isinstance(script, ImportedScript):
        raise InputError("no-timestamps", "personas have no recorded times: name a trace, 'traces:PATH'")
    return ImportedScript(script.sessions, script.seed, script.salt, script.gap_cap_s, script.context_limit,
                          timing="timestamps")


class _Arrival:
    """One user of an `OpenScript`."""

    def __init__(self, user: UserScript, at_s: float) -> None:
        self.persona, self.user = user.persona, user.user
        self._inner, self._at_s = user, at_s
        self._conversation: int | None = None

    def next(self, history_tokens: int) -> Turn:
        turn = self._inner.next(history_tokens)
        if self._conversation is None:
            self._conversation = turn.conversation
            return replace(turn, think_time_s=self._at_s)
        if turn.conversation != self._conversation:
            return replace(turn, think_time_s=NEVER_S, append=(Segment(turn.append[-1].stream, 16, "session"),),
                           starts=True, history=(), prompt_tokens=22, output_tokens=1)
        return turn
