"""SPOC's published findings beside what the runs show, each judged by a stated rule; nothing is tuned to them.

A finding is *reproduced* where our figure meets the paper's within the rule's tolerance, *depends on* something where
it does once that moves over the range shown, else *not reproduced*; without the artefact it is *not judged*.
"""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from spoc_lib.report.evidence import at_the_limit, limit_curve, ratios
from spoc_lib.report.paper_claims import BUDGETS, USERS, Claim, judge, not_judged, spans
from spoc_lib.report.paper_kernels import attention, four_bit
from spoc_lib.report.studies import Study, profile_of
from spoc_lib.report.verdict import Answer, ratio

#: The paper's other figures.
RATIO, SM_ACTIVE, KV_USAGE = 3.5, 0.37, 0.105
#: Tolerances: relative for users and their ratio, absolute for shares.
NEAR, SM_NEAR, KV_NEAR = 0.15, 0.05, 0.03
#: A throttled GPU must cost everyone at least this part of its own loss.
THROTTLE_PART = 0.5
RULES = (
    f"Users and their ratio: reproduced within our interval or {NEAR:.0%} of the paper's figure; they depend on a "
    f"parameter where its range, all else as swept, spans the paper's figure.",
    "Best token budget: reproduced where the paper's is among those whose capacity the bisection cannot tell from the "
    "best one; it depends on gap_prefill_us where that is so only at another value of the range that fits of the step "
    "time found.",
    f"SM activity within {100 * SM_NEAR:.0f} points, KV use within {100 * KV_NEAR:.0f}, at the rung nearest to the "
    f"limit; they depend on the number of users where the rungs that met the SLA span the paper's figure.",
    "Attention: reproduced where it is the longest category of a decode step of the limit's batch and DRAM is the "
    "nearest roof for most of the step; it depends on the batch where it becomes the longest in a larger one.",
    "Chunked prefill: from the smallest to the largest budget TTFT of the huge prompt falls and p95 ITL of all others "
    "rises, on every cluster. FP4-naive against W4A16: the trace's expert time is nearer to W4A16 by more than 10 % of "
    "the roof; where DRAM binds both the two agree, and it depends on the tokens a step.",
    f"Throttled GPU: every persona's median ITL grows by at least {THROTTLE_PART:.0%} of what the slow GPU loses.",
)


def findings(studies: list[Study]) -> pd.DataFrame:
    """One row a finding of the paper: finding, paper, ours, verdict, why."""
    by_hardware = {(s.answer.cluster.hardware.count, s.answer.cluster.hardware.gpu): s for s in studies}
    claims = [_users(key, by_hardware.get(key)) for key in USERS]
    claims.append(_ratio(by_hardware))
    claims += [_budget(key, by_hardware.get(key)) for key in BUDGETS]
    h100 = by_hardware.get((4, "h100-sxm"))
    claims.append(_share("SMs active at the limit, 4 x H100", "sm_active_ratio", SM_ACTIVE, SM_NEAR, h100))
    claims.append(_share("KV blocks in use with prefix caching, 4 x H100", "kv_usage_ratio", KV_USAGE, KV_NEAR, h100))
    claims += [
        attention(h100 or (studies[0] if studies else None)),
        _chunked(studies),
        four_bit(h100 or (studies[0] if studies else None)),
        _throttle(studies),
    ]
    return pd.DataFrame([asdict(claim) for claim in claims])


def sensitivities(studies: list[Study]) -> pd.DataFrame:
    """How far the quick answer moves with each parameter, all clusters (`sensitivity.table`)."""
    tables = [study.sensitivity.drop(columns=["outside", "reason"]) for study in studies]
    return pd.concat(tables, ignore_index=True)


def arrivals(studies: list[Study]) -> pd.DataFrame:
    """The huge prompt's TTFT and everyone's ITL by token budget, all clusters (`tradeoffs.long_prompt_arrival`)."""
    return pd.concat(
        [_with_cluster(study, study.arrival.drop(columns="outside")) for study in studies], ignore_index=True
    )


def budgets(studies: list[Study]) -> pd.DataFrame:
    """Max users by token budget and gap_prefill_us, all clusters: one row a cluster and gap, a column a budget."""
    table = pd.concat([study.budgets for study in studies], ignore_index=True)
    wide = table.pivot_table(
        index=["cluster", "gap_prefill_us", "calibrated"],
        columns="max_num_batched_tokens",
        values="users",
        aggfunc="first",
    )
    wide.columns = [f"{budget} tokens" for budget in wide.columns]
    best = (
        table[table["best"].astype(bool)]
        .groupby(["cluster", "gap_prefill_us", "calibrated"])["max_num_batched_tokens"]
        .agg(lambda values: _list(list(values)))
    )
    return wide.assign(best=best).reset_index()


def grids(studies: list[Study]) -> pd.DataFrame:
    """Users by start, percentile and ITL limit at the paper's budgets; with both of its clusters their ratio too."""
    by_hardware = {(s.answer.cluster.hardware.count, s.answer.cluster.hardware.gpu): s for s in studies}
    pair = _pair(by_hardware)
    if pair is None:
        return pd.concat([_with_cluster(study, study.grid) for study in studies], ignore_index=True)
    names = [study.answer.cluster.name for study in pair]
    return joint(*pair).rename(columns={"users": f"users, {names[0]}", "users_other": f"users, {names[1]}"})


def throttles(studies: list[Study]) -> pd.DataFrame:
    """Everyone's ITL beside one slow GPU, all clusters (`tradeoffs.throttle_effect`)."""
    return pd.concat([_with_cluster(study, study.throttle) for study in studies], ignore_index=True)


def _with_cluster(study: Study, table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([pd.Series(study.answer.cluster.name, table.index, name="cluster"), table], axis=1)


def asked(answers: list[Answer]) -> pd.DataFrame:
    """The parameters that the answers hang on, one row a run."""
    rows = []
    for answer in answers:
        profile = profile_of(answer)
        rows.append(
            {
                "cluster": answer.cluster.name,
                "rung (s)": answer.capacity["rung_s"],
                "warm-up (s)": profile.warmup_s,
                "start": profile.start,
                "gap cap (s)": answer.capacity["gap_cap_s"],
                "SLOs": "; ".join(slo.name for slo in answer.cluster.slos),
                "flags": " ".join(f"{k}={v}" for k, v in answer.capacity["flags"].items()) or "vLLM's defaults",
            }
        )
    return pd.DataFrame(rows)


def _users(key: tuple[int, str], study: Study | None) -> Claim:
    figure, name = USERS[key], f"users on {key[0]} x {key[1].split('-')[0].upper()}"
    users = study.answer.users if study else None
    if study is None or not users:
        return not_judged(name, f"{figure}", "no run of this cluster with an answer")
    answer = study.answer
    low, high = answer.interval or (users, users)
    near = low <= figure <= high or abs(users / figure - 1) <= NEAR
    depends = _moves(study.sensitivity, figure)
    for metric, rows in limit_curve([answer]).dropna(subset=["users"]).groupby("metric"):
        if spans([users, *rows["users"]], figure):
            depends.append(
                f"the limit on {metric.upper()} ({rows['users'].min():.0f} to {rows['users'].max():.0f} "
                f"users over {rows['limit_s'].min():g} to {rows['limit_s'].max():g} s)"
            )
    verdict, why = judge(near, depends, "no parameter's range reaches it: " + _ranges(study.sensitivity))
    return Claim(name, f"{figure}", f"{users:g} ({low:g} to {high:g})", verdict, why)


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


def _ratio(by_hardware: dict[tuple[int, str], Study]) -> Claim:
    name, paper = "users of 4 x H100 to 2 x H200", f"{RATIO:g}, not 2"
    pair = _pair(by_hardware)
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


def _pair(by_hardware: dict[tuple[int, str], Study]) -> tuple[Study, Study] | None:
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


def _budget(key: tuple[int, str], study: Study | None) -> Claim:
    figure, name = BUDGETS[key], f"best max_num_batched_tokens on {key[0]} x {key[1].split('-')[0].upper()}"
    if study is None:
        return not_judged(name, f"{figure}", "no run of this cluster")
    table, best = study.budgets, {}
    for gap, rows in table.groupby("gap_prefill_us"):
        best[gap] = list(rows.loc[rows["best"], "max_num_batched_tokens"])
    shown = table[table["calibrated"].astype(bool)]
    own = list(shown.loc[shown["best"].astype(bool), "max_num_batched_tokens"])
    users = ", ".join(f"{row['max_num_batched_tokens']}: {row['users']}" for row in shown.to_dict("records"))
    depends = (
        [f"gap_prefill_us ({'; '.join(f'{gap / 1e3:.2g} ms: {_list(one)}' for gap, one in best.items())})"]
        if any(figure in one for one in best.values())
        else []
    )
    verdict, why = judge(
        figure in own,
        depends,
        "at no gap of " + ", ".join(f"{gap / 1e3:.2g} ms (best {_list(one)})" for gap, one in best.items()),
    )
    return Claim(name, f"{figure}", f"{_list(own)} (users {users})", verdict, why)


def _list(values: list) -> str:
    return " or ".join(str(int(value)) for value in values) or "none"


def _share(name: str, column: str, figure: float, tolerance: float, study: Study | None) -> Claim:
    paper = f"about {figure:.1%}"
    if study is None:
        return not_judged(name, paper, "no run of this cluster")
    value = at_the_limit([study.answer])[column]
    if value.empty or pd.isna(value.iloc[0]):
        return not_judged(name, paper, "no rung near the limit has a record of it")
    met = study.answer.climbed
    met = met[met["verdict"] == "met"].dropna(subset=[column])
    depends = (
        [
            f"the number of users ({met[column].min():.1%} at {met.loc[met[column].idxmin(), 'users']} to "
            f"{met[column].max():.1%} at {met.loc[met[column].idxmax(), 'users']})"
        ]
        if spans(met[column], figure, 0.0)
        else []
    )
    verdict, why = judge(
        abs(value.iloc[0] - figure) <= tolerance,
        depends,
        f"{met[column].min():.1%} to {met[column].max():.1%} over all rungs that met the SLA"
        if len(met)
        else "no rung met the SLA",
    )
    return Claim(name, paper, f"{value.iloc[0]:.1%}" + _uncached(column, study.answer), verdict, why)


def _uncached(column: str, answer: Answer) -> str:
    """KV use without prefix caching at the same users, where the sweep asked."""
    for lesson in answer.capacity.get("lessons", []):
        value = lesson["figures"].get("kv_usage_without_caching_ratio")
        if column == "kv_usage_ratio" and value is not None:
            return f" (without prefix caching {value:.1%})"
    return ""


def _chunked(studies: list[Study]) -> Claim:
    name = "chunked prefill trades TTFT against ITL (a 128k prompt arrives)"
    paper = "smaller budget: ITL down, TTFT up"
    if not studies:
        return not_judged(name, paper, "no simulated run")
    said, holds = [], []
    for study in studies:
        table = study.arrival.sort_values("max_num_batched_tokens")
        small, large = table.iloc[0], table.iloc[-1]
        holds.append(bool(small["ttft_s"] > large["ttft_s"] and small["itl_p95_s"] < large["itl_p95_s"]))
        said.append(
            f"{study.answer.cluster.name}: {small['max_num_batched_tokens']} to "
            f"{large['max_num_batched_tokens']} tokens: TTFT {small['ttft_s']:.1f} to {large['ttft_s']:.1f} s, "
            f"p95 ITL of {study.users} others {1e3 * small['itl_p95_s']:.0f} to "
            f"{1e3 * large['itl_p95_s']:.0f} ms"
        )
    where = [study.answer.cluster.name for study, held in zip(studies, holds, strict=True) if held]
    some = [f"the cluster (on {', '.join(where)} it does)"] if where else []
    verdict, why = judge(all(holds), some, "TTFT and ITL do not move against each other")
    return Claim(name, paper, "; ".join(said), verdict, why)


def _throttle(studies: list[Study]) -> Claim:
    name, paper = "one throttled GPU slows everyone's ITL", "yes"
    if not studies:
        return not_judged(name, paper, "no simulated run")
    said, holds = [], []
    for study in studies:
        rows = study.throttle
        factor = float(rows["clock_factor"].iloc[0])
        holds.append(bool((rows["ratio"] - 1 >= THROTTLE_PART * (1 / factor - 1)).all()))
        said.append(
            f"{study.answer.cluster.name}: one GPU at {factor:.0%} clock, {study.users} users: median ITL "
            f"x {rows['ratio'].min():.2f} to {rows['ratio'].max():.2f} by persona"
        )
    some = ["the cluster"] if any(holds) else []
    verdict, why = judge(all(holds), some, "some persona hardly notices")
    return Claim(name, paper, "; ".join(said), verdict, why)
