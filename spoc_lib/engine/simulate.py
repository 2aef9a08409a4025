"""`spoc engine simulate` as a library call: a cluster, a number of users, the figures of a virtual run."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from spoc_lib.config import load_cluster
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.steptime import passport
from spoc_lib.engine.virtual import VirtualRun, play
from spoc_lib.metrics import Measured
from spoc_lib.workload import build_script


def simulate(cluster_name: str, *, users: int, duration_s: float, warmup_s: float = 60.0, personas: str | None = None,
             seed: int = 0, gap_cap_s: float = 60.0, start: Literal["stationary", "cold"] = "stationary",
             flags: dict[str, Any] | None = None, strict: bool = False) -> dict[str, Any]:
    """Play `users` users on the twin of a cluster; see `figures` for the keys.

    strict: InputError where the engine, or what the run came to ask of it, lies outside the measured range; else
    `passport.outside` of the result says it.
    """
    cluster = load_cluster(cluster_name)
    engine = EmbeddedEngine.from_cluster(cluster, flags or {})
    engine.outside(strict=strict)
    script = build_script(personas or cluster.personas, seed, gap_cap_s=gap_cap_s, start=start,
                          context_limit=engine.max_model_len)
    run = play(script, users, engine=engine, duration_s=duration_s, warmup_s=min(warmup_s, duration_s / 2))
    if strict:
        passport.refuse(run.passport.get("outside", []))
    return figures(run) | {"cluster": cluster.name, "engine": engine.describe()}


def figures(run: VirtualRun) -> dict[str, Any]:
    """What a run says in its window: latencies in seconds, rates a second (see `metrics`); its steps' means."""
    start, end = run.window
    requests, steps = run.requests, run.steps
    seen = Measured(requests, run.chunks, run.window, run.simulated_s)
    within = steps[(steps["end_s"] >= start) & (steps["end_s"] < end)]
    duration = within["duration_s"]
    queries = float(within["prefix_queries"].sum())
    rates = seen.numbers("output_tokens_per_s", "prompt_tokens_per_s", "request_rate_per_s", "cached_ratio")
    if rates["cached_ratio"] is None:  # no request told it: the engine's own count
        rates["cached_ratio"] = float(within["prefix_hits"].sum()) / queries if queries else 0.0
    return {
        "users": run.users,
        "simulated": True,
        "simulated_s": run.simulated_s,
        "wall_s": run.wall_s,
        "setup_s": run.setup_s,
        "speed": run.speed,
        "core": run.core,
        "window_s": [start, end],
        "requests": len(requests),
        **{name: int((requests["outcome"] == name).sum()) for name in ("completed", "failed", "censored")},
        **{f"{name}_s": seen.percentiles(name) for name in ("ttft", "itl", "tpot", "e2e")},
        **rates,
        "kv_usage_ratio": float(np.average(within["kv_usage_ratio"], weights=duration)) if len(within) else 0.0,
        "running_mean": float(np.average(within["running"], weights=duration)) if len(within) else 0.0,
        "waiting_mean": float(np.average(within["waiting"], weights=duration)) if len(within) else 0.0,
        "preemptions": int(within["preempted"].sum()),
        "steps": len(within),
        "passport": run.passport,
    }
