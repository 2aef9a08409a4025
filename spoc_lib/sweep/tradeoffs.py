"""Trade-offs that a single capacity hides: the token budget when a huge prompt arrives, one slow GPU, and the best
budget under each value of a step-time parameter that the measurements hardly fix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.core.errors import InputError
from spoc_lib.engine import virtual
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.metrics import Measured
from spoc_lib.sweep.cases import Case, answers, step_model
from spoc_lib.workload.script import NEVER_S, AroundScript, ConversationScript, Segment, Turn, UserScript
from spoc_lib.workload.template import TEMPLATE_OVERHEAD

BUDGETS = (512, 1024, 2048, 4096, 8192)
#: Range of gap_prefill_us that successive fits found: the measurements hardly fix it.
GAP_PREFILL_US = (300.0, 6000.0)
LONG_PROMPT_TOKENS = 128_000
_STREAM = 0x5350_4F43_0128_0000  # a text that nobody shares


def with_budget(case: Case, budget: int) -> Case:
    """The case under another token budget, its number of sequences cut to the budget where it exceeds that."""
    sequences = min(case.engine().flags.max_num_seqs, budget)
    return case.changed(flags={**case.flags, "max_num_batched_tokens": budget, "max_num_seqs": sequences})


@dataclass(frozen=True)
class WithArrival(AroundScript):
    """The script's first users, and one more (number `arrives`) who sends a single prompt that nobody has in common."""

    script: ConversationScript
    arrives: int
    at_s: float
    prompt_tokens: int
    output_tokens: int = 64

    def user(self, number: int) -> UserScript:
        if number != self.arrives:
            return self.script.user(number)
        return _Arrival(number, self.at_s, self.prompt_tokens, self.output_tokens)


class _Arrival:
    persona = "arrival"

    def __init__(self, number: int, at_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self.user = number
        self._at_s, self._prompt, self._output = at_s, prompt_tokens, output_tokens
        self._sent = 0

    def next(self, history_tokens: int) -> Turn:
        self._sent += 1
        think_s = self._at_s if self._sent == 1 else NEVER_S
        content = self._prompt - TEMPLATE_OVERHEAD.tokens(2)
        return Turn("arrival", self.user, self._sent - 1, 0, "start", True,
                    (Segment(_STREAM + self._sent, content, "session"),), self._prompt, self._output, think_s)


def long_prompt_arrival(case: Case, users: int, budgets: Sequence[int] = BUDGETS, *,
                        prompt_tokens: int = LONG_PROMPT_TOKENS, at_s: float = 240.0) -> pd.DataFrame:
    """What a cold prompt of `prompt_tokens` does to itself and to `users` others, by max_num_batched_tokens.

    One row a budget: ttft_s of the prompt, its prefill's length being the window in which the others' itl_p50_s,
    itl_p95_s and longest gap (itl_max_s) are taken, beside itl_p95_before_s in the minute before it; `outside` of the
    passport. TTFT is inf where the prompt was not answered within ten minutes.
    """
    rows = []
    for budget in budgets:
        engine = with_budget(case, budget).engine()
        if prompt_tokens + 64 > engine.max_model_len:
            raise InputError("prompt-too-long", f"a prompt of {prompt_tokens:,} tokens does not fit the context of "
                             f"{engine.max_model_len:,} tokens")
        script = WithArrival(case.script(engine), users, at_s, prompt_tokens)
        run = virtual.play(script, users + 1, engine=engine, duration_s=at_s + 120, seed=case.seed)
        own = run.requests[run.requests["user"] == users].iloc[0]
        if np.isnan(own["first_token_s"]):
            run = virtual.play(script, users + 1, engine=engine, duration_s=at_s + 600, seed=case.seed)
            own = run.requests[run.requests["user"] == users].iloc[0]
        answered = own["first_token_s"] if not np.isnan(own["first_token_s"]) else run.simulated_s
        others = run.requests[run.requests["user"] != users]
        chunks = run.chunks[run.chunks["request"].isin(others["request"])]
        during, before = (Measured(others, chunks, window, run.simulated_s).samples("itl") for window in (
            (own["send_s"], answered), (own["send_s"] - 60.0, own["send_s"])))
        rows.append({
            "max_num_batched_tokens": budget, "users": users,
            "ttft_s": float(own["first_token_s"] - own["send_s"]) if not np.isnan(own["first_token_s"]) else np.inf,
            **{f"itl_{name}_s": during.percentile(q) for name, q in (("p50", 50), ("p95", 95), ("max", 100))},
            "itl_p95_before_s": before.percentile(95), "outside": "; ".join(run.passport["outside"])})
    return pd.DataFrame(rows)


def throttled(engine: EmbeddedEngine, factor: float) -> EmbeddedEngine:
    """The engine with one of its GPUs at `factor` of its clock (`StepTimeModel.throttled`)."""
    return replace(engine, step_time=step_model(engine).throttled(factor))


def throttle_effect(case: Case, users: int, factor: float = 0.7) -> pd.DataFrame:
    """ITL of everybody, persona by persona, with all GPUs at their clock and with one at `factor` of it.

    Rows: persona (`all` first); columns itl_p50_s, itl_p95_s, throttled_itl_p50_s, throttled_itl_p95_s, and ratio of
    the medians. The users and what they ask are the same in both.
    """
    engine = case.engine()
    found: dict[str, dict[str, Any]] = {}
    for name, one in (("", engine), ("throttled_", throttled(engine, factor))):
        run = virtual.play(case.script(one), users, engine=one, duration_s=240.0 + case.measured_s, warmup_s=240.0,
                           seed=case.seed)
        seen = Measured(run.requests, run.chunks, run.window, run.simulated_s)
        for persona in ("all", *sorted(set(run.requests["persona"]))):
            gaps = seen.samples("itl", persona)
            row = found.setdefault(persona, {"persona": persona, "users": users, "clock_factor": factor})
            row[f"{name}itl_p50_s"], row[f"{name}itl_p95_s"] = gaps.percentile(50), gaps.percentile(95)
    table = pd.DataFrame(found.values()).dropna().reset_index(drop=True)  # a persona whom nothing was sent to
    return table.assign(ratio=table["throttled_itl_p50_s"] / table["itl_p50_s"])


def best_budgets(case: Case, budgets: Sequence[int] = BUDGETS[1:], gaps_us: Sequence[float] = GAP_PREFILL_US,
                 ) -> pd.DataFrame:
    """Max users by max_num_batched_tokens, under the calibrated gap_prefill_us and under each of `gaps_us`.

    Columns cluster, gap_prefill_us, calibrated, max_num_batched_tokens, users, missed, best: within the bisection's
    own width of the most users at that gap; null users where the engine refuses the budget.
    """
    calibrated = step_model(case.engine()).parameters.gap_prefill_us
    asked = [(gap, budget) for gap in sorted({calibrated, *gaps_us}) for budget in budgets]
    found = answers([with_budget(case, budget).changed(parameters={**case.parameters, "gap_prefill_us": gap})
                     for gap, budget in asked])
    rows = [{"cluster": case.cluster.name, "gap_prefill_us": gap, "calibrated": gap == calibrated,
             "max_num_batched_tokens": budget, "users": None if isinstance(one, str) else one.users,
             "missed": None if isinstance(one, str) else one.missed}
            for (gap, budget), one in zip(asked, found, strict=True)]
    table = pd.DataFrame(rows).astype({"users": "Int64", "missed": "Int64"})
    most = table.groupby("gap_prefill_us")["users"].transform("max")
    return table.assign(best=(table["missed"].fillna(np.iinfo(np.int64).max) > most).fillna(False).astype(bool))
