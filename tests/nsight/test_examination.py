"""The doctor's report: gates, and what to try next, from traces whose answer is known."""

from __future__ import annotations

import pandas as pd
import pytest

from spoc_lib import config
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.kerneltrace import write_trace
from spoc_lib.nsight.examination import examine

MODEL, GPU = config.load_model("gpt-oss-120b"), config.load_gpu("h100-sxm")


def examined(path, gpus=None):
    return examine(path, MODEL, GPU, gpus)


def test_a_whole_trace_passes_every_gate_and_half_of_its_gpus_fail_one(tmp_path):
    engine = EmbeddedEngine.from_cluster(config.load_cluster("sim-4xh100"))
    decode = Batch(40, 40, 40 * 30_000, 40 * 128, 0, 0, 0.0, 0.0, 0, 40)
    mixed = Batch(4096 + 40, 40, 40 * 30_000, 40 * 128, 1, 4096, 4096 * 20_000.0, 4096 * 128.0, 20_000, 41)
    batches = [decode] * 24 + [mixed] * 2
    durations = [engine.step_time.seconds(batch) for batch in batches]
    starts = [1 + sum(durations[:n]) for n in range(len(batches))]
    steps = pd.DataFrame([{"time_s": start, "duration_s": duration, **batch._asdict()}
                          for start, duration, batch in zip(starts, durations, batches, strict=True)])
    path = write_trace(tmp_path / "t.sqlite", engine, steps, 0, 100)
    found = examined(path, 4)
    assert found.gates().passed.all() and found.gate_sentence().startswith("All 6 gates passed")
    partial = examined(path, 8)
    assert partial.gates().query("not passed").gate.tolist() == ["GPUs with kernels"]
    assert "GPUs with kernels: 4, wanted 8" in partial.gate_sentence()
    assert found.to_dict()["advice"] == found.advice() and len(found.to_dict()["gates"]) == 6
    advice = " ".join(found.advice())
    assert "Mixed steps last" in advice and "--max-num-batched-tokens" in advice
    assert "a mixed step is bound by tensor-core compute" in advice and "prefix caching" in advice
    assert found.phases().set_index("phase").steps.to_dict() == {"decode": 24, "mixed": 2}
    few = found.few_steps(2)
    assert set(few.device) == {0, 1, 2, 3} and 0 < few.start_s.max() < 2 * durations[0] + 1e-3
    said = found.findings()
    assert said[1].startswith("Simulated: a step of") and "nearest roof" in said[1]
    assert found.top_kernels(4).kernel.is_unique and found.top_kernels().kernel.str.len().max() <= 99


def steps_with_gaps(trace, names, *, gap_ns, host_ns, count=30):
    """`count` decode steps of ten kernels of 1 ms, `gap_ns` between kernels and `host_ns` behind the last."""
    at = 1_000_000
    for step in range(count):
        begin = at - 2_000
        for kernel in range(10):  # each launched 1 us before it starts: late wherever the GPU was idle by then
            trace.launch(at - 1_000, step * 10 + kernel + 1)
            trace.kernel(names["gemm"], at, at + 1_000_000, correlation=step * 10 + kernel + 1)
            at += 1_000_000 + gap_ns
        at += host_ns
        trace.nvtx(f"spoc step={step} phase=decode tokens=8 decodes=8 decode_context=8000 decode_window=1024 "
                   f"prefills=0 prefill_tokens=0 prefill_pairs=0.0 prefill_window_pairs=0.0 prefill_context=0 logits=8",
                   begin, at - 2_001)
    trace.meta("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Node")
    return trace.done()


@pytest.mark.parametrize("gap_ns, host_ns, word, other", [
    (500_000, 0, "Launch gaps", "The host between steps"),
    (0, 5_000_000, "The host between steps", "Launch gaps"),
])
def test_idle_time_is_met_where_it_arises(new_trace, kernel_names, gap_ns, host_ns, word, other):
    found = examined(steps_with_gaps(new_trace(), kernel_names, gap_ns=gap_ns, host_ns=host_ns))
    said = found.advice()
    assert any(s.startswith(word) for s in said) and not any(s.startswith(other) for s in said)
    assert any("33% at stake" in s or "30% at stake" in s or "31% at stake" in s or "32% at stake" in s for s in said)


def test_the_late_gpu_is_named(new_trace, kernel_names):
    trace = new_trace()
    for n in range(30):
        at = n * 10_000_000
        for device, busy in ((0, 2_000_000), (1, 8_000_000)):
            trace.kernel(kernel_names["gemm"], at, at + busy, pid=100 + device, device=device)
            trace.kernel(kernel_names["comm"], at + busy, at + 9_000_000, pid=100 + device, device=device)
    said = examined(trace.done(), 2).advice()
    assert said[0].startswith("Waiting in collectives") and "GPU 1 of process 101" in said[0]


def test_kernels_without_a_rule_ask_for_one(new_trace):
    trace = new_trace()
    trace.kernel("zzz_unheard_of", 0, 100_000_000)
    found = examined(trace.done())
    assert any("name them in a rule file" in s for s in found.advice())
    assert "kernel time without a category" in found.gates().query("not passed").gate.tolist()


def test_a_real_trace_is_examined_without_a_roofline(shared):
    """Training on two GPUs: no batch is told, so there is no verdict, and all else is."""
    found = examined(shared("data/nsight/two_h100/mfu_2gpu_before.sqlite"), 2)
    said = found.findings()
    assert said[0].startswith("In a real trace of 0.3 s on 2 GPUs") and said[1].startswith("No roofline: ")
    assert any("waiting for the last GPU" in s for s in said)
    top = found.top_kernels(3)
    assert top.total_ms.is_monotonic_decreasing and top.percent_of_window.between(0, 100).all() and found.phases().empty
    few = found.few_steps()
    assert set(few.device) == {0, 1} and few.start_s.between(0, 0.06).all() and (few.duration_s >= 0).all()
    assert found.to_dict()["no_verdict"] and found.to_dict()["verdict"] is None
