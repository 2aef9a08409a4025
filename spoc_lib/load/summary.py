"""The figures of a rung, computed from its tables alone; nothing is counted twice, nothing left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.core.stats import percentile
from spoc_lib.load import figures
from spoc_lib.load.gate import SelfCheck, client_limits
from spoc_lib.load.plan import LoadPlan
from spoc_lib.load.window import Window
from spoc_lib.metrics import EVERYBODY, LITTLE_TOLERANCE, Measured, little, occupancy

#: Share of the asked users that must have been live, on average over the window.
USERS_TOLERANCE = 0.01
#: Answers over the limit that they were asked for by more than this factor: the server miscounts.
CLAIMED_RATIO = 2.0
#: Fewer tokens than this read together do not move a percentile of the gaps that anybody asks for.
MERGED_RATIO = 0.01


def summarise(plan: LoadPlan, requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame, window: Window,
              facts: Mapping[str, Any], check: SelfCheck | None) -> dict[str, Any]:
    """The result of `load run`, as `--json` writes it. `facts`: what the clients reported (see `runner`)."""
    span = (window.start_s, window.end_s)
    seen = Measured(requests, chunks, span)
    longest_s = max(plan.gap_cap_s, plan.fixed.think_time_s if plan.fixed else 0.0)
    counted = occupancy(requests, plan.users, span, facts["start_s"], max(facts["stop_s"], window.end_s),
                        longest_s if plan.arrivals is None else 0.0)
    law = little(requests, counted.live, *span, 0.0 if plan.arrivals else math.nan)
    if plan.arrivals is None:
        law["little_error_ratio"] = counted.little_error_ratio
    result = {
        **outcome_counts(requests), "planned": facts["planned"], **latencies(seen),
        **seen.numbers("output_tokens_per_s", "prompt_tokens_per_s", "request_rate_per_s", "cached_ratio"),
        "base_url": plan.base_url, "model": plan.model, "users": plan.users, "processes": plan.processes,
        "personas": "fixed" if plan.fixed else plan.personas, "seed": plan.seed, "salt": plan.salt,
        "cache": plan.cache,
        "start": plan.start, "gap_cap_s": plan.gap_cap_s,
        "arrivals": plan.arrivals.model_dump() if plan.arrivals else None,
        "window": window.to_dict(), "window_verdict": window.verdict,
        **counted.numbers("live_users", "thinking_users", "in_flight_users", "late_users"), **law,
        "client_live_users": mean_metric(metrics, "live_users", window), "finished_users": finished_users(metrics),
        "errors": error_counts(requests), "error_samples": dict(facts["error_samples"]),
        "retry_after": facts["retry_after"], "tokens_source": tokens_source(requests),
        "short_answers": short_answers(requests), "output_claimed_ratio": claimed_ratio(requests),
        "schedule_lag_s": seen.percentiles("schedule_lag"),
        "per_persona": {persona: {**outcome_counts(own), **latencies(seen, persona)}
                        for persona, own in requests[seen.sent].groupby("persona")},
        "interrupted": facts["interrupted"], "lost_clients": facts["lost_clients"], "lost_why": facts["lost_why"],
        "stamps": facts["stamps"], "notes": list(facts["notes"]),
    }
    result.update(client_figures(metrics, chunks, window), merged_ratio=figures.merged_ratio(seen.streams))
    result["outages"] = figures.outages(requests, facts["start_s"])
    result["notes"] += result["outages"] + blurred(result)
    limits = client_limits(result, plan.processes, check)
    result["client_limited"], result["client_limits"] = bool(limits), limits
    result["invalid"] = invalid_reasons(plan, result)
    result["valid"] = not result["invalid"]
    return result


def outcome_counts(requests: pd.DataFrame) -> dict[str, int]:
    """Requests planned, completed, failed and censored."""
    outcomes = requests["outcome"].value_counts()
    counts = {name: int(outcomes.get(name, 0)) for name in ("completed", "failed", "censored")}
    return {"planned": len(requests), **counts}


def latencies(seen: Measured, persona: str = EVERYBODY) -> dict[str, Any]:
    """`ttft_s`, `itl_s`, `tpot_s`, `e2e_s`: {p50, p95, p99} in seconds."""
    return {f"{name}_s": seen.percentiles(name, persona) for name in ("ttft", "itl", "tpot", "e2e")}


def error_counts(requests: pd.DataFrame) -> dict[str, int]:
    """Failed requests by error class."""
    failed = requests[requests["outcome"] == "failed"]
    return {str(name): int(count) for name, count in failed["error_class"].value_counts().items()}


def tokens_source(requests: pd.DataFrame) -> str:
    """Who counted the output tokens of the completed requests: usage | tokenizer | mixed | none."""
    sources = set(requests.loc[requests["outcome"] == "completed", "tokens_source"])
    return sources.pop() if len(sources) == 1 else ("mixed" if sources else "none")


def short_answers(requests: pd.DataFrame) -> int:
    """Completed answers with fewer tokens than asked for."""
    done = requests[requests["outcome"] == "completed"]
    return int((done["output_tokens"] < done["intended_output_tokens"]).sum())


def claimed_ratio(requests: pd.DataFrame) -> float | None:
    """Output tokens of the completed answers by the server's usage, over those asked for; None without usage."""
    told = requests[(requests["outcome"] == "completed") & (requests["tokens_source"] == "usage")]
    asked = float(told["intended_output_tokens"].sum())
    return float(told["output_tokens"].sum()) / asked if asked else None


def mean_metric(metrics: pd.DataFrame, name: str, window: Window) -> float:
    """Mean over the window of a client gauge, summed over the client processes of each second."""
    own = metrics[(metrics["metric"] == name) & (metrics["time_s"] >= window.start_s)
                  & (metrics["time_s"] < window.end_s)]
    if own.empty:
        own = metrics[metrics["metric"] == name]
    if own.empty:
        return 0.0
    return float(own.groupby("labels")["value"].mean().sum())


def client_figures(metrics: pd.DataFrame, chunks: pd.DataFrame, window: Window) -> dict[str, Any]:
    """What the client itself cost: CPU share of one core (the busiest process), CPU a token, loop lag."""
    inside = metrics[(metrics["time_s"] >= window.start_s) & (metrics["time_s"] <= window.end_s)]
    cpu = inside[inside["metric"] == "client_cpu_seconds_total"]
    shares, spent = [0.0], 0.0
    for _, own in cpu.groupby("labels"):
        seconds, used = np.ptp(own["time_s"].to_numpy()), np.ptp(own["value"].to_numpy())
        if seconds > 0:
            shares.append(float(used / seconds))
            spent += float(used)
    span = (cpu["time_s"].min(), cpu["time_s"].max()) if len(cpu) else (0.0, 0.0)
    tokens = float(chunks[(chunks["time_s"] >= span[0]) & (chunks["time_s"] <= span[1])]["tokens"].sum())
    lag = inside[inside["metric"] == "client_loop_lag_p99_s"]["value"]
    prepare, send = (growth(inside, f"late_{name}_seconds_total") for name in ("prepare", "send"))
    return {"client_cpu_ratio": max(shares), "client_cpu_us_per_token": 1e6 * spent / tokens if tokens else None,
            "late_prepare_ratio": prepare / (prepare + send) if prepare + send else None,
            "client_loop_lag_p99_s": percentile(lag.to_numpy(), 50) if len(lag) else None}


def blurred(result: Mapping[str, Any]) -> list[str]:
    """A sentence when tokens were read together because the client read late; their gaps are then not the server's."""
    loop_s, tpot_s = result["client_loop_lag_p99_s"] or 0.0, result["tpot_s"]["p50"]
    if result["merged_ratio"] < MERGED_RATIO or not loop_s > tpot_s:
        return []
    return [f"{result['merged_ratio']:.0%} of the tokens were read together with the one before, and the client's loop "
            f"was {1e3 * loop_s:.0f} ms late at p99 with a token every {1e3 * tpot_s:.1f} ms: ITL is blurred by that, "
            "TTFT and TPOT are not"]


def finished_users(metrics: pd.DataFrame) -> int:
    """Users that had come to the end of their script when the rung ended."""
    own = metrics[metrics["metric"] == "finished_users"]
    return int(own.groupby("labels")["value"].max().sum())


def growth(metrics: pd.DataFrame, name: str) -> float:
    """How much a counter grew over `metrics`, all client processes together."""
    own = metrics[metrics["metric"] == name].groupby("labels")["value"]
    return float((own.max() - own.min()).sum())


def invalid_reasons(plan: LoadPlan, result: Mapping[str, Any]) -> list[str]:
    """Why the rung does not count; empty when it does."""
    reasons = []
    if result["planned"] != result["completed"] + result["failed"] + result["censored"]:
        reasons.append("planned is not completed + failed + censored")
    if result["lost_clients"]:
        reasons.append(": ".join([f"{result['lost_clients']} client process(es) were lost", *result["lost_why"]]))
    if result["interrupted"]:
        reasons.append("the rung was interrupted")
    if result["planned"] and not result["completed"]:
        reasons.append("no request was completed")
    if result["output_claimed_ratio"] and result["output_claimed_ratio"] > CLAIMED_RATIO:
        reasons.append(f"the server's usage counts {result['output_claimed_ratio']:,.0f} times the tokens that its "
                       "answers were limited to: no such figures can be")
    if plan.arrivals is None and result["client_live_users"] < plan.users * (1 - USERS_TOLERANCE):
        gone = f" ({result['finished_users']} came to the end of their script)" if result["finished_users"] else ""
        reasons.append(f"{result['client_live_users']:.1f} users were live, {plan.users} were asked for{gone}")
    elif plan.arrivals is None and result["completed"] and result["little_error_ratio"] > LITTLE_TOLERANCE:
        reasons.append(f"Little's law misses by {result['little_error_ratio']:.1%}: the records do not account for the "
                       f"time of {plan.users} users")
    return reasons
