"""SPOC's published findings beside what the runs show, each judged by a stated rule; nothing is tuned to them.

A finding is *reproduced* where our figure meets the paper's within the rule's tolerance, *depends on* something where
it does once that moves over the range shown, else *not reproduced*; without the artefact it is *not judged*.
"""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from spoc_lib.report.answer import Answer
from spoc_lib.report.evidence import at_the_limit
from spoc_lib.report.paper_claims import BUDGETS, NEAR, USERS, Claim, judge, not_judged, spans
from spoc_lib.report.paper_kernels import attention, four_bit
from spoc_lib.report.paper_users import joint, pair_of, users, users_ratio
from spoc_lib.report.studies import Study, profile_of

#: The paper's shares at the limit, and how near to them is reproduced.
SM_ACTIVE, KV_USAGE = 0.37, 0.105
SM_NEAR, KV_NEAR = 0.05, 0.03
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
    by_hardware = {(s.answer.cluster.hardware.count, s.answer.cluster.hardware.gpu_name): s for s in studies}
    claims = [users(key, by_hardware.get(key)) for key in USERS]
    claims.append(users_ratio(by_hardware))
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
    by_hardware = {(s.answer.cluster.hardware.count, s.answer.cluster.hardware.gpu_name): s for s in studies}
    pair = pair_of(by_hardware)
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
