"""What stopped it: which resource is used up at the limit, with the figures that say so.

The rules, in order (the first that applies decides; all figures are given whichever does)
1. client: the load generator could not keep up.
2. kv_blocks: requests wait or are preempted while nearly all KV blocks are in use; or the prefix cache collapses: its
   hit rate falls well below that of the last rung within the SLA, because the pool no longer holds what all users
   come back for (cached blocks that nobody uses at the moment count as free, so the usage gauge does not show it).
3. sequence_slots: requests wait while as many run as `max_num_seqs` allows.
4. host: requests wait, yet the GPUs are mostly idle.
5. prefill_compute or decode_bandwidth: by what the binding latency waits for. How long steps with and without
   prompt chunks take is known exactly on the virtual clock; else it is inferred from tokens and GPU activity.
6. unknown, with what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

#: KV usage from which the pool counts as full: the scheduler keeps a request waiting when it lacks a single
#: block.
KV_FULL = 0.95
#: The prefix cache collapses where the share of prompt tokens that it misses grows by this factor, and by this much:
#: what is missed is what must be computed.
COLLAPSE_FACTOR, COLLAPSE_LEAST = 2.0, 0.05
#: Waiting requests (mean in the window) that count as a queue.
QUEUE = 0.5
#: Share of the step time that one kind of step must take to be what stops it.
MAJORITY = 0.5
#: GPUs less active than this while requests wait are not what stops it.
IDLE_GPU = 0.35


@dataclass(frozen=True, slots=True)
class Saturation:
    """`resource`: prefill_compute | decode_bandwidth | kv_blocks | sequence_slots | host | client | unknown;
    `evidence`: sentences with figures, the deciding one first; `figures`: the numbers in them."""

    resource: str
    evidence: list[str]
    figures: dict[str, float | None] = field(default_factory=dict)


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


def saturation(summary: Mapping, row: Mapping, *, max_num_seqs: int | None, max_num_batched_tokens: int | None,
               step_figures: Mapping[str, float] | None = None, binding: Mapping | None = None,
               within: Mapping | None = None) -> Saturation:
    """What is used up in a rung at or just beyond the limit.

    summary: `telemetry.timeline.window_summary` of its window; row: its RUNGS row; max_num_seqs and
    max_num_batched_tokens: the server's flags (None where unknown); steps: the virtual clock's steps;
    binding: SLO_VERDICTS row (metric, limit_s) of the SLO that binds; within: RUNGS row of the last rung within the
    SLA.
    """
    figures = {key: summary.get(key) for key in (
        "kv_usage_ratio", "kv_usage_ratio_max", "running", "running_max", "waiting", "preemptions", "sm_active_ratio",
        "dram_active_ratio", "tensor_active_ratio", "iteration_tokens_mean")}
    figures |= step_figures or {}
    figures["prefill_token_ratio"] = _prefill_share(summary, row)
    queue = (figures["waiting"] or 0.0) >= QUEUE
    figures["cached_ratio"], figures["cached_within_ratio"] = _cached(row), _cached(within)
    decided = (_client(row) or _kv_blocks(figures, queue) or _cache_collapse(figures, row, within)
               or _slots(figures, queue, max_num_seqs) or _host(figures, queue) or _gpu(figures, binding))
    resource, reason = decided or ("unknown", "the metrics that would tell were not recorded: "
                                   + (", ".join(summary.get("missing", [])) or "none point to a resource"))
    return Saturation(resource, [reason, *_context(figures, summary, max_num_seqs, max_num_batched_tokens)], figures)


def _client(row: Mapping) -> tuple[str, str] | None:
    if row.get("client_limited"):
        return "client", "the load generator could not keep up: the server was not at its limit"
    return None


def _kv_blocks(figures: Mapping, queue: bool) -> tuple[str, str] | None:
    usage, peak, preempted = figures["kv_usage_ratio"], figures["kv_usage_ratio_max"], figures["preemptions"] or 0
    if usage is None or (usage < KV_FULL and not (peak >= KV_FULL and preempted > 0)):
        return None
    if not queue and not preempted:
        return None
    return "kv_blocks", (f"KV blocks are {usage:.0%} in use (peak {peak:.0%}) while {figures['waiting'] or 0:.1f} "
                         f"requests wait and {preempted:.0f} were preempted")


def _cached(row: Mapping | None) -> float | None:
    value = None if row is None else row.get("cached_ratio")
    return None if value is None or pd.isna(value) else float(value)


def collapsed(before: float, now: float) -> bool:
    """Whether a hit rate fell from `before` to `now` in a way that multiplies the work."""
    return before - now >= COLLAPSE_LEAST and (1 - now) >= COLLAPSE_FACTOR * (1 - before)


def _cache_collapse(figures: Mapping, row: Mapping, within: Mapping | None) -> tuple[str, str] | None:
    now, before = figures["cached_ratio"], figures["cached_within_ratio"]
    if now is None or before is None or not collapsed(before, now):
        return None
    return "kv_blocks", (f"the prefix cache collapses: {before:.0%} of the prompt tokens come from it at "
                         f"{within['users']} users, {now:.0%} at {row['users']}; the KV pool no longer holds what the "
                         f"users come back for, and their histories are computed anew")


def _slots(figures: Mapping, queue: bool, max_num_seqs: int | None) -> tuple[str, str] | None:
    running = figures["running"]
    if running is None or not max_num_seqs or not queue or running < 0.95 * max_num_seqs:
        return None
    return "sequence_slots", (f"{running:.0f} requests run of max_num_seqs = {max_num_seqs} while "
                              f"{figures['waiting']:.1f} wait")


def _host(figures: Mapping, queue: bool) -> tuple[str, str] | None:
    active = figures["sm_active_ratio"]
    if active is None or not queue or active >= IDLE_GPU or figures.get("engine_busy_ratio", 0) > 0.9:
        return None
    return "host", (f"{figures['waiting']:.1f} requests wait although the GPUs' SMs are active only {active:.0%} of "
                    f"the time: what schedules them is slower than they are")


def _gpu(figures: Mapping, binding: Mapping | None) -> tuple[str, str] | None:
    """Prompts or decoding? Asked of the latency that binds: TTFT waits for prompts to be computed, ITL for the step."""
    metric, limit_s = (binding["metric"], binding["limit_s"]) if binding else (None, None)
    if "prefill_step_time_ratio" in figures:
        return _by_steps(figures, metric, limit_s)
    tensor, dram, prefill = figures["tensor_active_ratio"], figures["dram_active_ratio"], figures["prefill_token_ratio"]
    if tensor is not None and dram is not None:
        seen = f"tensor pipes are active {tensor:.0%} of the time, DRAM {dram:.0%}"
    elif prefill is not None:
        seen = "no GPU counters were recorded, so this is inferred from tokens alone"
    else:
        return None
    if prefill is not None:
        seen += f"; {prefill:.0%} of the tokens computed belong to prompts"
    if metric in ("ttft", "ttft_per_prompt_token"):
        return "prefill_compute", f"what binds is TTFT, the wait for prompts to be computed: {seen}"
    heavy = prefill >= 0.8 if prefill is not None else tensor >= dram
    return ("prefill_compute", f"prompts fill the steps that tokens wait for: {seen}") if heavy else \
        ("decode_bandwidth", f"decoding fills the steps: {seen}")


def _by_steps(figures: Mapping, metric: str | None, limit_s: float | None) -> tuple[str, str]:
    share, busy = figures["prefill_step_time_ratio"], figures["engine_busy_ratio"]
    mixed, pure = figures.get("prefill_step_mean_s"), figures.get("decode_step_mean_s")
    times = f"{share:.0%} of the step time goes to steps that carry prompt chunks, the engine is busy {busy:.0%}"
    if metric == "itl" and mixed is not None and pure is not None and limit_s is not None:
        spans = (f"a step that carries a prompt chunk takes {1e3 * mixed:.0f} ms, a pure decode step "
                 f"{1e3 * pure:.1f} ms, against a limit of {1e3 * limit_s:.0f} ms on ITL")
        if pure < 0.8 * limit_s:
            return "prefill_compute", f"tokens wait for prompt chunks that share their step: {spans}; {times}"
        return "decode_bandwidth", f"decode steps alone reach the limit: {spans}; {times}"
    if metric in ("ttft", "ttft_per_prompt_token"):
        return "prefill_compute", f"what binds is TTFT, the wait for prompts to be computed: {times}"
    if share >= MAJORITY:
        return "prefill_compute", times
    return "decode_bandwidth", (f"{1 - share:.0%} of the step time goes to pure decode steps, "
                                f"{figures.get('decodes_per_step', 0):.0f} sequences at a time, the engine is busy "
                                f"{busy:.0%}")


def _prefill_share(summary: Mapping, row: Mapping) -> float | None:
    """Share of the computed tokens (prompts without cache hits, plus outputs) that belong to prompts."""
    prompts, outputs = summary.get("prompt_tokens"), summary.get("generation_tokens")
    if prompts is None or not outputs:
        return None
    computed = prompts * (1 - (row.get("cached_ratio") or 0.0))
    return computed / (computed + outputs)


def _context(figures: Mapping, summary: Mapping, max_num_seqs: int | None, budget: int | None) -> list[str]:
    """The figures around the verdict, one sentence each, only those that are known."""
    said = []
    if figures["waiting"] is not None:
        reasons = ", ".join(f"{why} {mean:.1f}" for why, mean in summary.get("waiting_by_reason", {}).items() if mean)
        said.append(f"{figures['waiting']:.1f} requests wait on average" + (f" ({reasons})" if reasons else "")
                    + f", {figures['running']:.1f} run" + (f" of {max_num_seqs} slots" if max_num_seqs else ""))
    if figures["kv_usage_ratio"] is not None:
        said.append(f"KV blocks {figures['kv_usage_ratio']:.0%} in use on average, {figures['kv_usage_ratio_max']:.0%} "
                    f"at the peak, {figures['preemptions'] or 0:.0f} preemptions")
    full = figures.get("budget_full_ratio")
    if full is not None:
        said.append(f"the token budget of {budget} is filled in {full:.0%} of the steps that carry prompt chunks; such "
                    f"a step takes {1e3 * figures['prefill_step_mean_s']:.0f} ms"
                    + (f", a pure decode step {1e3 * figures['decode_step_mean_s']:.1f} ms"
                       if "decode_step_mean_s" in figures else ""))
    elif figures["iteration_tokens_mean"] is not None and budget:
        said.append(f"a step computes {figures['iteration_tokens_mean']:.0f} tokens on average of a budget of {budget}")
    active = [f"{name} {figures[key]:.0%}" for name, key in (
        ("SMs", "sm_active_ratio"), ("DRAM", "dram_active_ratio"), ("tensor pipes", "tensor_active_ratio"))
        if figures[key] is not None]
    if active:
        said.append("active: " + ", ".join(active))
    return said
