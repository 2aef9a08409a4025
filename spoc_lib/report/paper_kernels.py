"""The paper's two findings about kernels: attention at large batch, and FP4-naive against W4A16."""

from __future__ import annotations

from typing import Any

import numpy as np

from spoc_lib.core.schemas import REQUESTS
from spoc_lib.core.tables import read_table
from spoc_lib.engine.batch import Batch
from spoc_lib.report.evidence import at_the_limit
from spoc_lib.report.paper_claims import Claim, judge, not_judged
from spoc_lib.report.studies import Study

BATCHES = (8, 16, 32, 64, 128, 256, 512)
#: The two roofs differ where they are further apart than this.
APART = 0.1


def attention(study: Study | None) -> Claim:
    """Whether attention and memory bandwidth dominate a decode step, at the limit's batch or a larger one."""
    name, paper = "attention and memory bandwidth dominate the step at large batch", "yes"
    verdict = _roofline(study)
    if study is None or not verdict:
        return not_judged(name, paper, "no trace of the limit with a roofline (notebook 04)")
    limit = at_the_limit([study.answer])
    running = max(1, round(float(limit["in_flight_users"].iloc[0]))) if len(limit) else 1
    context = mean_context(study)
    shares = {batch: decode_shares(study, batch, context) for batch in sorted({running, *BATCHES})}
    memory = float(verdict["resources"]["memory"])
    longest = {batch: max(found, key=lambda category: found[category]) for batch, found in shares.items()}
    leads = [batch for batch, category in longest.items() if category == "attn"]
    top = longest[running]
    ours = (
        f"{running} sequences of {context:,.0f} tokens at the limit: {top} leads, attention "
        f"{shares[running]['attn']:.0%} of the step ({shares[BATCHES[-1]]['attn']:.0%} at {BATCHES[-1]}); DRAM is "
        f"the nearest roof for {memory:.0%}"
    )
    larger = [batch for batch in leads if batch >= running]
    batch = [f"the batch (attention leads from {min(larger)} sequences on)"] if larger and memory > 0.5 else []
    said, why = judge(
        running in leads and memory > 0.5,
        batch,
        "DRAM does not bind" if larger else "attention leads at no batch of the limit's size or larger",
    )
    return Claim(name, paper, ours, said, why)


def _roofline(study: Study | None) -> dict[str, Any]:
    """The roofline's verdict of the run's trace; {} without one."""
    return ((study.answer.nsight if study else None) or {}).get("verdict") or {}


def decode_shares(study: Study, batch: int, context: float) -> dict[str, float]:
    """Shares of a pure decode step of `batch` sequences of `context` tokens, by kernel category and idle."""
    engine = study.case.engine()
    window = min(context, engine.model.sliding_window or context)
    step = Batch(batch, batch, round(batch * context), round(batch * window), 0, 0, 0.0, 0.0, 0, batch)
    seconds = engine.step_time.components(step)
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()}


def mean_context(study: Study) -> float:
    """Mean tokens that a decoding sequence attends to, weighted by its decode length, in the rung at the limit."""
    table = read_table(study.answer.folder / "sweep" / "requests.parquet", REQUESTS)
    prompt = table["prompt_tokens"].fillna(table["intended_prompt_tokens"]).to_numpy(float)
    output = table["output_tokens"].fillna(0).to_numpy(float)
    return float(np.average(prompt + output / 2, weights=np.maximum(output, 1)))


def four_bit(study: Study | None) -> Claim:
    """Which prediction the experts' time of the trace is nearer to."""
    name, paper = "FP4-naive mispredicts the experts, W4A16 is the roof", "yes"
    verdict = _roofline(study)
    rows = {row["phase"]: row for row in verdict.get("categories", []) if row["category"] == "moe_gemm"}
    if not rows:
        return not_judged(name, paper, "no trace with expert kernels and a roofline (notebook 04)")

    def apart(row: dict) -> float:
        return (row["w4a16_s"] - row["fp4_naive_s"]) / row["w4a16_s"]

    told = max(rows, key=lambda phase: apart(rows[phase]))
    row = rows[told]
    ours = (
        f"{told} step: FP4-naive {1e3 * row['fp4_naive_s']:.2f} ms, W4A16 {1e3 * row['w4a16_s']:.2f} ms, trace "
        f"{1e3 * row['measured_s']:.2f} ms"
        + (" (simulated: kernel names are the twin's)" if verdict["simulated"] else "")
    )
    nearer = abs(row["measured_s"] - row["w4a16_s"]) < abs(row["measured_s"] - row["fp4_naive_s"])
    said, why = judge(
        nearer and apart(row) > APART,
        [f"the tokens a step (DRAM binds both hypotheses in this trace, so they agree within {max(apart(row), 0):.0%})"]
        if nearer
        else [],
        "the trace lies nearer to FP4-naive",
    )
    return Claim(name, paper, ours, said, why)
