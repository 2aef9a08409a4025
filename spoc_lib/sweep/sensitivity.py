"""How the answer moves with what nobody measures and somebody must choose: start, gap cap, percentile, rung length."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from spoc_lib.sweep.cases import Case, answers
from spoc_lib.sweep.quick import QuickCapacity

GAP_CAPS_S = (30.0, 60.0, 120.0, 600.0)
STARTS = ("stationary", "cold")
PERCENTILES = (95.0, 99.0)
RUNGS_S = (150.0, 300.0, 900.0)


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


def at_percentile(case: Case, percentile: float):
    """The case's cluster with every SLO asked at another percentile, the limits as they are."""
    slos = [slo.model_copy(update={"percentile": percentile}) for slo in case.cluster.slos]
    return case.cluster.model_copy(update={"slos": slos})


def sensitivity(case: Case) -> pd.DataFrame:
    """`table` of the capacity under each of `settings`."""
    asked = settings(case)
    return table(asked, answers([one for _, _, one in asked]))


def table(asked: Sequence[tuple[str, str, Case]], found: Sequence[QuickCapacity | str]) -> pd.DataFrame:
    """Columns cluster, asked, value, users (null where there is no answer), missed, change (relative to the first row),
    binding, outside (sentences on the measured range, joined), reason (why there is no answer)."""
    base = found[0].users if not isinstance(found[0], str) else 0
    rows = []
    for (name, value, case), answer in zip(asked, found, strict=True):
        known = not isinstance(answer, str)
        rows.append({
            "cluster": case.cluster.name, "asked": name, "value": value,
            "users": answer.users if known else None, "missed": answer.missed if known else None,
            "change": answer.users / base - 1 if known and base else None,
            "binding": answer.binding if known else None,
            "outside": "; ".join(answer.passport["outside"]) if known else None,
            "reason": None if known else answer,
        })
    return pd.DataFrame(rows).astype({"users": "Int64", "missed": "Int64", "change": float})
