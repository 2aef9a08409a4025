"""One resource at a time is made scarce on the twin, and it is the one that is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spoc_lib.config import Slo, load_cluster
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.sweep.cases import step_model
from spoc_lib.sweep.drivers import virtual_rung
from spoc_lib.sweep.evidence import Limits, step_figures
from spoc_lib.sweep.record import Timing
from spoc_lib.sweep.rung import pressure, summarise
from spoc_lib.sweep.saturation import Saturation, saturation
from spoc_lib.telemetry.timeline import window_summary
from spoc_lib.workload import build_script

SLOS = [Slo(metric="ttft", limit_s=0.5), Slo(metric="itl", limit_s=0.05)]


def engine(**flags: Any) -> EmbeddedEngine:
    return EmbeddedEngine.from_cluster(load_cluster("sim-2xh200"), flags)


def host_bound(**parameters: float) -> EmbeddedEngine:
    model = step_model(engine())
    return replace(engine(), step_time=model.with_parameters(model.parameters.model_copy(update=parameters)))


def narrow_link() -> EmbeddedEngine:
    plain = engine()
    return EmbeddedEngine.build(plain.flags, plain.model, plain.gpu.model_copy(update={"link_bytes_per_s": 5e9}), 2)


def stopped(server: EmbeddedEngine, users: int, itl_limit_s: float = 0.05) -> Saturation:
    """What saturates in a rung of `users` on `server`, with everything that a sweep gives to the question."""
    slos = [SLOS[0], SLOS[1].model_copy(update={"limit_s": itl_limit_s})]
    script = build_script("tiny", 3, salt=1, gap_cap_s=10, context_limit=server.max_model_len)
    record = virtual_rung(server, script, users, Timing(25, 10), 0)
    summary = window_summary(record.metrics, *record.window)
    row, verdicts = summarise(record.requests, record.chunks, record.metrics, record.window, slos, users, "virtual",
                              start_s=0, end_s=record.end_s, planned=record.planned, gap_cap_s=10, server=summary)
    assert row["verdict"] == "missed", row["reason"]
    flags = server.flags
    return saturation(summary, row, Limits(flags.max_num_seqs, flags.max_num_batched_tokens,
                                           server.gpu.link_bytes_per_s, itl_limit_s),
                      step_figures=step_figures(record.steps, record.window, flags.max_num_batched_tokens),
                      binding=max(verdicts, key=pressure))


@pytest.mark.parametrize("make, users, itl_limit_s, resource, said", [
    (lambda: engine(num_gpu_blocks_override=400, max_model_len=4096), 100, 0.05, "kv_blocks", "were preempted"),
    (lambda: engine(max_num_seqs=8), 60, 0.05, "sequence_slots", "of max_num_seqs = 8"),
    (lambda: engine(max_num_batched_tokens=256, max_num_seqs=256), 400, 0.05, "token_budget", "= 256 while"),
    (lambda: host_bound(gap_us=60_000.0), 60, 0.05, "host", "SMs are active only"),
    (lambda: host_bound(frontend_us=1e6), 40, 0.05, "host", "pass before the scheduler sees the request"),
    (narrow_link, 150, 0.05, "interconnect", "NVLink sends"),
    (engine, 200, 0.05, "prefill_compute", "tokens wait for prompt chunks"),
    (engine, 100, 0.008, "decode_bandwidth", "decode steps alone reach the limit"),
], ids=["small pool", "few slots", "small budget", "slow host", "slow front end", "narrow link", "many prompts",
        "many sequences"])
def test_what_is_made_scarce_is_named(make, users, itl_limit_s, resource, said):
    found = stopped(make(), users, itl_limit_s)
    assert (found.resource, said in found.evidence[0]) == (resource, True), found.evidence


def test_the_figures_of_every_resource_stand_beside_the_verdict():
    evidence = "\n".join(stopped(engine(), 200).evidence)
    for said in ("requests wait on average", "slots", "KV blocks", "preemptions", "token budget of 8192", "SMs", "DRAM",
                 "tensor pipes", "any kernel", "NVLink"):
        assert said in evidence
