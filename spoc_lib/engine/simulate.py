"""`spoc engine simulate` as a library call: a cluster, a number of users, the figures of a virtual run."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pandas as pd

from spoc_lib.config import load_cluster
from spoc_lib.core.stats import percentiles
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.steptime import passport
from spoc_lib.engine.virtual import VirtualRun, play
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
    """What a run says in its window: latencies in seconds, rates a second.

    TTFT: requests answered in the window; failed ones and those that have waited for half the window or longer
    without an answer count as infinite (shorter waits at the end say nothing yet and are left out).
    """
    start, end = run.window
    requests, chunks, steps = run.requests, run.chunks, run.steps
    answered = requests[(requests["first_token_s"] >= start)]
    failed = (requests["outcome"] == "failed") & (requests["send_s"] >= start)
    waiting = requests["first_token_s"].isna() & ~failed & (requests["send_s"] <= (start + end) / 2)
    hopeless = int(failed.sum() + (waiting & (requests["outcome"] == "censored")).sum())
    inside = chunks[(chunks["time_s"] >= start) & (chunks["time_s"] <= end)]
    within = steps[(steps["end_s"] > start)]
    duration = within["duration_s"]
    queries = float(within["prefix_queries"].sum())
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
        "completed": int((requests["outcome"] == "completed").sum()),
        "failed": int((requests["outcome"] == "failed").sum()),
        "censored": int((requests["outcome"] == "censored").sum()),
        "ttft_s": percentiles(np.append(answered["ttft_s"].to_numpy(), np.full(hopeless, np.inf))),
        "itl_s": percentiles(inter_token_s(inside)),
        "output_tokens_per_s": float(inside["tokens"].sum()) / (end - start),
        "prompt_tokens_per_s": float(answered["intended_prompt_tokens"].sum()) / (end - start),
        "cached_ratio": float(within["prefix_hits"].sum()) / queries if queries else 0.0,
        "kv_usage_ratio": float(np.average(within["kv_usage_ratio"], weights=duration)) if len(within) else 0.0,
        "running_mean": float(np.average(within["running"], weights=duration)) if len(within) else 0.0,
        "waiting_mean": float(np.average(within["waiting"], weights=duration)) if len(within) else 0.0,
        "preemptions": int(within["preempted"].sum()),
        "steps": len(within),
        "passport": run.passport,
    }


def inter_token_s(chunks: pd.DataFrame) -> np.ndarray:
    """Gaps between a request's chunks divided over the tokens they carry, one value a token (seconds)."""
    order = np.lexsort((chunks["time_s"].to_numpy(), chunks["request"].to_numpy()))
    request = chunks["request"].to_numpy()[order]
    at, tokens = chunks["time_s"].to_numpy()[order], chunks["tokens"].to_numpy()[order]
    follows = np.diff(request) == 0
    carried = tokens[1:][follows]
    return np.repeat((np.diff(at)[follows] / carried), np.maximum(carried, 1).astype(int))
