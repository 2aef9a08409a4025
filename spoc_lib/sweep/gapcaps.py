"""What the cap on think times does to the answer: the same sessions at several caps."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from spoc_lib.sweep.cases import Case, answers
from spoc_lib.sweep.sensitivity import GAP_CAPS_S


def capacity_by_gap_cap(case: Case, caps_s: Sequence[float] = GAP_CAPS_S) -> pd.DataFrame:
    """Most users of `case` at each cap on think times; sizes, gaps and seed are drawn once, only the cap differs.

    Columns: gap_cap_s; max_users, low, high (users: met at low, missed at high, which is null where no miss was
    found); binding (the SLO that was furthest beyond its limit at high); in_use (the cap of `case`); reason (why there
    is no answer, else null).
    """
    caps = sorted({*map(float, caps_s), float(case.gap_cap_s)})
    rows = []
    for cap, one in zip(caps, answers([case.changed(gap_cap_s=cap) for cap in caps]), strict=True):
        found = None if isinstance(one, str) else one
        rows.append({"gap_cap_s": cap, "max_users": found and found.users, "low": found and found.users,
                     "high": found and found.missed, "binding": found and found.binding,
                     "in_use": cap == case.gap_cap_s, "reason": one if isinstance(one, str) else None})
    return pd.DataFrame(rows).astype({"max_users": "Int64", "low": "Int64", "high": "Int64"})
