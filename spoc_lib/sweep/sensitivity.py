"""How the answer moves with what nobody measures and somebody must choose: start, gap cap, percentile, rung length."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd

from spoc_lib.config import SHARES, Cluster
from spoc_lib.sweep.cases import Case, answers
from spoc_lib.sweep.quick import QuickCapacity

GAP_CAPS_S = (30.0, 60.0, 120.0, 600.0)
STARTS = ("stationary", "cold")
PERCENTILES = (95.0, 99.0)
RUNGS_S = (150.0, 300.0, 900.0)
ITL_LIMITS_S = (0.03, 0.05, 0.1)


def settings(case: Case) -> list[tuple[str, str, Case]]:
    """(parameter, value, case): the case itself first, then one parameter changed at a time."""
    found = [("as asked", f"{case.start} start, gap cap {case.gap_cap_s:g} s, "
              f"{'/'.join(f'p{p:g}' for p in sorted({slo.percentile for slo in case.cluster.slos}))}, "
              f"{case.measured_s:g} s", case)]
    found += [("start", start, case.changed(start=start)) for start in STARTS if start != case.start]
    found += [("gap cap", f"{cap:g} s", case.changed(gap_cap_s=cap)) for cap in GAP_CAPS_S if cap != case.gap_cap_s]
    found += [("percentile", f"p{percentile:g}", case.changed(cluster=at_percentile(case, percentile)))
              for percentile in PERCENTILES if any(slo.percentile != percentile for slo in case.cluster.slos)]
    found += [("rung length", f"{length:g} s", case.changed(measured_s=length)) for length in RUNGS_S
              if length != case.measured_s]
    return found


def at_percentile(case: Case, percentile: float) -> Cluster:
    """The case's cluster with every SLO on latency asked at another percentile, the limits as they are."""
    slos = [slo if slo.metric in SHARES else slo.model_copy(update={"percentile": percentile})
            for slo in case.cluster.slos]
    return case.cluster.model_copy(update={"slos": slos})


def sensitivity(case: Case) -> pd.DataFrame:
    """`table` of the capacity under each of `settings`."""
    asked = settings(case)
    return table(asked, answers([one for _, _, one in asked]))


def grid(case: Case) -> pd.DataFrame:
    """Capacity under every start, percentile and limit on ITL together: start, percentile, itl_limit_s, users, missed.

    One parameter at a time shows no interplay; the limits of other metrics stay.
    """
    keys = list(itertools.product(STARTS, PERCENTILES, ITL_LIMITS_S))
    found = answers([case.changed(start=start, cluster=_at_limit(at_percentile(case, percentile), limit_s))
                     for start, percentile, limit_s in keys])
    rows = [dict(start=start, percentile=percentile, itl_limit_s=limit_s,
                 users=None if isinstance(one, str) else one.users, missed=None if isinstance(one, str) else one.missed)
            for (start, percentile, limit_s), one in zip(keys, found, strict=True)]
    return pd.DataFrame(rows).astype({"users": "Int64", "missed": "Int64"})


def _at_limit(cluster: Cluster, limit_s: float) -> Cluster:
    slos = [slo.model_copy(update={"limit_s": limit_s}) if slo.metric == "itl" else slo for slo in cluster.slos]
    return cluster.model_copy(update={"slos": slos})


def table(asked: Sequence[tuple[str, str, Case]], found: Sequence[QuickCapacity | str]) -> pd.DataFrame:
    """Columns cluster, asked, value, users (null where there is no answer), missed, change (relative to the first row),
    binding, outside (sentences on the measured range, joined), reason (why there is no answer)."""
    base = found[0].users if not isinstance(found[0], str) else 0
    rows = []
    for (name, value, case), one in zip(asked, found, strict=True):
        answer = None if isinstance(one, str) else one
        rows.append({
            "cluster": case.cluster.name, "asked": name, "value": value,
            "users": answer and answer.users, "missed": answer and answer.missed,
            "change": answer.users / base - 1 if answer and base else None,
            "binding": answer and answer.binding,
            "outside": "; ".join(answer.passport["outside"]) if answer else None,
            "reason": one if isinstance(one, str) else None,
        })
    return pd.DataFrame(rows).astype({"users": "Int64", "missed": "Int64", "change": float})
