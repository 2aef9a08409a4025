"""Gates: conditions under which a workload may be used, each with its value, tolerance and a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.workload import template
from spoc_lib.workload.audit.quantities import longest_first_prompt
from spoc_lib.workload.audit.sharing import common_prefix_tokens
from spoc_lib.workload.build import Script
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.messages import Conversation
from spoc_lib.workload.model.persona import PersonaSet
from spoc_lib.workload.playback import Played
from spoc_lib.workload.script import LAYERS, ConversationScript

_SIZE_TOLERANCE = 0.005
_SHAPE_TOLERANCE = 0.06


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition under which the workload may be used. `value` passed when it is at most `tolerance`."""

    name: str
    passed: bool
    value: float
    tolerance: float
    sentence: str


def shape_gates(quantities: pd.DataFrame) -> list[Gate]:
    """Realised sizes, outputs and gaps are draws of the intended distributions (Kolmogorov and Smirnov's distance).

    Tolerance: 0.06, plus what chance alone exceeds once in a hundred draws (1.63 / √samples).
    """
    gates = []
    for row in quantities.itertuples():
        name = f"{row.persona}: {row.quantity}"
        if row.samples < 20:
            gates.append(Gate(name, True, float("nan"), _SHAPE_TOLERANCE,
                              f"{row.samples} samples are too few to judge; play more turns or users."))
            continue
        tolerance = round(_SHAPE_TOLERANCE + 1.63 / np.sqrt(row.samples), 4)
        against, of = ("intended", "samples") if not row.conversations else (
            "in other conversations of this persona, for it is scaled to where each conversation ends: this shows that "
            "the sample is typical, and a fit's own table that the persona is right", "conversations")
        gates.append(Gate(name, row.distance <= tolerance, row.distance, tolerance,
                          f"Median {row.realised_p50:.4g} against {row.intended_p50:.4g} {against}; the distributions "
                          f"are {row.distance:.3f} apart over {row.samples} {of}."))
    return gates


def mix_gate(mix: pd.DataFrame, users: int) -> Gate:
    """The shares of the personas hold as nearly as whole users can."""
    off = float((mix.users - mix.intended_share * users).abs().max())
    return Gate("mix of personas", off <= 1, off, 1.0,
                "Users: " + ", ".join(f"{r.persona} {r.users}" for r in mix.itertuples())
                + f" of {users}; the largest deviation from the shares is {off:.2g} users.")


def limit_gate(script: ConversationScript, personas: PersonaSet, played: list[Played]) -> Gate:
    """No request may ask for more than the context limit: the server would refuse it, and refusals are not latency."""
    cuts = {p.name: longest_first_prompt(script, p) for p in personas.personas}
    limits = {p.name: script.limit(p) for p in personas.personas} if isinstance(script, Script) else {}
    over = sum(item.turn.prompt_tokens + item.turn.output_tokens > limits.get(item.turn.persona, np.inf)
               for item in played)
    longest = max((item.turn.prompt_tokens for item in played), default=0)
    cut = sum(item.turn.turn == 0 and item.turn.prompt_tokens >= cuts.get(item.turn.persona, np.inf)
              for item in played)
    return Gate("context limit", over == 0, float(over), 0.0,
                f"{over} of {len(played)} requests exceed their context limit; the longest prompt has {longest} "
                f"tokens; {cut} first prompts were cut to fit.")


def order_gate(played: list[Played]) -> Gate:
    """Common ground pays only when it comes first, outermost level first."""
    order = {layer: k for k, layer in enumerate(LAYERS)}
    wrong = 0
    for item in played:
        if item.turn.starts:
            ranks = [order[s.layer] for s in (*(s for s, _ in item.turn.history), *item.turn.append)]
            wrong += ranks != sorted(ranks)
    return Gate("common ground first", wrong == 0, float(wrong), 0.0,
                f"{wrong} conversations place something private before shared text.")


def text_gates(script: ConversationScript, corpus: Corpus, personas: PersonaSet, played: list[Played], sample: int,
                ) -> list[Gate]:
    """Counts real text: sizes against intention, and the shared prefix of users token by token."""
    owner: dict[str, list[int]] = {}
    for item in played:
        users = owner.setdefault(item.turn.persona, [])
        if item.turn.user not in users and len(users) < sample:
            users.append(item.turn.user)
    encode = corpus.tokenizer.encode
    count_messages = getattr(corpus.tokenizer, "count_messages", None)  # a server's own template, where there is one
    worst, counted, firsts = 0.0, 0, []
    for number in (number for users in owner.values() for number in users):
        user, conversation = script.user(number), Conversation(corpus)
        for step in range(2):
            turn = user.next(conversation.history_tokens)
            messages = conversation.apply(turn)
            ids = template.encode(messages, encode)
            size = count_messages(messages) if count_messages else len(ids)
            worst = max(worst, abs(size - turn.prompt_tokens) / turn.prompt_tokens)
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
