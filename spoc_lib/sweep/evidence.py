"""The figures that tell what a rung's server was short of, and the sentences around a verdict about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

#: Figures of `telemetry.timeline.window_summary` that are kept as evidence.
KEPT = ("kv_usage_ratio", "kv_usage_ratio_max", "running", "running_max", "waiting", "preemptions", "gpu_busy_ratio",
        "sm_active_ratio", "dram_active_ratio", "tensor_active_ratio", "nvlink_tx_bytes_per_s", "iteration_tokens_mean",
        "server_ttft_mean_s", "server_prefill_mean_s")

#: Load over engines is uneven where one has this many times the requests of another, and so many more; or a pool that
#: is so much fuller.
UNEVEN, UNEVEN_LEAST, UNEVEN_KV = 1.5, 4.0, 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server was given: flags (of one engine; None where unknown), NVLink's rate of a GPU in one direction,
    and the tightest limit that the SLOs set on ITL or TPOT."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    link_bytes_per_s: float | None = None
    itl_limit_s: float | None = None


def step_figures(steps: pd.DataFrame | None, window: tuple[float, float], budget: int | None) -> dict[str, float]:
    """From the engine's own steps in the window (columns time_s: end or start, duration_s, and `Batch`'s
    fields): share of the time the engine is busy, share of the busy time in steps that carry prompt chunks,
    mean tokens a step, share of prompt-carrying steps whose token budget is full."""
    if steps is None or not len(steps):
        return {}
    inside = steps[(steps["time_s"] >= window[0]) & (steps["time_s"] < window[1])]
    busy = float(inside["duration_s"].sum())
    if not busy:
        return {"engine_busy_ratio": 0.0}
    mixed = inside["prefill_tokens"].to_numpy() > 0
    duration = inside["duration_s"].to_numpy(float)
    figures = {
        "engine_busy_ratio": min(busy / (window[1] - window[0]), 1.0),
        "prefill_step_time_ratio": float(duration[mixed].sum() / busy),
        "tokens_per_step": float(inside["tokens"].mean()),
        "decodes_per_step": float(np.average(inside["decodes"], weights=duration)),
    }
    if mixed.any():
        figures["prefill_step_mean_s"] = float(duration[mixed].mean())
        if budget:
            figures["budget_full_ratio"] = float((inside["tokens"].to_numpy()[mixed] >= 0.98 * budget).mean())
    if (~mixed).any():
        figures["decode_step_mean_s"] = float(duration[~mixed].mean())
    return figures


def gather(summary: Mapping, row: Mapping, limits: Limits, steps: Mapping[str, float],
           within: Mapping | None) -> dict[str, Any]:
    """All figures of a rung, None where unknown; see `saturation.saturation` for the arguments."""
    figures: dict[str, Any] = {**{key: summary.get(key) for key in KEPT}, **steps}
    engines = by_engine(summary)
    figures["engines"] = float(len(engines))
    for key in ("running", "waiting", "kv_usage_ratio"):
        figures[f"{key}_worst"] = max((one[key] for one in engines if one.get(key) is not None), default=None)
    figures["prefill_token_ratio"] = _prefill_share(summary, row)
    figures["budget_full_ratio"] = _budget_full(figures, limits.max_num_batched_tokens)
    figures["before_scheduler_s"] = _before_scheduler(figures, summary)
    figures["cached_ratio"], figures["cached_within_ratio"] = _cached(row), _cached(within)
    return figures


def by_engine(summary: Mapping) -> list[Mapping]:
    """Each engine's own figures; a summary that does not tell them apart is one engine."""
    return summary.get("by_engine") or [{"engine": "0", **{key: summary.get(key) for key in (
        "running", "waiting", "kv_usage_ratio", "kv_usage_ratio_max", "preemptions")}}]


def uneven(engines: Sequence[Mapping]) -> str | None:
    """A sentence where one of several engines has far more to do, or a far fuller pool, than another."""
    inside = [(one.get("running") or 0.0) + (one.get("waiting") or 0.0) for one in engines]
    usage = [one["kv_usage_ratio"] for one in engines if one.get("kv_usage_ratio") is not None]
    if len(engines) < 2 or not (max(inside) > UNEVEN * min(inside) and max(inside) - min(inside) >= UNEVEN_LEAST
                                or usage and max(usage) - min(usage) >= UNEVEN_KV):
        return None
    most, least = engines[inside.index(max(inside))], engines[inside.index(min(inside))]
    if most is least:  # only the pools differ
        most = max(engines, key=lambda one: one.get("kv_usage_ratio") or 0.0)
        least = min(engines, key=lambda one: one.get("kv_usage_ratio") or 0.0)
    return f"the load is uneven over {len(engines)} engines: {_load(most)}, {_load(least)}"


def _load(one: Mapping) -> str:
    usage = one.get("kv_usage_ratio")
    return f"engine {one['engine']} runs {one.get('running') or 0:.0f} while {one.get('waiting') or 0:.0f} wait" + (
        f", KV {usage:.0%}" if usage is not None else "")


def _cached(row: Mapping | None) -> float | None:
    value = None if row is None else row.get("cached_ratio")
    return None if value is None or pd.isna(value) else float(value)


def _prefill_share(summary: Mapping, row: Mapping) -> float | None:
    """Share of the computed tokens (prompts without cache hits, plus outputs) that belong to prompts."""
    prompts, outputs = summary.get("prompt_tokens"), summary.get("generation_tokens")
    if prompts is None or not outputs:
        return None
    computed = prompts * (1 - (row.get("cached_ratio") or 0.0))
    return computed / (computed + outputs)


def _before_scheduler(figures: Mapping, summary: Mapping) -> float | None:
    """Mean seconds of TTFT that are neither prefill nor waiting in the scheduler's queue (by Little's law, its mean
    length over the rate) nor for the two steps that are under way when a request comes; None where unknown."""
    mean, prefill, waiting = figures["server_ttft_mean_s"], figures["server_prefill_mean_s"], figures["waiting"]
    count = summary.get("server_ttft_count")
    if mean is None or prefill is None or waiting is None or not count:
        return None
    step_s = figures.get("prefill_step_mean_s") or summary.get("server_itl_mean_s") or 0.0
    queued_s = waiting * (summary["end_s"] - summary["start_s"]) / count
    return max(mean - prefill - queued_s - 2 * step_s, 0.0)


def _budget_full(figures: Mapping, budget: int | None) -> float | None:
    """Share of the prompt-carrying steps that fill the budget: the virtual clock's, else how full a mean step is."""
    if "budget_full_ratio" in figures or not budget or figures["iteration_tokens_mean"] is None:
        return figures.get("budget_full_ratio")
    return min(figures["iteration_tokens_mean"] / budget, 1.0)


def context(figures: Mapping, summary: Mapping, row: Mapping, limits: Limits,
             stragglers: Mapping | None) -> list[str]:
    """The figures around the verdict, one sentence each, only those that are known."""
    said, budget = [], limits.max_num_batched_tokens
    if figures["waiting"] is not None:
        reasons = ", ".join(f"{why} {mean:.1f}" for why, mean in summary.get("waiting_by_reason", {}).items() if mean)
        said.append(f"{figures['waiting']:.1f} requests wait on average" + (f" ({reasons})" if reasons else "")
                    + f", {figures['running']:.1f} run"
                    + (f" of {limits.max_num_seqs * int(figures['engines'])} slots" if limits.max_num_seqs else ""))
    if figures["kv_usage_ratio"] is not None:
        said.append(f"KV blocks {figures['kv_usage_ratio']:.0%} in use on average, {figures['kv_usage_ratio_max']:.0%} "
                    f"at the peak, {figures['preemptions'] or 0:.0f} preemptions"
                    + (f"; {figures['kv_usage_ratio_worst']:.0%} in the fullest of {figures['engines']:.0f} engines"
                       if figures["engines"] > 1 else ""))
    if (sentence := uneven(by_engine(summary))) is not None:
        said.append(sentence)
    if "prefill_step_mean_s" in figures and figures["budget_full_ratio"] is not None:
        said.append(f"the token budget of {budget} is filled in {figures['budget_full_ratio']:.0%} of the steps that "
                    f"carry prompt chunks; such a step takes {1e3 * figures['prefill_step_mean_s']:.0f} ms"
                    + (f", a pure decode step {1e3 * figures['decode_step_mean_s']:.1f} ms"
                       if "decode_step_mean_s" in figures else ""))
    elif figures["iteration_tokens_mean"] is not None and budget:
        said.append(f"a step computes {figures['iteration_tokens_mean']:.0f} tokens on average of a budget of {budget}")
    active = [f"{name} {figures[key]:.0%}" for name, key in (
        ("SMs", "sm_active_ratio"), ("DRAM", "dram_active_ratio"), ("tensor pipes", "tensor_active_ratio"),
        ("any kernel", "gpu_busy_ratio")) if figures[key] is not None]
    if active:
        said.append("active: " + ", ".join(active))
    if figures["nvlink_tx_bytes_per_s"]:
        said.append(nvlink(figures["nvlink_tx_bytes_per_s"], limits.link_bytes_per_s))
    if stragglers and stragglers.get("gpus", 0) > 1:
        said += [one["sentence"].rstrip(".") for one in stragglers["stragglers"]] or \
            [f"none of the {stragglers['gpus']} GPUs runs slower than its peers"]
    if row.get("driver") == "locust" and not row.get("client_limited"):
        said.append("the load generator kept up")
    return said


def nvlink(sent: float, link_bytes_per_s: float | None) -> str:
    """What a GPU sends over NVLink, in words."""
    return f"NVLink sends {sent / 1e9:.3g} GB/s a GPU" + (
        f", {sent / link_bytes_per_s:.0%} of its rate" if link_bytes_per_s else "")
