"""Checks that speak: four beliefs about serving, each held against this sweep's own figures.

*Utilisation is not the SLA*, *memory is not always the bottleneck*, *chunked prefill is the trade-off*, *overload
leaves no trace*: true on the cluster that taught them, so each is asked anew and the answer may be "not here".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from spoc_lib.sweep.saturation import collapsed


@dataclass(frozen=True, slots=True)
class Lesson:
    """`holds`: None where the data cannot tell; `sentence`: the finding; `figures`: its numbers."""

    name: str
    holds: bool | None
    sentence: str
    figures: dict[str, float | None] = field(default_factory=dict)


def _seconds(value: float) -> str:
    """`value` for a sentence; an infinite percentile (too many requests without an answer) as ∞."""
    return "∞" if math.isinf(value) else f"{value:.2f}"


def _milliseconds(value: float) -> str:
    return "∞" if math.isinf(value) else f"{1e3 * value:.0f}"


def utilisation_is_not_the_sla(rungs: pd.DataFrame, capacity: float) -> Lesson:
    """How busy the GPUs are at the last rung within the SLA, and what more activity beyond it costs in
    latency."""
    name = "utilisation is not the SLA"
    known = rungs[(rungs["verdict"] != "invalid") & rungs["sm_active_ratio"].notna()].sort_values("users")
    inside, beyond = known[known["users"] <= capacity], known[known["users"] > capacity]
    if inside.empty:
        return Lesson(name, None, "No rung within the SLA has a record of SM activity: it cannot be said how busy the "
                      "GPUs are at the limit.")
    at = inside.iloc[-1]
    figures: dict[str, float | None] = {"sm_active_ratio": float(at["sm_active_ratio"])}
    sentence = f"At {at['users']} users, within the SLA, the SMs are active {at['sm_active_ratio']:.0%} of the time"
    if beyond.empty:
        return Lesson(name, None, sentence + "; no rung beyond the SLA was run.", figures)
    over = beyond.iloc[-1]
    figures |= {"sm_active_beyond_ratio": float(over["sm_active_ratio"]), "itl_p95_s": float(at["itl_p95_s"]),
                "itl_p95_beyond_s": float(over["itl_p95_s"]), "ttft_p95_s": float(at["ttft_p95_s"]),
                "ttft_p95_beyond_s": float(over["ttft_p95_s"])}
    holds = bool(at["sm_active_ratio"] < 0.9 or over["sm_active_ratio"] - at["sm_active_ratio"] < 0.1)
    return Lesson(name, holds, sentence + f"; at {over['users']} users they are active {over['sm_active_ratio']:.0%}, "
                  f"and p95 ITL goes from {_milliseconds(at['itl_p95_s'])} to {_milliseconds(over['itl_p95_s'])} ms, "
                  f"p95 TTFT from {_seconds(at['ttft_p95_s'])} to {_seconds(over['ttft_p95_s'])} s.", figures)


def memory_is_not_always_the_bottleneck(row: Mapping, without_caching: Mapping | None,
                                        rungs: pd.DataFrame | None = None, capacity: float = math.inf) -> Lesson:
    """KV usage at the limit, what it is when prefix caching is switched off at the same users, and whether the prefix
    cache holds beyond the limit (`rungs`: RUNGS): a pool may be too small for what it should remember while the
    blocks in use at any moment are few."""
    name, usage = "memory is not always the bottleneck", row.get("kv_usage_ratio")
    if usage is None or pd.isna(usage):
        return Lesson(name, None, "KV usage was not recorded.")
    figures = {"kv_usage_ratio": float(usage), "cached_ratio": row.get("cached_ratio")}
    sentence = f"At the limit {usage:.0%} of the KV blocks are in use"
    if row.get("cached_ratio") is not None and not pd.isna(row["cached_ratio"]):
        sentence += f" and {row['cached_ratio']:.0%} of the prompt tokens come from the prefix cache"
    if without_caching is not None:
        figures["kv_usage_without_caching_ratio"] = without_caching["kv_usage_ratio"]
        figures["ttft_p95_without_caching_s"] = without_caching["ttft_p95_s"]
        sentence += (f"; without prefix caching it would be {without_caching['kv_usage_ratio']:.0%}, and p95 TTFT "
                     f"{_seconds(without_caching['ttft_p95_s'])} instead of {_seconds(row['ttft_p95_s'])} s")
    holds = bool(usage < 0.9)
    beyond = None if rungs is None else rungs[
        (rungs["users"] > capacity) & (rungs["verdict"] != "invalid") & rungs["cached_ratio"].notna()]
    if beyond is not None and len(beyond) and "cached_ratio" in figures and figures["cached_ratio"] is not None:
        least = beyond.loc[beyond["cached_ratio"].idxmin()]
        figures["cached_beyond_ratio"] = float(least["cached_ratio"])
        if collapsed(figures["cached_ratio"], float(least["cached_ratio"])):
            holds = False
            sentence += (f"; but at {least['users']} users only {least['cached_ratio']:.0%} of the prompt tokens are "
                         f"found in the cache: the pool is too small to remember everybody")
    return Lesson(name, holds, sentence + ".", figures)


def chunked_prefill_is_the_trade_off(variants: Sequence[tuple[int, Mapping]]) -> Lesson:
    """TTFT and ITL at the same users under other token budgets. variants: (max_num_batched_tokens, RUNGS
    row)."""
    name = "chunked prefill is the trade-off"
    if len(variants) < 2:
        return Lesson(name, None, "Only one token budget was run: the trade-off between TTFT and ITL is not seen.")
    ordered = sorted(variants, key=lambda pair: pair[0])
    (small, low), (large, high) = ordered[0], ordered[-1]
    shown = "; ".join(f"{budget} tokens: p95 TTFT {_seconds(row['ttft_p95_s'])} s, p95 ITL "
                      f"{_milliseconds(row['itl_p95_s'])} ms"
                      for budget, row in ordered)
    holds = bool(low["itl_p95_s"] < high["itl_p95_s"] and low["ttft_p95_s"] > high["ttft_p95_s"])
    verdict = "a smaller budget buys ITL with TTFT" if holds else \
        "the budget does not trade one for the other here"
    return Lesson(name, holds, f"At the same users, {verdict} ({shown}).", {
        "small_budget": small, "large_budget": large, "itl_ratio": low["itl_p95_s"] / high["itl_p95_s"],
        "ttft_ratio": low["ttft_p95_s"] / high["ttft_p95_s"]})


def overload_leaves_no_trace(up_down: pd.DataFrame, settle_s: float) -> Lesson:
    """Hysteresis: as many users as were met before an overload, once more after it on one and the same server.

    up_down: `updown.differences`; settle_s: seconds that passed after the overload before it was measured again. A
    server that is worse then keeps something of the overload: a queue that drains slowly, a cold cache.
    """
    name = "overload leaves no trace"
    if up_down.empty:
        return Lesson(name, None, "No number of users was run both before and after an overload on one server, so "
                      "hysteresis is not seen.")
    at = up_down[up_down["users"] == up_down["users"].max()].to_dict("records")
    worse = [row for row in up_down.to_dict("records") if row["moved"] == "worse"]
    shown = worse or at
    text = "; ".join(f"{row['slo']} at {row['users']} users: {_span(row, 'before')} before, {_span(row, 'after')} after"
                     for row in shown)
    verdict = "Hysteresis" if worse else "No hysteresis"
    since = f"{settle_s:.0f} s after an overload of {at[0]['top_users']} users"
    back = [row["users"] for row in up_down.to_dict("records") if row["users"] not in {one["users"] for one in worse}]
    if worse and back:
        text += f"; at {max(back)} users all is as before"
    return Lesson(name, not worse, f"{verdict}, {since}: {text}.",
                  {"users": float(at[0]["users"]), "top_users": float(at[0]["top_users"]),
                   "settle_s": settle_s, **{f"{row['slo']}, {when}": row[when] for row in at
                                            for when in ("before", "after")}})


def _span(row: Mapping, when: str) -> str:
    """`1.5 s (1.0 to 1.9)`; of a share of requests in per cent."""
    values = [float(row[name]) * (100 if row["unit"] == "%" else 1) for name in (when, f"{when}_low", f"{when}_high")]
    small = row["unit"] != "%" and max((one for one in values if math.isfinite(one)), default=1.0) < 1
    value, low, high = ("∞" if math.isinf(one) else f"{1e3 * one if small else one:.3g}" for one in values)
    return f"{value} {'m' if small else ''}{row['unit']} ({low} to {high})"
