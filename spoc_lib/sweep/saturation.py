"""What stopped it: which resource is used up at the limit, with the figures that say so.

The rules, in order (the first that applies decides; all figures are given whichever does)
1. client: the load generator could not keep up.
2. throttled_gpu: one GPU held its peers back for at least half of the window.
3. kv_blocks: requests wait or are preempted while nearly all KV blocks are in use; or the prefix cache collapses: its
   hit rate falls well below that of the last rung within the SLA, because the pool no longer holds what all users
   come back for (cached blocks that nobody uses at the moment count as free, so the usage gauge does not show it).
4. sequence_slots: requests wait while as many run as `max_num_seqs` allows.
5. interconnect: kernels run nearly all the time, on few of the SMs: the GPUs wait for one another in collectives.
6. host: the GPUs are mostly idle while requests wait or the SLA is missed; or most of TTFT passes before the scheduler
   sees the request (HTTP, tokenizer, queues between processes).
7. token_budget: TTFT binds, requests wait, every step is filled to `max_num_batched_tokens`, and ITL has room left: a
   larger budget would compute more tokens a step.
8. prefill_compute or decode_bandwidth: by what the binding latency waits for. How long steps with and without
   prompt chunks take is known exactly on the virtual clock; else it is inferred from tokens and GPU activity.
9. unknown, with what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spoc_lib.sweep.evidence import Limits, by_engine, context, gather, nvlink
from spoc_lib.telemetry.timeline import FIGURES

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
#: GPUs whose SMs are less active than this are not what stops it.
IDLE_GPU = 0.35
#: Share of the time from which some kernel counts as always running, and of the SMs below which they are collectives.
ALWAYS_BUSY, FEW_SMS = 0.8, 0.5
#: Share of the mean TTFT, and of its limit, from which what passes before the scheduler is what stops it.
BEFORE_SCHEDULER, BEFORE_LIMIT = 0.5, 0.25
#: The token budget is what stops it where it is filled this often, and p95 ITL takes at most this share of its limit.
BUDGET_FULL, ITL_ROOM = 0.8, 0.6


@dataclass(frozen=True, slots=True)
class Saturation:
    """`resource`: prefill_compute | decode_bandwidth | kv_blocks | sequence_slots | token_budget | interconnect |
    throttled_gpu | host | client | unknown; `evidence`: sentences with figures, the deciding one first; `figures`: the
    numbers in them."""

    resource: str
    evidence: list[str]
    figures: dict[str, float | None] = field(default_factory=dict)


def saturation(summary: Mapping, row: Mapping, limits: Limits, *, step_figures: Mapping[str, float] | None = None,
               binding: Mapping | None = None, within: Mapping | None = None,
               stragglers: Mapping | None = None) -> Saturation:
    """What is used up in a rung at or just beyond the limit.

    summary: `telemetry.timeline.window_summary` of its window; row: its RUNGS row; step_figures: of the virtual
    clock's steps; binding: SLO_VERDICTS row (metric, limit_s) of the SLO that binds; within: RUNGS row of the last rung
    within the SLA; stragglers: the window's `StragglerReport` as a dictionary.
    """
    figures = gather(summary, row, limits, step_figures or {}, within)
    queue = (figures["waiting"] or 0.0) >= QUEUE
    late = queue or row.get("verdict") == "missed"
    engines = by_engine(summary)
    decided = (_client(row) or _throttled(stragglers, row) or _kv_blocks(engines)
               or _cache_collapse(figures, row, within) or _slots(engines, limits.max_num_seqs)
               or _interconnect(figures, late, limits.link_bytes_per_s) or _host(figures, late)
               or _frontend(figures, binding) or _token_budget(figures, row, queue, binding, limits)
               or _gpu(figures, binding))
    resource, reason = decided or ("unknown", _untold(summary))
    return Saturation(resource, [reason, *context(figures, summary, row, limits, stragglers)], figures)


def _untold(summary: Mapping) -> str:
    """Why nothing can be said: what was not recorded."""
    missing = summary.get("missing", [])
    if not missing:
        return "of the metrics recorded none points to a resource"
    if set(missing) == {*FIGURES}:
        return "neither the server's metrics page nor GPU counters were recorded"
    return f"the metrics that would tell were not recorded: {', '.join(missing)}"


def _client(row: Mapping) -> tuple[str, str] | None:
    if row.get("client_limited"):
        return "client", "the load generator could not keep up: the server was not at its limit"
    return None


def _throttled(stragglers: Mapping | None, row: Mapping) -> tuple[str, str] | None:
    half_s = (row["window_end_s"] - row["window_start_s"]) / 2
    long = [one for one in (stragglers or {}).get("stragglers", []) if one["end_s"] - one["start_s"] >= half_s]
    if not long:
        return None
    return "throttled_gpu", "one GPU holds its peers back: " + long[0]["sentence"].rstrip(".")


def _kv_blocks(engines: Sequence[Mapping]) -> tuple[str, str] | None:
    """Each engine has a pool and a queue of its own: one that is full stops those whom it serves."""
    for one in sorted(engines, key=lambda one: -(one.get("kv_usage_ratio") or 0.0)):
        usage, waiting, preempted = one.get("kv_usage_ratio"), one.get("waiting") or 0.0, one.get("preemptions") or 0.0
        if usage is None or (usage < KV_FULL and not (one["kv_usage_ratio_max"] >= KV_FULL and preempted > 0)):
            continue
        if waiting >= QUEUE or preempted:
            return "kv_blocks", (f"KV blocks{_of(one, engines)} are {usage:.0%} in use (peak "
                                 f"{one['kv_usage_ratio_max']:.0%}) while {waiting:.1f} requests wait and "
                                 f"{preempted:.0f} were preempted")
    return None


def _of(one: Mapping, engines: Sequence[Mapping]) -> str:
    return f" of engine {one['engine']}" if len(engines) > 1 else ""


def collapsed(before: float, now: float) -> bool:
    """Whether a hit rate fell from `before` to `now` in a way that multiplies the work."""
    return before - now >= COLLAPSE_LEAST and (1 - now) >= COLLAPSE_FACTOR * (1 - before)


def _cache_collapse(figures: Mapping, row: Mapping, within: Mapping | None) -> tuple[str, str] | None:
    now, before = figures["cached_ratio"], figures["cached_within_ratio"]
    if within is None or now is None or before is None or not collapsed(before, now):
        return None
    return "kv_blocks", (f"the prefix cache collapses: {before:.0%} of the prompt tokens come from it at "
                         f"{within['users']} users, {now:.0%} at {row['users']}; the KV pool no longer holds what the "
                         f"users come back for, and their histories are computed anew")


def _slots(engines: Sequence[Mapping], max_num_seqs: int | None) -> tuple[str, str] | None:
    """`max_num_seqs` holds for one engine: the one that is full, with a queue, is told; all of them as sums."""
    full = [one for one in engines if max_num_seqs and (one.get("waiting") or 0.0) >= QUEUE / len(engines)
            and (one.get("running") or 0.0) >= 0.95 * max_num_seqs]
    waiting = sum(one["waiting"] for one in full)
    if not full or not max_num_seqs or waiting < QUEUE:
        return None
    where = "" if len(engines) == 1 else f" in {len(full)} of {len(engines)} engines ({max_num_seqs} each)" \
        if len(full) > 1 else _of(full[0], engines)
    return "sequence_slots", (f"{sum(one['running'] for one in full):.0f} requests run of max_num_seqs = "
                              f"{max_num_seqs * len(full)}{where} while {waiting:.1f} wait")


def _interconnect(figures: Mapping, late: bool, link_bytes_per_s: float | None) -> tuple[str, str] | None:
    busy, active = figures["gpu_busy_ratio"], figures["sm_active_ratio"]
    if not late or busy is None or active is None or busy < ALWAYS_BUSY or active >= FEW_SMS * busy:
        return None
    sent = figures["nvlink_tx_bytes_per_s"]
    if not sent:
        return None
    return "interconnect", (f"some kernel runs {busy:.0%} of the time, on {active:.0%} of the SMs: the GPUs wait for "
                            f"one another in collectives; {nvlink(sent, link_bytes_per_s)}")


def _host(figures: Mapping, late: bool) -> tuple[str, str] | None:
    active = figures["sm_active_ratio"]
    if active is None or not late or active >= IDLE_GPU:
        return None
    return "host", (f"the GPUs' SMs are active only {active:.0%} of the time while {figures['waiting'] or 0:.1f} "
                    f"requests wait and {figures['running'] or 0:.1f} run: what schedules them is slower than they are")


def _frontend(figures: Mapping, binding: Mapping | None) -> tuple[str, str] | None:
    before, mean = figures["before_scheduler_s"], figures["server_ttft_mean_s"]
    if before is None or not binding or binding["metric"] != "ttft":
        return None
    if before < BEFORE_SCHEDULER * mean or before < BEFORE_LIMIT * binding["limit_s"]:
        return None
    return "host", (f"of a mean TTFT of {mean:.2f} s, {before:.2f} s pass before the scheduler sees the request (HTTP, "
                    f"tokenizer, queues between processes), {figures['server_prefill_mean_s']:.2f} s in prefill")


def _token_budget(figures: Mapping, row: Mapping, queue: bool, binding: Mapping | None,
                  limits: Limits) -> tuple[str, str] | None:
    full, itl_s = figures["budget_full_ratio"], row.get("itl_p95_s")
    if not queue or full is None or full < BUDGET_FULL or not binding or not binding["metric"].startswith("ttft"):
        return None
    if limits.itl_limit_s is not None and (itl_s is None or not itl_s <= ITL_ROOM * limits.itl_limit_s):
        return None
    return "token_budget", (f"{full:.0%} of the steps that carry prompt chunks are filled to max_num_batched_tokens = "
                            f"{limits.max_num_batched_tokens} while {figures['waiting']:.1f} requests wait; p95 ITL is "
                            f"{1e3 * (itl_s or 0):.0f} ms" + (f" of {1e3 * limits.itl_limit_s:.0f} ms allowed"
                                                              if limits.itl_limit_s else "")
                            + ": a larger budget would compute more tokens a step")


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
