"""The audit: what a script really asks for beside what its personas intend, with gates and a sentence for each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.core.stats import percentile
from spoc_lib.workload.audit.gates import Gate, limit_gate, mix_gate, order_gate, shape_gates, text_gates
from spoc_lib.workload.audit.quantities import compare_quantities
from spoc_lib.workload.audit.sharing import Sharing, common_prefix_tokens, measure
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.model.persona import PersonaSet
from spoc_lib.workload.playback import Pace, Played, play, sessions_table
from spoc_lib.workload.script import ConversationScript

__all__ = ["Audit", "Gate", "audit", "sessions_table"]

#: Gap caps whose effect on the answer is always shown, in seconds.
GAP_CAPS_S = (30, 60, 120, 600)
_PAIR_USERS = 120


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
        """Whether every gate holds."""
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
        if "start" in self.parameters:
            said.append("Users are met in mid-conversation, with their history (stationary start)."
                        if self.parameters["start"] == "stationary" else
                        "Every user begins with a new conversation (cold start).")
        said.append(f"{self.ideal_hit_ratio:.1%} of the prompt tokens were seen before; an infinite prefix cache would "
                    f"serve them.")
        row = in_use.iloc[0] if len(in_use) else None
        if row is not None and not np.isnan(row.users_per_request):
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
    quantities = compare_quantities(script, personas, played)
    mix = _mix(personas, played)
    sharing = measure(played)
    gates = [*shape_gates(quantities), mix_gate(mix, users), limit_gate(script, personas, played),
             order_gate(played)]
    if corpus is not None:
        gates += text_gates(script, corpus, personas, played, sample_users)
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
    users_per_request, mean_think_s, in_use (the cap of this script); NaN where no think time was played whole.
    """
    free = getattr(script, "with_gap_cap", None)
    whole = free(1e9) if free else script
    rows = []
    gaps: list[float] = []
    service = 0.0
    for item in play(whole, users, turns, pace):
        if not item.turn.history:  # the rest of a gap, not a gap
            gaps.append(item.turn.think_time_s)
            service += pace.service_s(item.turn.output_tokens)
    in_use = getattr(script, "gap_cap_s", None)
    think_s = np.asarray(gaps)
    for cap in sorted({*map(float, caps_s), *([float(in_use)] if in_use else [])}):
        think = float(np.minimum(think_s, cap).sum())
        ratio = service / (service + think) if service else float("nan")
        rows.append((cap, ratio, 1 / ratio, think / max(1, len(gaps)), cap == in_use))
    return pd.DataFrame(rows, columns=["gap_cap_s", "in_flight_ratio", "users_per_request", "mean_think_s", "in_use"])


def _mix(personas: PersonaSet, played: list[Played]) -> pd.DataFrame:
    owner = {item.turn.user: item.turn.persona for item in played}
    rows = []
    for persona in personas.personas:
        count = sum(name == persona.name for name in owner.values())
        rows.append((persona.name, persona.share, count, count / max(1, len(owner))))
    return pd.DataFrame(rows, columns=["persona", "intended_share", "users", "realised_share"])


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
