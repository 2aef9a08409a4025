"""What a conversation will be, drawn at once: sizes, outputs, gaps and kinds of all its turns.

A plan is drawn from (seed, user, conversation) alone, so it is the same in every driver and in any order of asking.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import special

from spoc_lib.workload.identity import Uniforms
from spoc_lib.workload.model.persona import Persona
from spoc_lib.workload.template import MESSAGE_TOKENS, overhead_tokens

#: The least that a turn appends: an empty tool result still has a few words.
MIN_APPEND_TOKENS = 8
#: The most of the context limit that a first or compacted prompt takes; longer ones are cut to it.
FIRST_PROMPT_RATIO = 0.9
#: Growths that the replies alone exceed are set aside so often, while the others are scaled.
_SCALING_ROUNDS = 4
#: The least of a first prompt that is a user's own.
MIN_SESSION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """The turns of one conversation; lists are indexed by turn.

    start_tokens: the first prompt, template overhead included;
    append_tokens: what each turn appends (entry 0 unused); output_tokens: budgets;
    gap_s: think time before each turn, capped; human: whether the turn is a human's (else it follows a tool);
    rewrite: whether the turn resends a changed history; pullback: whether it cuts the history back;
    compact_tokens: prompt size after a compaction or pull-back there;
    gives_up: whether the conversation ends instead, should the turn meet the context limit.
    """

    start_tokens: int
    append_tokens: list[int]
    output_tokens: list[int]
    gap_s: list[float]
    human: list[bool]
    rewrite: list[bool]
    pullback: list[bool]
    compact_tokens: list[int]
    gives_up: list[bool]

    @property
    def turns(self) -> int:
        """How many there are."""
        return len(self.output_tokens)


def draw(persona: Persona, seed: int, user: int, conversation: int, *, limit: int, gap_cap_s: float,
         scale: float = 1.0) -> Plan:
    """The plan of one conversation. `limit`: context limit in tokens; sizes are multiplied by `scale` first."""
    uniforms = Uniforms(seed, 21, user, conversation)
    first = uniforms.draw(2)
    u_turns = float(_correlated(first[0], first[1], persona.turns_follow_start)) if persona.turns_follow_start \
        else first[0]
    turns = max(1, round(float(persona.turns.ppf(u_turns))))
    u = uniforms.draw(7, turns)
    output = np.maximum(1, np.rint(persona.output_tokens.ppf(u[0]) * scale)).astype(int)
    u_growth = _following(u[1], u[0], persona.growth_follows_output)
    growth = persona.growth_tokens.ppf(u_growth) * scale
    if persona.opening_growth_tokens is not None:
        early = slice(1, 1 + persona.opening_turns)
        growth[early] = persona.opening_growth_tokens.ppf(u_growth[early]) * scale
    least = overhead_tokens(2) + MIN_SESSION_TOKENS
    room = max(least, int(limit * FIRST_PROMPT_RATIO))
    start = max(least, round(float(persona.prompt_start_tokens.ppf(first[1])) * scale))
    start = min(start, room)
    if persona.end_prompt_tokens is not None and turns > 1:
        z = (persona.end_follows_turns * _normal(u_turns) + persona.end_follows_start * _normal(first[1])
             + np.sqrt(1 - persona.end_variance) * _normal(uniforms.draw(1)[0]))
        end = float(persona.end_prompt_tokens.ppf(special.ndtr(z))) * scale
        growth[1:] = _scaled_to(growth[1:], end - start, output[:-1])
    append = np.maximum(MIN_APPEND_TOKENS, np.rint(growth[1:] - output[:-1] - 2 * MESSAGE_TOKENS)).astype(int)
    human = _human_turns(persona.steps_per_human_turn.ppf(u[2]), turns)
    gap = np.where(human, persona.human_gap_s.ppf(u[3]), persona.agent_gap_s.ppf(u[3]))
    compact = persona.compact_to_tokens
    compacted = compact.ppf(u[4]) * scale if compact is not None else np.zeros(turns)
    return Plan(
        start_tokens=start,
        append_tokens=[0, *append.tolist()],
        output_tokens=np.minimum(output, max(1, limit // 2)).tolist(),
        gap_s=np.minimum(np.round(gap, 6), gap_cap_s).tolist(),
        human=human.tolist(),
        rewrite=(u[5] < persona.rewrite_share).tolist(),
        pullback=(u[5] >= 1 - persona.pullback_share).tolist(),
        compact_tokens=np.minimum(np.rint(compacted), room).astype(int).tolist(),
        gives_up=(u[6] < (1.0 if persona.at_context_limit == "end" else persona.end_share_at_limit)).tolist(),
    )


def _following(u: np.ndarray, output_u: np.ndarray, correlation: float) -> np.ndarray:
    """Uniform numbers for growth, correlated with the output of the turn before (Gaussian copula)."""
    if correlation == 0:
        return u
    return _correlated(u, np.concatenate([[0.5], output_u[:-1]]), correlation)


def _correlated(u: np.ndarray | float, other: np.ndarray | float, correlation: float) -> np.ndarray:
    """`u`, still uniform, correlated with `other` (Gaussian copula)."""
    return special.ndtr(np.sqrt(1 - correlation**2) * _normal(u) + correlation * _normal(other))


def _scaled_to(growth: np.ndarray, total: float, replies: np.ndarray) -> np.ndarray:
    """Growths in proportion to `growth` that sum to `total`, none below what the reply before it brings alone."""
    least = replies + 2 * MESSAGE_TOKENS + MIN_APPEND_TOKENS
    free = np.ones(len(growth), dtype=bool)
    for _ in range(_SCALING_ROUNDS):
        factor = max(0.0, total - least[~free].sum()) / max(1e-9, growth[free].sum())
        now_free = growth * factor > least
        if (now_free == free).all() or not now_free.any():
            break
        free = now_free
    return np.maximum(least, growth * factor)


def _normal(u: np.ndarray | float) -> np.ndarray:
    return special.ndtri(np.clip(u, 1e-12, 1 - 1e-12))


def _human_turns(steps: np.ndarray, turns: int) -> np.ndarray:
    """Which turns a human starts: the first, and again after each run of `steps` requests."""
    at = np.concatenate([[0], np.cumsum(np.maximum(1, np.rint(steps)).astype(int))])
    human = np.zeros(turns, dtype=bool)
    human[at[at < turns]] = True
    return human


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a user stands in a planned conversation: just before `turn`, in a context that began at turn `base` with
    a prompt of `base_tokens` (0: the first prompt; later ones follow a rewrite or a compaction)."""

    turn: int
    base: int
    base_tokens: int


def walk(plan: Plan, limit: int) -> list[Standing]:
    """Where the context of each turn began, as long as replies come as planned. Ends where the conversation does."""
    standings = []
    base, base_tokens, prompt = 0, plan.start_tokens, plan.start_tokens
    for turn in range(plan.turns):
        if turn:
            prompt += plan.output_tokens[turn - 1] + plan.append_tokens[turn] + 2 * MESSAGE_TOKENS
            if prompt + plan.output_tokens[turn] > limit:
                if plan.gives_up[turn]:
                    break
                base, base_tokens, prompt = turn, plan.compact_tokens[turn], plan.compact_tokens[turn]
            elif plan.pullback[turn]:
                base, prompt = turn, min(prompt, plan.compact_tokens[turn])
                base_tokens = prompt
            elif plan.rewrite[turn]:
                prompt -= 2 * MESSAGE_TOKENS * (turn - base)
                base, base_tokens = turn, prompt
        standings.append(Standing(turn, base, base_tokens))
    return standings
