"""Do the two clocks agree? One rung over real HTTP beside its twin on the virtual clock: same script, same
users."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from spoc_lib.sweep.drivers import HOST_BUSY

#: (column of RUNGS, tolerated ratio either way, difference that is always tolerated, unit). The absolute
#: ones are what a shared machine's timers and two HTTP stacks cost, whatever the engine does.
GATES = (("ttft_p50_s", 1.20, 0.030, "s"), ("ttft_p95_s", 1.35, 0.060, "s"), ("itl_p50_s", 1.15, 0.0015, "s"),
         ("itl_p95_s", 1.35, 0.005, "s"), ("output_tokens_per_s", 1.10, 0.0, "tokens/s"))


def compare(http: Mapping, twin: Mapping) -> pd.DataFrame:
    """One row a figure: figure, unit, http, twin, ratio (http / twin), tolerance, allowance, passed.

    http, twin: RUNGS rows of the same script and users. `passed`: the ratio is within `tolerance` either
    way, or the difference within `allowance`.
    """
    rows = []
    for name, tolerance, allowance, unit in GATES:
        real, virtual = float(http[name]), float(twin[name])
        ratio = real / virtual if virtual else math.nan
        passed = abs(real - virtual) <= allowance or (ratio > 0 and max(ratio, 1 / ratio) <= tolerance)
        rows.append(dict(figure=name, unit=unit, http=real, twin=virtual, ratio=ratio, tolerance=tolerance,
                         allowance=allowance, passed=bool(passed)))
    return pd.DataFrame(rows)


def sentence(table: pd.DataFrame, users: int, busy_ratio: float | None = None, invalid: str | None = None) -> str:
    """The finding in words. busy_ratio: how busy this host's processors were; invalid: why the HTTP rung says nothing
    (see `comparable`)."""
    worst = table.loc[table.apply(_strain, axis=1).idxmax()]
    agrees = "agree within their tolerances" if table["passed"].all() else \
        "part in " + ", ".join(table.loc[~table["passed"], "figure"])
    text = (f"At {users} users, real HTTP and the virtual clock {agrees} (nearest to its tolerance: {worst['figure']}, "
            f"{worst['http']:.4g} against {worst['twin']:.4g} {worst['unit']})")
    if invalid:
        text += f"; but the HTTP rung is invalid ({invalid}), so the comparison decides nothing"
    elif not comparable(busy_ratio):
        text += (f"; this host's processors were {busy_ratio:.0%} busy meanwhile, so late timers are in the HTTP "
                 f"figures and the comparison decides nothing")
    return text + "."


def comparable(busy_ratio: float | None, invalid: str | None = None) -> bool:
    """Whether the HTTP rung is valid and the host had processor time left for punctual timers, without which HTTP
    figures are the host's."""
    return not invalid and (busy_ratio is None or busy_ratio <= HOST_BUSY)


def _strain(row: pd.Series) -> float:
    """How much of its tolerance (or of its allowance, whichever is kinder) a figure uses up."""
    by_ratio = abs(math.log(row["ratio"])) / math.log(row["tolerance"]) if row["ratio"] > 0 else math.inf
    by_difference = abs(row["http"] - row["twin"]) / row["allowance"] if row["allowance"] else math.inf
    return min(by_ratio, by_difference)
