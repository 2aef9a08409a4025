"""Intended beside realised: quantiles of what personas say and of what a script asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.core.stats import percentile
from spoc_lib.workload.build import Script
from spoc_lib.workload.model.persona import Persona, PersonaSet
from spoc_lib.workload.model.plan import FIRST_PROMPT_RATIO
from spoc_lib.workload.playback import Played, play
from spoc_lib.workload.script import ConversationScript

QUANTILES = (25, 50, 75, 90)
#: Cumulative probabilities at which an intended distribution is read.
_GRID = (np.arange(4000) + 0.5) / 4000


def compare_quantities(script: ConversationScript, personas: PersonaSet, played: list[Played]) -> pd.DataFrame:
    """A row a (persona, quantity): mean and quantiles intended and realised, samples, and their distance.

    Where growth is scaled to a conversation's end, `growth_tokens` is only its shape: intended is then what the same
    users' turns grow by under another seed (`conversations` says how many were played), and `samples` counts
    conversations, for their turns are not independent. Elsewhere `conversations` is 0.
    """
    scale, cap = getattr(script, "scale", 1.0), getattr(script, "gap_cap_s", np.inf)
    collected = _collect(played, {persona.name: persona.opening_turns for persona in personas.personas})
    others = _under_another_seed(script, personas, played)
    loading = {persona.name: persona.opening_turns for persona in personas.personas}
    conversations = Counter(persona for persona, _, _ in {
        (item.turn.persona, item.turn.user, item.turn.conversation) for item in played
        if not item.turn.starts and item.turn.turn > loading.get(item.turn.persona, 0)})
    rows = []
    for persona in personas.personas:
        for quantity, field, factor, most in (
            ("first prompt, tokens", "prompt_start_tokens", scale, np.inf),
            ("growth a turn, tokens", "growth_tokens", scale, np.inf),
            ("output, tokens", "output_tokens", scale, np.inf),
            ("gap after a tool, s", "agent_gap_s", 1.0, cap),
            ("gap before a human turn, s", "human_gap_s", 1.0, cap),
        ):
            values = np.asarray(collected.get((persona.name, quantity), []), dtype=float)
            if quantity == "first prompt, tokens":
                most = longest_first_prompt(script, persona)
            grid = np.minimum(getattr(persona, field).ppf(_GRID) * factor, most)
            scaled = field == "growth_tokens" and persona.end_prompt_tokens is not None
            if scaled:
                grid = np.asarray(others.get((persona.name, quantity), grid), dtype=float)
            rows.append(_compare(persona, quantity, grid, values, conversations[persona.name] if scaled else None))
    return pd.DataFrame(rows)


def _under_another_seed(script: ConversationScript, personas: PersonaSet, played: list[Played],
                        ) -> dict[tuple[str, str], list[float]]:
    """Values of a play like `played` of other conversations; empty where no persona needs it."""
    if not isinstance(script, Script) or all(p.end_prompt_tokens is None for p in personas.personas):
        return {}
    turns = Counter(item.turn.user for item in played)
    other = list(play(replace(script, seed=script.seed + 1), len(turns), max(turns.values())))
    return _collect(other, {persona.name: persona.opening_turns for persona in personas.personas})


def longest_first_prompt(script: ConversationScript, persona: Persona) -> float:
    """What first prompts are cut to, in tokens; infinite where a script cuts none."""
    return int(script.limit(persona) * FIRST_PROMPT_RATIO) if isinstance(script, Script) else np.inf


def _collect(played: list[Played], opening_turns: dict[str, int]) -> dict[tuple[str, str], list[float]]:
    """Realised values by persona and quantity. A first turn in mid-conversation is left out (its gap is a remainder),
    and so is the growth of turns that load files."""
    values: dict[tuple[str, str], list[float]] = {}
    before: dict[int, tuple[int, int]] = {}

    def put(persona: str, quantity: str, value: float) -> None:
        values.setdefault((persona, quantity), []).append(value)

    for item in played:
        turn = item.turn
        if not turn.history:
            put(turn.persona, "output, tokens", turn.output_tokens)
            if turn.turn == 0:
                put(turn.persona, "first prompt, tokens", turn.prompt_tokens)
            gap = "gap after a tool, s" if turn.kind == "agent" else "gap before a human turn, s"
            if turn.user in before:
                put(turn.persona, gap, turn.think_time_s)
        opened = turn.turn > opening_turns.get(turn.persona, 0)
        if opened and not turn.starts and before.get(turn.user, (-1, 0))[0] == turn.conversation:
            put(turn.persona, "growth a turn, tokens", turn.prompt_tokens - before[turn.user][1])
        before[turn.user] = (turn.conversation, turn.prompt_tokens)
    return values


def _compare(persona: Persona, quantity: str, grid: np.ndarray, values: np.ndarray, independent: int | None,
             ) -> dict[str, Any]:
    samples = len(values) if independent is None else min(independent, len(values))
    row: dict[str, Any] = {"persona": persona.name, "quantity": quantity, "samples": samples,
                           "conversations": independent or 0,
                           "intended_mean": float(grid.mean()),
                           "realised_mean": float(values.mean()) if len(values) else float("nan")}
    for q in QUANTILES:
        row[f"intended_p{q}"] = percentile(grid, q)
        row[f"realised_p{q}"] = percentile(values, q)
    row["distance"] = _distance(grid, values)
    return row


def _distance(grid: np.ndarray, values: np.ndarray) -> float:
    """Largest distance between two cumulative distributions (Kolmogorov and Smirnov), a token's rounding forgiven."""
    if not len(values):
        return float("nan")
    grid, values = np.sort(grid), np.sort(values)
    at = values[np.linspace(0, len(values) - 1, min(len(values), 500)).astype(int)]
    slack = np.maximum(1.0, 0.002 * at) * (np.max(grid) > 1000) + 1e-6
    upper = np.searchsorted(grid, at + slack, "right") / len(grid)
    lower = np.searchsorted(grid, at - slack, "left") / len(grid)
    own_upper = np.searchsorted(values, at, "right") / len(values)
    own_lower = np.searchsorted(values, at, "left") / len(values)
    return float(max(0.0, np.max(own_lower - upper), np.max(lower - own_upper)))
