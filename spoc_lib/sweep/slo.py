"""SLOs against what was measured: the percentile or share with its interval; met, missed or undecided."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from spoc_lib.config import SHARES, Slo
from spoc_lib.core.errors import InputError
from spoc_lib.metrics import EVERYBODY, METRICS, SHARE_MARK, Measured, Samples
from spoc_lib.sweep.interval import Estimate, estimate, shares_beyond

LEVEL = 0.9


def check_slos(slos: Sequence[Slo], personas: Iterable[str]) -> None:
    """InputError when an SLO names a persona that the workload does not have, or a goodput has no limit to hold."""
    known = sorted(set(personas))
    for slo in slos:
        if slo.persona != EVERYBODY and slo.persona not in known:
            raise InputError("unknown-persona", f"slos: '{slo.name}' names the persona '{slo.persona}', which the "
                             f"workload does not have: use {EVERYBODY} or one of {', '.join(known)}")
        if slo.metric == "goodput" and all(one.metric in SHARES for one in slos):
            raise InputError("goodput-of-nothing", f"slos: '{slo.name}' asks for requests within their limits on "
                             f"latency, and there is none: add an SLO on ttft, itl, tpot or e2e")


def verdict(found: Estimate, allowed: float) -> str:
    """met: the share of samples beyond the limit is, with its whole interval, at most `allowed`; missed: it is above
    with its whole interval; else undecided."""
    if found.samples == 0:
        return "undecided"
    if found.beyond_high <= allowed:
        return "met"
    return "missed" if found.beyond_low > allowed else "undecided"


def slo_row(slo: Slo, samples: Samples, *, rung: int, users: int, driver: str, level: float = LEVEL,
            shown_s: float | None = None) -> dict:
    """The SLO_VERDICTS row of one SLO over its samples, with intervals at `level` (0.9: 5 % on either side).

    samples: decided at the limit (`Measured.of`); shown_s: the percentile as figures show it, without regard to a limit
    (default: that of `samples`).
    Of a share of requests (error_rate, goodput) the row holds the share beyond and the percentile that stands for what
    is allowed; it has no seconds: value_s, low_s, high_s are NaN, limit_s is inf.
    """
    if slo.metric in SHARES:
        (found,) = shares_beyond(samples, [SHARE_MARK], level)
        value = (math.nan, math.nan, math.nan)
    else:
        found = estimate(samples, slo.percentile, level, float(slo.limit_s))
        value_s = found.value_s if shown_s is None else shown_s
        value = (value_s, min(found.low_s, value_s), max(found.high_s, value_s))
    return _row(slo, float(slo.limit_s), found, value, rung=rung, users=users, driver=driver)


def _row(slo: Slo, limit_s: float, found: Estimate, value: tuple[float, float, float], **where: Any) -> dict:
    return dict(
        **where, persona=slo.persona, metric=slo.metric, percentile=slo.within_percent,
        limit_s=limit_s, value_s=value[0], low_s=value[1], high_s=value[2], samples=found.samples,
        verdict=verdict(found, slo.allowed_ratio), beyond_ratio=found.beyond, beyond_low_ratio=found.beyond_low,
        beyond_high_ratio=found.beyond_high, effective=found.effective)


def evaluate(seen: Measured, slos: Sequence[Slo], *, rung: int, users: int, driver: str, level: float = LEVEL,
             limits: Sequence[Slo] | None = None) -> list[dict]:
    """One SLO_VERDICTS row an SLO; `limits`: the SLOs whose limits a goodput asks for (default: these)."""
    return [slo_row(slo, seen.of(slo, limits or slos), rung=rung, users=users, driver=driver, level=level,
                    shown_s=None if slo.metric in SHARES else seen.samples(slo.metric, slo.persona).percentile(
                        slo.percentile)) for slo in slos]


def by_persona(seen: Measured, slos: Sequence[Slo], *, rung: int, users: int, driver: str,
               level: float = LEVEL) -> list[dict]:
    """SLO_VERDICTS rows of each SLO on everybody, asked of every persona alone: who suffers where the sum is met.

    They inform and decide nothing: an SLO on a persona that should decide stands in the cluster file.
    """
    personas = sorted(set(seen.records.persona))
    asked = [slo.model_copy(update={"persona": name}) for slo in slos if slo.persona == EVERYBODY for name in personas]
    return evaluate(seen, asked, rung=rung, users=users, driver=driver, level=level, limits=slos)


#: Limits at which a rung's SLOs are also looked at, as multiples of their own: how the answer moves with the SLA.
MULTIPLES = (0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 5.0)


def limit_curve(seen: Measured, slos: Sequence[Slo], *, rung: int, users: int, driver: str,
                level: float = LEVEL) -> list[dict]:
    """SLO_VERDICTS rows of each SLO on latency with its limit times each of `MULTIPLES` (no value_s, low_s, high_s)."""
    rows = []
    for slo in slos:
        if slo.metric in SHARES:
            continue
        limits = [multiple * slo.limit_s for multiple in MULTIPLES]
        chosen = seen.samples(slo.metric, slo.persona, max(limits))
        for limit_s, found in zip(limits, shares_beyond(chosen, limits, level), strict=True):
            rows.append(_row(slo, limit_s, found, (math.nan, math.nan, math.nan), rung=rung, users=users,
                             driver=driver))
    return rows


def goodput(seen: Measured, slos: Sequence[Slo]) -> dict:
    """Requests of the window that met every limit that applies to them: `good_ratio`, `good_per_s`, `error_ratio`."""
    return {"requests": len(seen.shortfalls(slos)), "good_ratio": METRICS["goodput"].of(seen, slos),
            "good_per_s": METRICS["goodput_per_s"].of(seen, slos), "error_ratio": METRICS["error_rate"].of(seen)}
