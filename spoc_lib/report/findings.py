"""The sentence under each figure of the verdict, computed from the same table that the figure draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from spoc_lib.config import SHARES, Slo
from spoc_lib.core.schemas import SLO_VERDICTS
from spoc_lib.core.tables import read_table
from spoc_lib.report import style
from spoc_lib.report.answer import Answer
from spoc_lib.report.comparison import Compared
from spoc_lib.report.verdict import metric_name, metric_value, who


def capacities(answers: Sequence[Answer], compared: Sequence[Compared] = ()) -> list[str]:
    """What the bars show: each capacity with its interval, and which differences are real (`compare_runs`)."""
    said = []
    for answer in answers:
        if answer.resolved and answer.interval:
            low, high = answer.interval
            said.append(f"{answer.cluster.name}: {answer.users:g} users, between {low:g} and {high:g} at "
                        f"{answer.level:.0%}.")
        else:
            said.append(f"{answer.cluster.name}: unresolved: {answer.reason}.")
    return said + [one.sentence for one in compared]


def crossings(answers: Sequence[Answer]) -> list[str]:
    """Between which rungs each SLO's value passes its limit."""
    said = [f"{answer.cluster.name}: {text}" for answer in answers for text in crossed(
        answer.slo[answer.slo["rung"].isin(answer.climbed["rung"])], answer.cluster.slos)]
    return said or ["No rung is valid, so no limit can be said to be passed."]


def crossed(rows: pd.DataFrame, slos: Sequence[Slo]) -> list[str]:
    """Between which of its valid rungs each SLO on a latency passes its limit. `rows`: SLO_VERDICTS."""
    said = []
    for slo in slos:
        own = rows[(rows["metric"] == slo.metric) & (rows["persona"] == slo.persona)
                   & (rows["percentile"] == slo.percentile) & rows["value_s"].notna()]
        if slo.metric in SHARES or own.empty:
            continue
        beyond, within = own["value_s"] > slo.limit_s, own["value_s"] <= slo.limit_s
        above = own.loc[beyond, "users"].min()
        below = own.loc[within & ~(own["users"] >= above), "users"].max()
        last = own.loc[within, "users"].max()  # beyond `above` where repeats of a rung disagree
        surely = own.loc[beyond & (own["users"] > last), "users"].min()
        name = f"{metric_name(slo.metric)} p{slo.percentile:g} of {who(slo.persona)}"
        limit = metric_value(slo.metric, slo.limit_s)
        if math.isnan(above):
            said.append(f"{name} stays within {limit} up to {own['users'].max()} users, the most that were run.")
        elif math.isnan(below):
            said.append(f"{name} is beyond {limit} at {above:.0f} users already, the fewest of its rungs.")
        elif last < above:
            said.append(f"{name} passes {limit} between {below:.0f} and {above:.0f} users.")
        else:
            some = f"{above:.0f}" if above == last else f"{above:.0f} to {last:.0f}"
            passed = f"is within {limit} up to {below:.0f}" if math.isnan(surely) else \
                f"passes {limit} between {below:.0f} and {surely:.0f}"
            said.append(f"{name} {passed} users; rungs of {some} users lie on both sides of it.")
    return said


def personas_at_limit(answers: Sequence[Answer]) -> pd.DataFrame:
    """Percentiles by persona in the valid rung nearest to each cluster's limit: columns cluster, users, persona,
    metric, value_s, low_s, high_s; empty where the workload has one persona only."""
    tables = []
    for answer in answers:
        path = answer.folder / "sweep" / "slo_personas.parquet"
        rung = answer.capacity.get("limit_rung")
        if path.is_file() and rung is not None:
            rows = read_table(path, SLO_VERDICTS)
            rows = rows[(rows["rung"] == rung) & (rows["persona"] != "all") & ~rows["metric"].isin(SHARES)]
            tables.append(rows.assign(cluster=answer.cluster.name))
    columns = ["cluster", "users", "persona", "metric", "value_s", "low_s", "high_s"]
    return pd.concat(tables, ignore_index=True)[columns] if tables else pd.DataFrame(columns=columns)


def waits(table: pd.DataFrame, metric: str) -> list[str]:
    """Who waits longest at each cluster's limit, and by how much."""
    said = []
    for cluster, rows in table[table["metric"] == metric].groupby("cluster", sort=False):
        worst, best = rows.loc[rows["value_s"].idxmax()], rows.loc[rows["value_s"].idxmin()]
        text = f"{cluster}: at {worst['users']:.0f} users {worst['persona']} has the highest {metric.upper()} p95, " \
            f"{metric_value(metric, worst['value_s'])}"
        if len(rows) > 1:
            parts = worst["low_s"] > best["high_s"]
            text += f"; {best['persona']} the lowest, {metric_value(metric, best['value_s'])}" + (
                "" if parts else " (their intervals overlap)")
        said.append(f"{text}.")
    return said or [f"No rung near a limit has {metric.upper()} by persona."]


def kernels(table: pd.DataFrame) -> list[str]:
    """The two categories that take most of the GPU time on each cluster, and how long it idles."""
    said = []
    for row in table.to_dict("records"):
        shares = {name: float(row[name]) for name in style.KERNELS if name in row and name != "idle"}
        first, second = sorted(shares, key=lambda name: shares[name], reverse=True)[:2]
        names = style.KERNELS[first][0], style.KERNELS[second][0]
        said.append(f"{row['cluster']} ({row['trace']}): {names[0]} takes {shares[first]:.0f} % of the GPU time and "
                    f"{names[1]} {shares[second]:.0f} %; GPUs idle {float(row['idle']):.0f} %.")
    return said or ["No trace was examined: notebook 04 makes or reads one."]


def best_limit(curve: pd.DataFrame) -> list[str]:
    """How far each cluster's answer moves over the limits that its rungs were judged at."""
    said = []
    known = curve.replace([np.inf, -np.inf], np.nan).dropna(subset=["users"])
    for (cluster, metric), rows in known.groupby(["cluster", "metric"], sort=False):
        least, most = rows.loc[rows["limit_s"].idxmin()], rows.loc[rows["limit_s"].idxmax()]
        said.append(f"{cluster}: {least['users']:.0f} users with {str(metric).upper()} limited to "
                    f"{metric_value(str(metric), least['limit_s'])}, {most['users']:.0f} with "
                    f"{metric_value(str(metric), most['limit_s'])}.")
    return said or ["The rungs do not reach far enough to judge other limits."]
