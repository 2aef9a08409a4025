"""What one trial measures, whoever measures it: the twin's virtual clock, or real load on a real server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from spoc_lib.core.errors import SpocError
from spoc_lib.metrics import EVERYBODY, Measured
from spoc_lib.search import pareto
from spoc_lib.search.space import Flags
from spoc_lib.sweep.rung import pressure

#: Above this share of failed requests p95 is a failure itself: the trial has collapsed.
ERROR_SHARE_CAP = 0.05
#: A window in which fewer requests than this share of the users completed says nothing about a percentile.
COMPLETIONS_PER_USER = 0.25
MIN_COMPLETIONS = 5
#: A bound below the limit of an SLO that is missed counts as this many limits.
BEYOND = 1.01


class TrialFailure(SpocError):
    """A trial without a measurement. `failure_class`: collapsed | twin-refused | a class of `servers` | invalid."""

    def __init__(self, failure_class: str, message: str) -> None:
        super().__init__(failure_class, message)

    @property
    def failure_class(self) -> str:
        """The kind of failure, for tables."""
        return self.code


@dataclass(frozen=True)
class Measurement:
    """What a trial measured, its three objectives among it, and its constraints.

    goodput_per_s: requests a second that met every SLO on latency (None where nobody counted them);
    objectives: names of `values`; constraints: SLO name -> value / limit - 1, at most 0 where the SLO is met;
    rung: the row of RUNGS behind it; slo: rows of SLO_VERDICTS; duration_s: wall seconds that it cost;
    note: what a reader must know about the values (such as that one is a lower bound), else ''.
    """

    output_tokens_per_s: float
    ttft_p95_s: float
    itl_p95_s: float
    constraints: dict[str, float]
    driver: str
    duration_s: float
    rung: dict[str, Any] = field(default_factory=dict)
    slo: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""
    goodput_per_s: float | None = None
    objectives: pareto.Objectives = pareto.OBJECTIVES

    @property
    def values(self) -> pareto.Point:
        """The three objectives, in their order; NaN where the first is unknown."""
        first = self.figures[self.objectives[0]]
        return math.nan if first is None else first, self.ttft_p95_s, self.itl_p95_s

    @property
    def figures(self) -> dict[str, float | None]:
        """All that a table shows of it, by column."""
        return {pareto.THROUGHPUT: self.output_tokens_per_s, pareto.GOODPUT: self.goodput_per_s,
                "ttft_p95_s": self.ttft_p95_s, "itl_p95_s": self.itl_p95_s}

    @property
    def violation(self) -> float:
        """Sum of the missed shares of the SLO limits; 0 where all are met."""
        return sum(max(0.0, value) for value in self.constraints.values())


class Evaluator(Protocol):
    """Measures flags. `version` names the engine (part of the cache's key); `driver` is virtual or locust."""

    driver: str
    version: str
    users: int

    def evaluate(self, flags: Flags, folder: Path, repeat: int = 0) -> Measurement:
        """Measure `flags` at `users`, leaving evidence in `folder`; TrialFailure when there is no measurement."""
        ...


def measurement(row: Mapping[str, Any], slo: Sequence[Mapping[str, Any]], *, users: int, driver: str,
                duration_s: float, samples: Measured | None = None, goodput_per_s: float | None = None,
                objectives: pareto.Objectives = pareto.OBJECTIVES) -> Measurement:
    """A rung's summary as a measurement; TrialFailure `collapsed` when it is none.

    samples: where given, a percentile that is infinite because requests were still waiting when the rung was cut
    off becomes the time that they had waited: a lower bound, beyond the limit in any case. An overloaded trial is
    then infeasible by a number that the search can follow, instead of a failure among failures.
    """
    completed, failed = int(row["completed"]), int(row["failed"])
    if row["verdict"] == "invalid":
        raise TrialFailure("invalid-rung", f"the rung says nothing: {row['reason']}")
    if failed > ERROR_SHARE_CAP * max(1, completed + failed):
        raise TrialFailure("collapsed", f"{failed} of {completed + failed} requests failed "
                           f"(cap {ERROR_SHARE_CAP:.0%})")
    needed = max(MIN_COMPLETIONS, math.ceil(COMPLETIONS_PER_USER * users))
    if completed < needed:
        raise TrialFailure("collapsed", f"only {completed} requests completed at {users} users in the window "
                           f"(at least {needed} wanted)")
    note = ""
    if samples is not None:
        row, slo, note = _bounded(row, slo, samples)
    throughput, ttft, itl = (math.nan if row[name] is None else float(row[name]) for name in pareto.OBJECTIVES)
    if not all(map(math.isfinite, (throughput, ttft, itl))):
        raise TrialFailure("collapsed", "a 95th percentile is infinite or missing: too many requests failed or "
                           "streamed no token in the window")
    return Measurement(throughput, ttft, itl, constraints=constraints(slo), driver=driver, duration_s=duration_s,
                       rung=dict(row), slo=[dict(s) for s in slo], note=note, goodput_per_s=goodput_per_s,
                       objectives=objectives)


def _bounded(row: Mapping[str, Any], slo: Sequence[Mapping[str, Any]], samples: Measured
             ) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    def waited(metric: str, q: float, persona: str = EVERYBODY) -> float:
        return samples.samples(metric, persona).at_least.percentile(q)

    bounds = {f"{name}_p95_s": waited(name, 95) for name in ("ttft", "itl") if row[f"{name}_p95_s"] == math.inf}
    verdicts = [{**one, "value_s": max(waited(one["metric"], one["percentile"], one["persona"]),
                                       BEYOND * one["limit_s"])} if one["value_s"] == math.inf else dict(one)
                for one in slo]
    note = "; ".join(f"p95 {name.split('_')[0].upper()} is at least {value:.2f} s: requests were still waiting when "
                     f"the rung ended" for name, value in bounds.items())
    return {**row, **bounds}, verdicts, note


def constraints(slo: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """SLO name -> value / limit - 1. An SLO whose value is infinite counts as missed a hundred times over."""
    found: dict[str, float] = {}
    for verdict in slo:
        if not verdict["samples"]:
            continue  # no request of that persona in the window: the SLO is neither met nor missed
        name = f"{verdict['persona']} {verdict['metric']} p{verdict['percentile']:g}"
        found[name] = min(pressure(verdict) - 1.0, 100.0)
    return found
