"""Runs against a reference: is the difference in users real, what else differs, and which SLO tells why.

The test is a parametric bootstrap. Every rung's margin to its SLOs is drawn anew from its interval, for both runs, and
the monotone curves are fitted again; the ratio of the two capacities gets its interval from these draws
(`sweep.compare.ratio_interval`), and a difference is called real where it excludes 1. A latency at equally many users
is told apart where the two rungs' own intervals (block bootstrap over time) do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from spoc_lib.core.errors import InputError
from spoc_lib.report import likeness
from spoc_lib.report.answer import Answer
from spoc_lib.report.verdict import metric_value, who
from spoc_lib.sweep.compare import Swept, ratio_interval

#: Two rungs stand for "equally many users" up to this relative difference.
NEAR = 0.1
TEST = ("parametric bootstrap of the capacities' ratio over all rungs of both sweeps, 2000 draws; real where its "
        "interval excludes 1; latencies at equally many users by their rungs' block-bootstrap intervals, real where "
        "these part")


@dataclass(frozen=True)
class Cause:
    """One SLO at (nearly) equally many users of both runs; values and intervals in the metric's unit (s or a share).

    apart: 1 where the run is worse beyond both intervals, -1 where better, 0 where they overlap."""

    name: str
    persona: str
    metric: str
    percentile: float
    users: int
    reference_users: int
    value: float
    low: float
    high: float
    reference_value: float
    reference_low: float
    reference_high: float
    apart: int


@dataclass(frozen=True)
class Compared:
    """A run against the reference.

    verdict: fewer | more | no difference shown | open (a capacity is unresolved) | not comparable;
    ratio, low, high: users over the reference's, at `level`; fewer_ratio: share of the draws in which the run surely
    holds fewer users; apart: why the two may not be compared; changed: what differs and is being compared;
    notes: what differs besides, and may move the answer.
    """

    run: str
    reference: str
    subject: str
    users: float | None
    reference_users: float | None
    ratio: float | None
    low: float | None
    high: float | None
    level: float
    fewer_ratio: float | None
    verdict: str
    apart: list[str]
    changed: list[str]
    notes: list[str]
    causes: list[Cause]

    @property
    def regression(self) -> bool:
        """Whether the run holds fewer users than the reference, beyond doubt."""
        return self.verdict == "fewer"

    @property
    def sentence(self) -> str:
        """One sentence that names the change, its size, its certainty and what shows it."""
        if self.verdict == "not comparable":
            return f"{self.subject}: not comparable: {'; '.join(self.apart)}."
        if self.verdict == "open" or self.ratio is None:
            return f"{self.subject}: open, for a capacity is unresolved: sweep on before comparing."
        counts = f"{self.reference_users:g} to {self.users:g} users"
        bounds = f"ratio {self.ratio:.2f}, {_bound(self.low)} to {_bound(self.high)} at {self.level:.0%}"
        if self.verdict == "no difference shown":
            return f"{self.subject}: no difference shown ({counts}; {bounds})."
        return f"{self.subject}: {self.ratio - 1:+.0%} users ({counts}; {bounds}){self._because()}."

    def __repr__(self) -> str:
        return self.sentence

    def _because(self) -> str:
        sign = 1 if self.verdict == "fewer" else -1
        told = next((cause for cause in self.causes if cause.apart == sign), None)
        if told is None:
            return "; no SLO's interval parts at equally many users, the rungs together do"
        return f", because {cause_text(told)}"


def cause_text(cause: Cause) -> str:
    """`ITL p95 of all personas at 120 users is 58 ms against 43 ms`."""
    at = f"{cause.users} users" if cause.users == cause.reference_users else \
        f"{cause.users} users ({cause.reference_users} in the reference)"
    share = "" if cause.metric in ("error_rate", "goodput") else f" p{cause.percentile:g}"
    return (f"{cause.metric.upper().replace('_', ' ')}{share} of {who(cause.persona)} at {at} is "
            f"{metric_value(cause.metric, cause.value)} against {metric_value(cause.metric, cause.reference_value)}")


def compare_runs(answers: Sequence[Answer]) -> list[Compared]:
    """Every other run against the first. InputError with fewer than two."""
    if len(answers) < 2:
        raise InputError("one-run", "a comparison needs at least two runs: name the reference first, then the others")
    return [against(answer, answers[0]) for answer in answers[1:]]


def against(answer: Answer, reference: Answer) -> Compared:
    """`answer` against `reference`, both with a finished sweep."""
    mine, theirs = Swept.read(answer.folder / "sweep"), Swept.read(reference.folder / "sweep")
    level = min(answer.level, reference.level)
    apart = likeness.hindrances(answer, reference)
    ratio = low = high = fewer = None
    if answer.users and reference.users:
        ratio = answer.users / reference.users
        low, high, fewer = ratio_interval(mine.margins, theirs.margins, level, (mine.shared_noise, theirs.shared_noise))
        low, high = min(low, ratio), max(high, ratio)
    if apart:
        verdict = "not comparable"
    elif not (answer.resolved and reference.resolved) or ratio is None:
        verdict = "open"
    else:
        verdict = "fewer" if high is not None and high < 1 else "more" if low is not None and low > 1 else \
            "no difference shown"
    changed, notes = likeness.differences(answer, reference)
    return Compared(
        answer.run, reference.run, likeness.subject(answer, reference), answer.users, reference.users, ratio, low, high,
        level, fewer, verdict, apart, changed, notes, causes(answer, reference))


def causes(answer: Answer, reference: Answer) -> list[Cause]:
    """Each SLO of both at the pair of rungs with (nearly) equally many users that lies nearest to the two limits; the
    SLO that binds the smaller run first."""
    pair = _pair(answer, reference)
    if pair is None:
        return []
    found = []
    theirs = _values(reference, pair[1])
    for key, (value, low, high) in _values(answer, pair[0]).items():
        if key in theirs:
            other, other_low, other_high = theirs[key]
            worse = 1 if low > other_high else -1 if high < other_low else 0
            if key[1] == "goodput":
                worse = -worse
            found.append(Cause(f"{key[0]} {key[1]} p{key[2]:g}", *key, pair[0], pair[1], value, low, high, other,
                               other_low, other_high, worse))
    smaller = answer if (answer.users or 0) <= (reference.users or 0) else reference
    first = (smaller.binding.get("persona"), smaller.binding.get("metric"))
    return sorted(found, key=lambda cause: ((cause.persona, cause.metric) != first, cause.name))


def _pair(answer: Answer, reference: Answer) -> tuple[int, int] | None:
    limits = [one.users for one in (answer, reference) if one.users]
    if not limits:
        return None
    middle = math.exp(sum(map(math.log, limits)) / len(limits))
    pairs = [(a, b) for a in answer.climbed["users"].unique() for b in reference.climbed["users"].unique()
             if abs(a / b - 1) <= NEAR]
    if not pairs:
        return None
    a, b = min(pairs, key=lambda p: (abs(math.log(math.sqrt(p[0] * p[1]) / middle)), abs(p[0] - p[1])))
    return int(a), int(b)


def _values(answer: Answer, users: int) -> dict[tuple[str, str, float], tuple[float, float, float]]:
    """(value, low, high) of each SLO at `users`: the median of the rungs there, the widest of their intervals."""
    rungs = answer.climbed.loc[answer.climbed["users"] == users, "rung"]
    rows = answer.slo[answer.slo["rung"].isin(rungs)]
    return {
        (str(persona), str(metric), float(percentile)): (
            float(part["value_s"].median()), float(part["low_s"].min()), float(part["high_s"].max()))
        for (persona, metric, percentile), part in rows.groupby(["persona", "metric", "percentile"], sort=False)
    }


def cause_table(compared: Sequence[Compared]) -> pd.DataFrame:
    """Every SLO at equally many users, both runs beside each other, with their intervals."""
    words = {1: "worse", -1: "better", 0: "not told apart"}
    return pd.DataFrame([
        {"run": one.run, "SLO": cause.name, "users": cause.users,
         "here": f"{metric_value(cause.metric, cause.value)} ({metric_value(cause.metric, cause.low)} to "
                 f"{metric_value(cause.metric, cause.high)})",
         "reference": f"{metric_value(cause.metric, cause.reference_value)} "
                      f"({metric_value(cause.metric, cause.reference_low)} to "
                      f"{metric_value(cause.metric, cause.reference_high)})",
         "difference": words[cause.apart]}
        for one in compared for cause in one.causes
    ], columns=["run", "SLO", "users", "here", "reference", "difference"])


def _bound(value: float | None) -> str:
    return "?" if value is None or not math.isfinite(value) else f"{value:.2f}"
