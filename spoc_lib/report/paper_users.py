"""The paper's users, and the ratio of its two clusters, beside ours: what would have to move to meet them."""

from __future__ import annotations

import pandas as pd

from spoc_lib.report.evidence import limit_curve, ratios
from spoc_lib.report.paper_claims import NEAR, RATIO, USERS, Claim, judge, not_judged, spans
from spoc_lib.report.studies import Study
from spoc_lib.report.verdict import ratio


def users(key: tuple[int, str], study: Study | None) -> Claim:
    """How many users one of the paper's clusters holds."""
    figure, name = USERS[key], f"users on {key[0]} x {key[1].split('-')[0].upper()}"
    holds = study.answer.users if study else None
    if study is None or not holds:
        return not_judged(name, f"{figure}", "no run of this cluster with an answer")
    answer = study.answer
    low, high = answer.interval or (holds, holds)
    near = low <= figure <= high or abs(holds / figure - 1) <= NEAR
    depends = _moves(study.sensitivity, figure)
    for metric, rows in limit_curve([answer]).dropna(subset=["users"]).groupby("metric"):
        if spans([holds, *rows["users"]], figure):
            depends.append(
                f"the limit on {metric.upper()} ({rows['users'].min():.0f} to {rows['users'].max():.0f} "
                f"users over {rows['limit_s'].min():g} to {rows['limit_s'].max():g} s)"
            )
    verdict, why = judge(near, depends, "no parameter's range reaches it: " + _ranges(study.sensitivity))
    return Claim(name, f"{figure}", f"{holds:g} ({low:g} to {high:g})", verdict, why)


def _moves(table: pd.DataFrame, figure: float) -> list[str]:
    """The parameters of a sensitivity table whose range, with the base, spans the figure."""
    base = table.iloc[0]["users"]
    found = []
    for name, rows in table.iloc[1:].groupby("asked", sort=False):
        if spans([base, *rows["users"]], figure, NEAR / 2):
            found.append(f"{name} ({_values(rows)})")
    return found


def _values(rows: pd.DataFrame) -> str:
    return ", ".join(f"{row['value']}: {row['users']}" for row in rows.to_dict("records") if not pd.isna(row["users"]))


def _ranges(table: pd.DataFrame) -> str:
    return "; ".join(f"{name} {_values(rows)}" for name, rows in table.iloc[1:].groupby("asked", sort=False))


def users_ratio(by_hardware: dict[tuple[int, str], Study]) -> Claim:
    """How many times the users of its second cluster the paper's first one holds."""
    name, paper = "users of 4 x H100 to 2 x H200", f"{RATIO:g}, not 2"
    pair = pair_of(by_hardware)
    if pair is None or not all(study.answer.users for study in pair):
        return not_judged(name, paper, "needs a run of both clusters with an answer")
    value, low, high = ratio(pair[0].answer, pair[1].answer)
    near = low <= RATIO <= high or abs(value / RATIO - 1) <= NEAR
    depends = []
    table = ratios([pair[1].answer, pair[0].answer]).dropna(subset=["ratio"])
    for metric, rows in table.groupby("metric"):
        least, most = rows.loc[rows["ratio"].idxmin()], rows.loc[rows["ratio"].idxmax()]
        if spans([value, *rows["ratio"]], RATIO, NEAR / 2):
            depends.append(
                f"the limit on {metric.upper()} ({least['ratio']:.2f} at {least['limit_s']:g} s to "
                f"{most['ratio']:.2f} at {most['limit_s']:g} s)"
            )
    merged = (
        pair[0].sensitivity.iloc[1:].merge(pair[1].sensitivity.iloc[1:], on=["asked", "value"], suffixes=("", "_other"))
    )
    merged = merged.dropna(subset=["users", "users_other"])
    merged = merged[merged["users_other"] > 0]
    merged = merged.assign(ratio=merged["users"].astype(float) / merged["users_other"].astype(float))
    for what, rows in merged.groupby("asked", sort=False):
        if spans([value, *rows["ratio"]], RATIO, NEAR / 2):
            shown = ", ".join(f"{one['value']}: {one['ratio']:.2f}" for one in rows.to_dict("records"))
            depends.append(f"{what} ({shown})")
    grid = joint(*pair)
    least, most = grid.loc[grid["ratio"].idxmin()], grid.loc[grid["ratio"].idxmax()]
    both = (
        f"{least['ratio']:.2f} ({_setting(least)}) to {most['ratio']:.2f} ({_setting(most)}) at the paper's token "
        f"budgets"
    )
    if spans(grid["ratio"], RATIO, NEAR / 2):
        depends.append(f"token budget, start, percentile and ITL limit together ({both})")
    known = [value, *table["ratio"], *merged["ratio"]]
    verdict, why = judge(
        near,
        depends,
        f"one parameter at a time moves it from {min(known):.2f} to {max(known):.2f}, all together from {both}",
    )
    return Claim(name, paper, f"{value:.2f} ({low:.2f} to {high:.2f})", verdict, why)


def pair_of(by_hardware: dict[tuple[int, str], Study]) -> tuple[Study, Study] | None:
    """The paper's two clusters, where both were run."""
    first, second = (by_hardware.get(key) for key in USERS)
    return None if first is None or second is None else (first, second)


def joint(one: Study, other: Study) -> pd.DataFrame:
    """Users of both at the paper's token budgets under every start, percentile and ITL limit, and their ratio."""
    keys = ["start", "percentile", "itl_limit_s"]
    both = one.grid.merge(other.grid, on=keys, suffixes=("", "_other"))
    both = both[both["users_other"].fillna(0) > 0].dropna(subset=["users"])
    return both.assign(ratio=both["users"].astype(float) / both["users_other"].astype(float))


def _setting(row: pd.Series) -> str:
    return f"{row['start']}, p{row['percentile']:g}, ITL {1e3 * row['itl_limit_s']:g} ms"
