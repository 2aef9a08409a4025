"""How contexts grow: the growth of whole conversations told apart from the shape of single steps, for a fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.core import yamlfile
from spoc_lib.workload.fitting.shapes import COMPACTED_RATIO, POINTS, compacted, quantiles
from spoc_lib.workload.model import plan as plans
from spoc_lib.workload.model.persona import Persona
from spoc_lib.workload.template import MESSAGE_TOKENS
from spoc_lib.workload.traces.sessions import Session

#: A step that keeps less than this part of the prompt before it, without shrinking, rewrote its history.
REWRITTEN_RATIO = 0.95
#: Steps of a session that load its files, and grow the prompt more than later ones.
OPENING_TURNS = 5
#: Fewer values than these are no quantiles to tune to.
_FEWEST = 15
#: The strongest correlation that is fitted.
_MOST = 0.97
#: A tuning step moves a quantile by this power of its error; so many steps, each over so many conversations.
_DAMPING, _ROUNDS, _CONVERSATIONS = 0.8, 5, 1500


@dataclass(frozen=True)
class Growth:
    """Growing steps of a group of sessions. `later`, `opening`: a row a step (growth in tokens, session's mean).

    outputs: the reply before each of `later`;
    last: last prompts, in tokens;
    ends, uncut: the persona's fields for the prompt that a conversation comes to, as recorded and without compactions;
    compactions: (prompt before, prompt after); steps: all steps, of which `rewrites` resent a changed history.
    """

    later: np.ndarray
    opening: np.ndarray
    outputs: list[int]
    last: np.ndarray
    ends: dict[str, Any]
    uncut: dict[str, Any]
    compactions: list[tuple[int, int]]
    rewrites: int
    steps: int

    def relative(self, steps: np.ndarray) -> np.ndarray:
        """Growths as if every session grew by the mean of all: the shape that scaling starts from."""
        mean = np.concatenate([self.later[:, 0], self.opening[:, 0]]).mean()
        return steps[:, 0] / steps[:, 1] * mean


def growth_of(sessions: list[Session]) -> Growth:
    """The growth of a group of sessions."""
    later, opening, outputs, ends, uncut, compactions = [], [], [], [], [], []
    rewrites = steps = 0
    for session in sessions:
        rising: list[tuple[int, int, int]] = []
        for k, (a, b) in enumerate(zip(session.requests, session.requests[1:], strict=False), 1):
            steps += 1
            if b.prompt_tokens < COMPACTED_RATIO * a.prompt_tokens:
                compactions.append((a.prompt_tokens, b.prompt_tokens))
                continue
            rewrites += (b.own_tokens or 0) < REWRITTEN_RATIO * a.prompt_tokens
            if b.prompt_tokens > a.prompt_tokens:
                rising.append((k, b.prompt_tokens - a.prompt_tokens, a.output_tokens))
        total = sum(step for _, step, _ in rising)
        last = session.requests[-1].prompt_tokens
        ends.append(last)
        uncut.append(session.requests[0].prompt_tokens + total if compacted(session) else last)
        for k, step, output in rising:
            row = (step, total / len(rising))
            if k <= OPENING_TURNS:
                opening.append(row)
            else:
                later.append(row)
                outputs.append(output)
    return Growth(np.asarray(later, dtype=float).reshape(-1, 2), np.asarray(opening, dtype=float).reshape(-1, 2),
                  outputs, np.asarray(ends, dtype=float), _ends(sessions, ends), _ends(sessions, uncut), compactions,
                  rewrites, steps)


def _ends(sessions: list[Session], ends: Sequence[float]) -> dict[str, Any]:
    """The persona's `end_…` and `turns_follow_start`: a Gaussian copula of first prompt, turns and end."""
    fields: dict[str, Any] = {"end_prompt_tokens": quantiles(np.asarray(ends))}
    columns = pd.DataFrame({"start": [s.requests[0].prompt_tokens for s in sessions],
                            "turns": [len(s.requests) for s in sessions], "end": ends})
    if len(columns) < 10 or columns.nunique().min() < 2:
        return fields
    of = 2 * np.sin(np.pi * columns.corr(method="spearman") / 6)  # rank correlation to the copula's own
    between = float(np.clip(of.loc["start", "turns"], -_MOST, _MOST))
    weights = np.linalg.solve([[1, between], [between, 1]], [of.loc["turns", "end"], of.loc["start", "end"]])
    explained = weights @ np.array([[1, between], [between, 1]]) @ weights
    weights *= min(1.0, _MOST / np.sqrt(max(explained, 1e-12)))
    weights = np.clip(weights, -_MOST, _MOST)
    return {**fields, "turns_follow_start": round(between, 3), "end_follows_turns": round(float(weights[0]), 3),
            "end_follows_start": round(float(weights[1]), 3)}


def tuned(persona: dict[str, Any], growth: Growth) -> dict[str, Any]:
    """The persona with its growth and end distributions moved until planned conversations grow as the recorded did.

    Scaling to a conversation's end widens the drawn growths, replies put a floor under them, and the limit cuts off
    some ends; all is undone by moving each quantile against its own error.
    """
    wanted = {"growth_tokens": growth.later[:, 0], "opening_growth_tokens": growth.opening[:, 0]}
    if persona["at_context_limit"] == "end":
        wanted["end_prompt_tokens"] = growth.last
    wanted = {name: np.percentile(values, POINTS) for name, values in wanted.items()
              if len(values) >= _FEWEST and isinstance(persona[name], dict)}
    first = yamlfile.parse(Persona, persona, "the fitted persona")
    drawn = {name: getattr(first, name).ppf(np.minimum(np.asarray(POINTS) / 100, 1 - 1e-9)) for name in wanted}
    best, least = persona, math.inf
    for _ in range(_ROUNDS):
        realised = _planned(yamlfile.parse(Persona, persona, "the fitted persona"))
        off = {name: wanted[name] / np.maximum(1.0, np.percentile(realised[name], POINTS)) for name in wanted}
        middle = [q for q, point in enumerate(POINTS) if 20 <= point <= 92]
        worst = max((float(np.abs(np.log(off[name][middle])).max()) for name in off), default=0.0)
        if worst < least:
            best, least = persona, worst
        for name in wanted:
            drawn[name] = np.maximum.accumulate(drawn[name] * off[name] ** _DAMPING)
        persona = {**persona, **{name: quantiles(drawn[name], exact=POINTS) for name in wanted}}
    return best


def _planned(persona: Persona) -> dict[str, np.ndarray]:
    """Growths and last prompts of planned conversations, by the distribution that decides them."""
    later: list[float] = []
    opening: list[float] = []
    last: list[float] = []
    for conversation in range(_CONVERSATIONS):
        plan = plans.draw(persona, 11, 0, conversation, limit=persona.context_limit_tokens, gap_cap_s=1e9)
        steps = [a + o + 2 * MESSAGE_TOKENS
                 for a, o in zip(plan.append_tokens[1:], plan.output_tokens, strict=False)]
        found = plans.walk(plan, persona.context_limit_tokens)[-1]
        last.append(found.base_tokens + sum(steps[found.base:found.turn]))
        opening += steps[:persona.opening_turns]
        later += steps[persona.opening_turns:]
    return {"growth_tokens": np.asarray(later or [1.0]), "opening_growth_tokens": np.asarray(opening or [1.0]),
            "end_prompt_tokens": np.asarray(last)}
