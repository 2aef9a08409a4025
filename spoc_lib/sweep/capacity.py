"""The answer of a sweep: max users, its interval, what binds, what saturated, or *unresolved*."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json
from spoc_lib.core.schemas import RUNGS, SLO_VERDICTS
from spoc_lib.core.tables import read_table
from spoc_lib.sweep.fit import Crossing, cross, margins
from spoc_lib.sweep.rung import name_of, pressure

#: An interval wider than this, relative to the capacity, is no answer yet.
WIDEST = 0.5


def decide(crossing: Crossing, rungs: pd.DataFrame) -> tuple[str, str, str]:
    """(resolved | unresolved, reason, what to run next) for a crossing over the valid rungs."""
    valid = rungs[rungs["verdict"] != "invalid"]
    if valid.empty:
        reasons = rungs["reason"].dropna().unique()
        return "unresolved", "no rung is valid" + (f": {reasons[0]}" if len(reasons) else ""), \
            "fix what made the rungs invalid and sweep again"
    least, most = int(valid["users"].min()), int(valid["users"].max())
    if math.isinf(crossing.high):
        return "unresolved", f"the SLA cannot be shown to be missed up to {most} users, the most that were run", \
            f"add rungs above {most} users to the ladder, for example {2 * most}"
    if crossing.low == 0 and least > 1:
        return "unresolved", f"the SLA cannot be shown to be met at {least} users, the fewest that were run", \
            f"add rungs below {least} users to the ladder, or loosen the SLO"
    if crossing.low == 0:
        return "resolved", "the SLA is missed by a single user already", ""
    if crossing.relative_width > WIDEST:
        return "unresolved", (f"the interval of {crossing.low:.0f} to {crossing.high:.0f} users is "
                              f"{crossing.relative_width:.0%} of the capacity wide"), \
            (f"more or longer rungs between {crossing.low:.0f} and {crossing.high:.0f} users: raise 'probes' or "
             f"'rung_s' in the profile")
    return "resolved", (f"met at {crossing.bracket[0]:.0f} users, missed at {crossing.bracket[1]:.0f}; the interval is "
                        f"{crossing.relative_width:.0%} of the capacity wide"), ""


def capacity(crossing: Crossing, rungs: pd.DataFrame, slo: pd.DataFrame, *, cluster: Mapping[str, Any],
             flags: Mapping[str, Any], on_ladder: set[int], simulated: bool, passport: Mapping[str, Any] | None,
             saturated: Any, lessons: Sequence[Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The dictionary that becomes capacity.json.

    max_users (whole users, null when unbounded), interval [low, high] and level; verdict, reason, next;
    binding {persona, metric, percentile, limit_s, value_s, users, name}: the SLO that crosses first and its
    value at the rung nearest to the limit; saturated {resource, evidence, figures}; rungs: a verdict each.

    The argument `rungs` is RUNGS of all rungs, of which those in `on_ladder` count; `slo` is SLO_VERDICTS of the valid
    ones among these.
    """
    swept = rungs[rungs["rung"].isin(on_ladder)]
    verdict, reason, following = decide(crossing, swept)
    users = crossing.users if math.isfinite(crossing.users) else crossing.low
    known = math.isfinite(users) and not swept[swept["verdict"] != "invalid"].empty
    return {
        "max_users": int(users + 1e-9) if known else None,
        "interval": interval(crossing),
        "level": crossing.level, "verdict": verdict, "reason": reason, "next": following,
        "binding": binding_slo(crossing, slo), "by_slo": crossing.by_slo, "saturated": saturated,
        "lessons": list(lessons),
        "rungs": [_brief(row) | {"on_ladder": row["rung"] in on_ladder}
                  for row in rungs.sort_values("rung").to_dict("records")],
        "simulated": simulated, "passport": passport, "flags": dict(flags), **cluster, **more,
    }


def interval(crossing: Crossing) -> list[int | None]:
    """[low, high] in whole users; high null where no rung shows the SLA missed."""
    return [int(crossing.low), None if math.isinf(crossing.high) else math.ceil(crossing.high)]


def binding_slo(crossing: Crossing, slo: pd.DataFrame) -> dict[str, Any] | None:
    """The SLO that crosses first, with its value at the valid rung nearest to the capacity."""
    if not len(slo):
        return None
    named = slo.assign(name=[name_of(row) for row in slo.to_dict("records")],
                       pressure=[pressure(row) for row in slo.to_dict("records")])
    name = crossing.binding
    if name is None:  # nothing crosses: the one that comes nearest to its limit
        name = named.sort_values("pressure", kind="stable")["name"].iloc[-1]
    edge = crossing.users if math.isfinite(crossing.users) else named["users"].max()
    rows = named[named["name"] == name]
    row = rows.loc[(rows["users"] - edge).abs().idxmin()]
    return {key: row[key] for key in ("persona", "metric", "percentile", "limit_s", "value_s", "low_s", "high_s",
                                      "beyond_ratio", "users", "name")}


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("rung", "users", "driver", "verdict", "binding", "reason", "ttft_p95_s",
                                      "itl_p95_s", "output_tokens_per_s")}


def sentence(answer: Mapping[str, Any]) -> str:
    """The answer in words."""
    if answer["max_users"] is None:
        return f"{answer['cluster']}: unresolved: {answer['reason']}."
    low, high = answer["interval"]
    bound = f"{low} to {'?' if high is None else high}"
    text = f"{answer['cluster']} holds {answer['max_users']} users ({answer['level']:.0%} interval: {bound})"
    if answer["binding"]:
        text += f"; {answer['binding']['name']} binds"
    if answer["saturated"]:
        resource = answer["saturated"]["resource"] if isinstance(answer["saturated"], Mapping) else \
            answer["saturated"].resource
        if resource != "unknown":
            text += f", {resource.replace('_', ' ')} is used up"
    return text + ("." if answer["verdict"] == "resolved" else f"; unresolved: {answer['reason']}.")


def read_capacity(folder: Path, level: float | None = None) -> dict[str, Any]:
    """The answer of the sweep in `folder`; at another `level` its interval and verdict are worked out anew from
    the sweep's rungs. InputError when the folder holds no finished sweep."""
    if not (folder / "capacity.json").is_file():
        raise InputError("no-sweep", f"{folder} holds no finished sweep (no capacity.json): run `spoc sweep run` first")
    answer = read_json(folder / "capacity.json", "capacity answer")
    if level is None or level == answer["level"]:
        return answer
    if not 0.5 <= level < 1:
        raise InputError("bad-level", f"--level: {level:g} must be at least 0.5 and below 1, for example 0.9")
    rungs = read_table(folder / "rungs.parquet", RUNGS)
    swept = rungs[rungs["rung"].isin([row["rung"] for row in answer["rungs"] if row["on_ladder"]])]
    slo = read_table(folder / "slo_verdicts.parquet", SLO_VERDICTS)
    slo = slo[slo["rung"].isin(swept.loc[swept["verdict"] != "invalid", "rung"])]
    crossing = cross(margins(slo, answer["level"]), level, shared_noise=not answer["fresh_users"])
    verdict, reason, following = decide(crossing, swept)
    return {**answer, "interval": interval(crossing), "level": level, "verdict": verdict, "reason": reason,
            "next": following}
