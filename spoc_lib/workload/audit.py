"""The audit: what a script really asks for beside what its personas intend, with gates and a sentence for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.core.stats import percentile
from spoc_lib.workload import template
from spoc_lib.workload.build import Script
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.distributions import Distribution
from spoc_lib.workload.geometry import LAYERS
from spoc_lib.workload.messages import Conversation
from spoc_lib.workload.personas import Persona, PersonaSet
from spoc_lib.workload.plan import FIRST_PROMPT_RATIO
from spoc_lib.workload.playback import Pace, Played, play, sessions_table
from spoc_lib.workload.script import ConversationScript
from spoc_lib.workload.sharing import Sharing, common_prefix_tokens, measure

__all__ = ["Audit", "Gate", "audit", "sessions_table"]

QUANTILES = (25, 50, 75, 90)
#: Gap caps whose effect on the answer is always shown, in seconds.
GAP_CAPS_S = (30, 60, 120, 600)
_SIZE_TOLERANCE = 0.005
_SHAPE_TOLERANCE = 0.06
_PAIR_USERS = 120


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition under which the workload may be used. `value` passed when it is at most `tolerance`."""

    name: str
    passed: bool
    value: float
    tolerance: float
    sentence: str


@dataclass(frozen=True)
class Audit:
    """Realised beside intended.

    quantities: a row a (persona, quantity): intended and realised mean and quantiles, samples, distance (largest gap
        between the cumulative distributions);
    mix: a row a persona: intended and realised share of users; sharing: ideal reuse (`sharing.Sharing`);
    pairs: shared prefix of pairs of users, in tokens; gap_caps: in-flight share of a user by cap on think time.
    """

    parameters: dict[str, Any]
    users: int
    turns: int
    quantities: pd.DataFrame
    mix: pd.DataFrame
    sharing: Sharing
    pairs: pd.DataFrame
    gap_caps: pd.DataFrame
    corpus: dict[str, Any] | None
    gates: list[Gate]

    @property
    def passed(self) -> bool:
        return all(gate.passed for gate in self.gates)

    @property
    def ideal_hit_ratio(self) -> float:
        """Reused part of all prompt tokens with an infinite prefix cache, whole blocks of 16."""
        return self.sharing.hit_ratio

    def findings(self) -> list[str]:
        """The audit in sentences, the answer first."""
        failed = [gate for gate in self.gates if not gate.passed]
        in_use = self.gap_caps[self.gap_caps["in_use"]]
        said = [f"All {len(self.gates)} gates hold: what {self.users} users ask for is what the personas intend."
                if not failed else
                f"{len(failed)} of {len(self.gates)} gates fail: "
                + " ".join(f"{g.name}: {g.sentence}" for g in failed)]
        said.append(f"{self.ideal_hit_ratio:.1%} of the prompt tokens were seen before; an infinite prefix cache would "
                    f"serve them.")
        if len(in_use):
            row = in_use.iloc[0]
            said.append(f"With think times capped at {row.gap_cap_s:g} s one request in flight stands for "
                        f"{row.users_per_request:.1f} users.")
        return said

    def to_dict(self) -> dict[str, Any]:
        """Plain values for audit.json."""
        return {
            "parameters": self.parameters, "users": self.users, "turns": self.turns, "passed": self.passed,
            "gates": [{name: getattr(gate, name) for name in Gate.__slots__} for gate in self.gates],
            "mix": self.mix.to_dict("records"), "quantities": self.quantities.to_dict("records"),
            "sharing": {
                "requests": self.sharing.requests, "prompt_tokens": self.sharing.prompt_tokens,
                "ideal_hit_ratio": self.ideal_hit_ratio, "unique_tokens": self.sharing.unique_tokens,
                "unique_blocks": self.sharing.unique_blocks, "human_hit_ratio": self.sharing.human_hit_ratio,
                "agent_hit_ratio": self.sharing.agent_hit_ratio,
                "layers": self.sharing.layers.to_dict("records"), "lru": self.sharing.lru.to_dict("records"),
                "pairs": self.pairs.to_dict("records"),
            },
            "gap_caps": self.gap_caps.to_dict("records"), "corpus": self.corpus,
        }


def audit(script: ConversationScript, personas: PersonaSet, corpus: Corpus | None, users: int, turns: int, *,
          pace: Pace | None = None, sample_users: int = 4) -> Audit:
    """Play `turns` turns of `users` users on paper and compare.

    corpus: None, or the corpus whose texts are counted token by token for `sample_users` users a persona;
    pace: how fast replies are taken to come (for the order of requests and the in-flight share).
    """
    pace = pace or Pace()
    played = list(play(script, users, turns, pace))
    quantities = _quantities(script, personas, played)
    mix = _mix(personas, played)
    sharing = measure(played)
    gates = [*_shape_gates(quantities), _mix_gate(mix, users), _limit_gate(script, personas, played),
             _order_gate(played)]
    if corpus is not None:
        gates += _text_gates(script, corpus, personas, played, sample_users)
    describe = getattr(script, "describe", dict)
    return Audit(
        parameters={**describe(), "pace": {"ttft_s": pace.ttft_s, "tokens_per_s": pace.tokens_per_s}},
        users=users, turns=turns, quantities=quantities, mix=mix, sharing=sharing, pairs=_pairs(played),
        gap_caps=gap_caps(script, users, turns, pace), corpus=None if corpus is None else corpus.summary(), gates=gates,
    )


def gap_caps(script: ConversationScript, users: int, turns: int, pace: Pace, caps_s: Iterable[float] = GAP_CAPS_S,
             ) -> pd.DataFrame:
    """In-flight share of a user at each cap on think time, and how many users one in-flight request stands for.

    The same sessions at every cap: think times are drawn once and cut off. Columns gap_cap_s, in_flight_ratio,
    users_per_request, mean_think_s, in_use (the cap of this script).
    """
    free = getattr(script, "with_gap_cap", None)
    whole = free(1e9) if free else script
    rows = []
    gaps, service = [], 0.0
    for item in play(whole, users, turns, pace):
        if not item.turn.history:  # the rest of a gap, not a gap
            gaps.append(item.turn.think_time_s)
            service += pace.service_s(item.turn.output_tokens)
    in_use = getattr(script, "gap_cap_s", None)
    gaps = np.asarray(gaps)
    for cap in sorted({*map(float, caps_s), *([float(in_use)] if in_use else [])}):
        think = float(np.minimum(gaps, cap).sum())
        ratio = service / (service + think)
        rows.append((cap, ratio, 1 / ratio, think / max(1, len(gaps)), cap == in_use))
    return pd.DataFrame(rows, columns=["gap_cap_s", "in_flight_ratio", "users_per_request", "mean_think_s", "in_use"])


def _quantities(script: ConversationScript, personas: PersonaSet, played: list[Played]) -> pd.DataFrame:
    scale, cap = getattr(script, "scale", 1.0), getattr(script, "gap_cap_s", np.inf)
    collected = _collect(played, {persona.name: persona.opening_turns for persona in personas.personas})
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
                most = _longest_first_prompt(script, persona)
            rows.append(_compare(persona, quantity, getattr(persona, field), values, factor, most))
    return pd.DataFrame(rows)


def _longest_first_prompt(script: ConversationScript, persona: Persona) -> float:
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


def _compare(persona: Persona, quantity: str, intended: Distribution, values: np.ndarray, factor: float, most: float,
             ) -> dict[str, Any]:
    grid = np.minimum(intended.ppf((np.arange(4000) + 0.5) / 4000) * factor, most)
    row: dict[str, Any] = {"persona": persona.name, "quantity": quantity, "samples": len(values),
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


def _shape_gates(quantities: pd.DataFrame) -> list[Gate]:
    gates = []
    for row in quantities.itertuples():
        name = f"{row.persona}: {row.quantity}"
        if row.samples < 20:
            gates.append(Gate(name, True, float("nan"), _SHAPE_TOLERANCE,
                              f"{row.samples} samples are too few to judge; play more turns or users."))
            continue
        tolerance = round(_SHAPE_TOLERANCE + 1.63 / np.sqrt(row.samples), 4)
        gates.append(Gate(name, row.distance <= tolerance, row.distance, tolerance,
                          f"Median {row.realised_p50:.4g} against {row.intended_p50:.4g} intended; the distributions "
                          f"are {row.distance:.3f} apart over {row.samples} samples."))
    return gates


def _mix(personas: PersonaSet, played: list[Played]) -> pd.DataFrame:
    owner = {item.turn.user: item.turn.persona for item in played}
    rows = []
    for persona in personas.personas:
        count = sum(name == persona.name for name in owner.values())
        rows.append((persona.name, persona.share, count, count / max(1, len(owner))))
    return pd.DataFrame(rows, columns=["persona", "intended_share", "users", "realised_share"])


def _mix_gate(mix: pd.DataFrame, users: int) -> Gate:
    off = float((mix.users - mix.intended_share * users).abs().max())
    return Gate("mix of personas", off <= 1, off, 1.0,
                "Users: " + ", ".join(f"{r.persona} {r.users}" for r in mix.itertuples())
                + f" of {users}; the largest deviation from the shares is {off:.2g} users.")


def _limit_gate(script: ConversationScript, personas: PersonaSet, played: list[Played]) -> Gate:
    """No request may ask for more than the context limit: the server would refuse it, and refusals are not latency."""
    cuts = {p.name: _longest_first_prompt(script, p) for p in personas.personas}
    limits = {p.name: script.limit(p) for p in personas.personas} if isinstance(script, Script) else {}
    over = sum(item.turn.prompt_tokens + item.turn.output_tokens > limits.get(item.turn.persona, np.inf)
               for item in played)
    longest = max((item.turn.prompt_tokens for item in played), default=0)
    cut = sum(item.turn.turn == 0 and item.turn.prompt_tokens >= cuts.get(item.turn.persona, np.inf)
              for item in played)
    return Gate("context limit", over == 0, float(over), 0.0,
                f"{over} of {len(played)} requests exceed their context limit; the longest prompt has {longest} "
                f"tokens; {cut} first prompts were cut to fit.")


def _order_gate(played: list[Played]) -> Gate:
    """Common ground pays only when it comes first, outermost level first."""
    order = {layer: k for k, layer in enumerate(LAYERS)}
    wrong = 0
    for item in played:
        if item.turn.starts:
            ranks = [order[s.layer] for s in (*(s for s, _ in item.turn.history), *item.turn.append)]
            wrong += ranks != sorted(ranks)
    return Gate("common ground first", wrong == 0, float(wrong), 0.0,
                f"{wrong} conversations place something private before shared text.")


def _pairs(played: list[Played]) -> pd.DataFrame:
    """Shared prefix of pairs of users (their first requests), in tokens: a row of quantiles a pair of personas."""
    first: dict[int, Played] = {}
    for item in played:
        if len(first) < _PAIR_USERS or item.turn.user in first:
            first.setdefault(item.turn.user, item)
    turns = [item.turn for item in first.values()]
    by_pair: dict[str, list[int]] = {}
    for k, one in enumerate(turns):
        for other in turns[:k]:
            name = " ".join(sorted((one.persona, other.persona)))
            by_pair.setdefault(name, []).append(common_prefix_tokens(one, other))
    rows = [(name, len(shared), float(np.mean(shared)), *(percentile(shared, q) for q in (10, 50, 90, 100)))
            for name, shared in sorted(by_pair.items())]
    return pd.DataFrame(rows, columns=["personas", "pairs", "mean_tokens", "p10", "p50", "p90", "max"])


def _text_gates(script: ConversationScript, corpus: Corpus, personas: PersonaSet, played: list[Played], sample: int,
                ) -> list[Gate]:
    """Counts real text: sizes against intention, and the shared prefix of users token by token."""
    owner: dict[str, list[int]] = {}
    for item in played:
        users = owner.setdefault(item.turn.persona, [])
        if item.turn.user not in users and len(users) < sample:
            users.append(item.turn.user)
    encode = corpus.tokenizer.encode
    worst, counted, firsts = 0.0, 0, []
    for number in (number for users in owner.values() for number in users):
        user, conversation = script.user(number), Conversation(corpus)
        for step in range(2):
            turn = user.next(conversation.history_tokens)
            ids = template.encode(conversation.apply(turn), encode)
            worst = max(worst, abs(len(ids) - turn.prompt_tokens) / turn.prompt_tokens)
            counted += 1
            if step == 0:
                firsts.append((turn, ids))
            reply = corpus.stream_text(turn.append[-1].stream ^ 1, turn.output_tokens)
            conversation.add_reply(reply, turn.output_tokens)
    off = 0
    for k, (one, ids) in enumerate(firsts):
        for other, other_ids in firsts[:k]:
            counted_ids = _common(ids, other_ids) - template.MESSAGE_LEAD_TOKENS
            off = max(off, abs(counted_ids - common_prefix_tokens(one, other)))
    sizes = Gate("exact sizes", worst <= _SIZE_TOLERANCE, worst, _SIZE_TOLERANCE,
                 f"Over {counted} prompts counted with {corpus.tokenizer.name}, the largest difference from the "
                 f"intended size is {worst:.2%}.")
    ground = Gate("common ground in the text", off <= 16, float(off), 16.0,
                  f"The shared prefix of {len(firsts) * (len(firsts) - 1) // 2} pairs of users, compared token by "
                  f"token, differs from the intended one by at most {off} tokens.")
    return [sizes, ground]


def _common(one: list[int], other: list[int]) -> int:
    shortest = min(len(one), len(other))
    differ = np.nonzero(np.asarray(one[:shortest]) != np.asarray(other[:shortest]))[0]
    return int(differ[0]) if len(differ) else shortest
