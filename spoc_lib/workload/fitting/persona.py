"""Alike recorded sessions as one persona: quantiles of sizes and times, growth, compactions, common ground."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special

from spoc_lib.core.stats import percentile
from spoc_lib.workload.fitting.growth import OPENING_TURNS, growth_of, tuned
from spoc_lib.workload.fitting.shapes import quantiles, survived
from spoc_lib.workload.model.plan import MIN_APPEND_TOKENS
from spoc_lib.workload.template import MESSAGE_TOKENS
from spoc_lib.workload.traces.result import ImportResult
from spoc_lib.workload.traces.sessions import Session

#: Percentages at which a fit is checked.
CHECKED = (25, 50, 75, 90)
#: A compaction above this part of the context limit was forced by it.
NEAR_LIMIT_RATIO = 0.9
QUANTITIES = ("requests a session", "first prompt, tokens", "last prompt, tokens", "growth a step, tokens",
              "output, tokens", "gap after a tool, s", "gap before a human turn, s", "steps a human turn")


def describe(result: ImportResult) -> dict[str, Any]:
    """Imported sessions as a document of one persona, `imported`, for those who play the recording itself."""
    sessions = result.main_sessions
    longest = max(r.prompt_tokens + r.output_tokens for s in sessions for r in s.requests)
    # where contexts are cut or rewritten is the recording's own doing: the persona only gives sizes and times
    persona = persona_of("imported", sessions, 1.0, to_an_end=False) | {
        "at_context_limit": "end", "context_limit_tokens": longest + 1, "rewrite_share": 0.0, "pullback_share": 0.0,
        "compact_to_tokens": None, "end_share_at_limit": 0.0}
    return {"name": "imported", "title": f"{len(sessions)} recorded sessions", "source": ", ".join(result.sources),
            "personas": [persona], "geometry": geometry_of(sessions)}


def measured_quantities(sessions: list[Session]) -> dict[str, np.ndarray]:
    """Values of each quantity over recorded sessions."""
    rows: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for session in sessions:
        tally(rows, [(r.prompt_tokens, r.output_tokens, r.gap_s, r.human) for r in session.requests])
    return {name: np.asarray(values, dtype=float) for name, values in rows.items()}


def tally(rows: dict[str, list[float]], requests: Sequence[tuple[int, int, float | None, bool]]) -> None:
    """Add one conversation's values to `rows`, a list a quantity. requests: (prompt, output, gap, human) in order."""
    prompts = [request[0] for request in requests]
    rows["requests a session"].append(len(requests))
    rows["first prompt, tokens"].append(prompts[0])
    rows["last prompt, tokens"].append(prompts[-1])
    rows["growth a step, tokens"] += [b - a for a, b in zip(prompts, prompts[1:], strict=False)]
    rows["output, tokens"] += [request[1] for request in requests]
    steps = 0
    for k, (_, _, gap, human) in enumerate(requests):
        if k and gap is not None:
            rows["gap before a human turn, s" if human else "gap after a tool, s"].append(gap)
        if human and steps:
            rows["steps a human turn"].append(steps)
            steps = 0
        steps += 1
    rows["steps a human turn"].append(steps)


def persona_of(name: str, sessions: list[Session], share: float, *, to_an_end: bool = True) -> dict[str, Any]:
    """A persona of alike sessions. to_an_end: whether conversations are scaled to where they end, or turns only keep
    the sizes that were recorded."""
    values = measured_quantities(sessions)
    shape = growth_of(sessions)
    growth, opening = (shape.relative(steps) if to_an_end else steps[:, 0] for steps in (shape.later, shape.opening))
    compactions = shape.compactions
    longest = max(r.prompt_tokens + r.output_tokens for s in sessions for r in s.requests)
    persona: dict[str, Any] = {
        "name": name,
        "title": f"{len(sessions)} sessions, first prompt about {percentile(values['first prompt, tokens'], 50):,.0f}",
        "share": round(share, 6),
        "prompt_start_tokens": quantiles(values["first prompt, tokens"]),
        "growth_tokens": quantiles(growth),
        "growth_follows_output": _correlation(growth, np.asarray(shape.outputs, dtype=float)),
        "opening_growth_tokens": quantiles(opening) if len(opening) else None,
        "opening_turns": OPENING_TURNS if len(opening) else 0,
        **(shape.ends if to_an_end else {}),
        "output_tokens": quantiles(values["output, tokens"]),
        "turns": quantiles(values["requests a session"]),
        "steps_per_human_turn": _run_lengths(sessions),
        "agent_gap_s": quantiles(values["gap after a tool, s"], 9.0),
        "human_gap_s": quantiles(values["gap before a human turn, s"], 127.0),
        "rewrite_share": round(shape.rewrites / max(1, shape.steps), 5),
        "context_limit_tokens": int(longest),
        "at_context_limit": "end",
    }
    full = [before for before, _ in compactions if before > 0.5 * longest]
    if len(full) >= max(5, 0.05 * len(sessions)):
        limit = persona["context_limit_tokens"] = int(percentile(full, 90))
        persona["at_context_limit"] = "compact"
        full = [before for before in full if before >= NEAR_LIMIT_RATIO * limit]
        # a group that is not cut back at its limit is described by where its sessions really end, cuts and all
        persona |= shape.uncut if to_an_end else {}
        persona["pullback_share"] = round((len(compactions) - len(full)) / max(1, shape.steps), 5)
        persona["compact_to_tokens"] = quantiles(np.asarray([after for _, after in compactions]))
    return tuned(persona, shape) if to_an_end else persona


def _run_lengths(sessions: list[Session]) -> Any:
    """Requests from one human turn to the next, by Kaplan and Meier's estimate; the longest run ends the curve.

    A session's last run may have ended with it or have been cut off by it: it counts half as each.
    """
    ended: dict[int, float] = defaultdict(float)
    cut: dict[int, float] = defaultdict(float)
    for session in sessions:
        starts = [k for k, request in enumerate(session.requests) if request.human or k == 0]
        for start, end in zip(starts, [*starts[1:], len(session.requests)], strict=True):
            last = 0.5 if end == len(session.requests) else 0.0
            ended[end - start] += 1 - last
            cut[end - start] += last
    return quantiles(survived(ended, cut))


def _correlation(growth: np.ndarray, output: np.ndarray) -> float:
    """Copula correlation at which growth keeps its quantiles.

    A played prompt grows at least by the reply that it echoes, which lifts growth where a drawn output exceeds it
    (recordings drop reasoning there). The least correlation is taken at which that lifts no quantile by over 2.5 %.
    """
    if len(growth) < 50:
        return 0.0
    n = 40_000
    u, v = ((np.arange(n) * step) % 1.0 for step in (0.6180339887498949, 0.7548776662466927))
    z, w = special.ndtri(np.clip(u, 1e-9, 1 - 1e-9)), special.ndtri(np.clip(v, 1e-9, 1 - 1e-9))
    least = np.quantile(output, u) + 2 * MESSAGE_TOKENS + MIN_APPEND_TOKENS
    wanted = np.percentile(growth, CHECKED)
    for rho in np.arange(0.0, 0.96, 0.05):
        drawn = np.quantile(growth, special.ndtr(rho * z + math.sqrt(1 - rho**2) * w))
        if (np.abs(np.percentile(np.maximum(drawn, least), CHECKED) / wanted - 1) <= 0.025).all():
            return round(float(rho), 2)
    return 0.95


def geometry_of(sessions: list[Session]) -> dict[str, Any]:
    """Common ground: tools and system prompt where the source states them, else what sessions share with others."""
    tools = [s.root_tokens[0] for s in sessions if s.root_tokens]
    system = [s.root_tokens[1] for s in sessions if len(s.root_tokens) > 1]
    root = percentile(tools, 50) if tools else 1.0
    level = {"count": 1, "zipf": 0.0, "tokens": 1}
    return {
        "organisation_tokens": int(root),
        "repositories": {"count": 12 if system else 1, "zipf": 1.0, "tokens": quantiles(np.asarray(system))},
        "directories": level, "files": level,
        "depth": {"organisation": 0.0 if system else 1.0, "repository": 1.0 if system else 0.0},
        "max_shared_ratio": 0.95,
    }
