"""The sentences under the trace's figures: two GPUs by hand, a stretch with a gap, a roofline and none."""

from __future__ import annotations

import pandas as pd

from spoc_lib.nsight.roofline import Verdict
from spoc_lib.report import nsight_figures as figures
from spoc_lib.report import nsight_findings as findings


def decomposition(*gpus: dict[str, int]) -> pd.DataFrame:
    return pd.DataFrame([{"pid": 1, "device": device, "phase": "none", "category": category, "busy_ns": ns}
                         for device, busy in enumerate(gpus) for category, ns in busy.items()])


def test_the_longest_categories_and_the_gpus_that_differ():
    both = {"attn": 60, "moe_gemm": 30, "idle": 10}
    assert findings.stacked(decomposition(both, both)) == [
        "Over 2 GPUs: attention 60% and MoE expert GEMM 30% of the time; idle 10%.",
        "The GPUs are alike: no share differs by more than 0.1 points."]
    apart = findings.stacked(decomposition(both, {"attn": 20, "moe_gemm": 50, "idle": 30}))
    assert apart[1] == "The GPUs are not alike, least of all in attention: 20% of the time on GPU 1, 60% on GPU 0."
    assert findings.stacked(decomposition(both)) == [
        "Over 1 GPU: attention 60% and MoE expert GEMM 30% of the time; idle 10%."], "one GPU is like itself"
    assert findings.stacked(decomposition({"idle": 100, "attn": 0})) == ["1 GPU ran no kernel in this window."]


def test_a_stretch_counts_an_overlap_once_and_what_no_kernel_fills():
    kernels = pd.DataFrame([(1, 0, 0.0, 4e-4, "attn", "flash"), (1, 0, 2e-4, 2e-4, "comm", "reduce"),
                            (1, 0, 8e-4, 2e-4, "gemm", "nvjet")],
                           columns=["pid", "device", "start_s", "duration_s", "category", "name"])
    assert findings.kernel_timeline(kernels) == [
        "In 1 ms a GPU runs 3 kernels of 267 µs on average, and none for 40% of it.",
        "The longest, 400 µs, is attention: flash."]
    assert findings.kernel_timeline(kernels[:0]) == ["No kernel runs in the stretch that is drawn."]
    assert figures.kernel_timeline(kernels[:0]).to_json()


def verdict(*rows: tuple[str, float, float, float], simulated: bool = False) -> Verdict:
    table = pd.DataFrame([{"phase": "all", "category": c, "measured_s": m, "w4a16_s": w, "fp4_naive_s": f}
                          for c, m, w, f in rows])
    return Verdict(table, 10, 1, "m", "g", "unknown", False, {}, "memory", "attn", "", [], simulated)


def test_a_step_beside_both_readings_of_its_roof():
    step = verdict(("attn", 4e-3, 3e-3, 3e-3), ("moe_gemm", 4e-3, 2e-3, 1e-3), ("idle", 9e-3, 0, 0))
    assert findings.predictions(step) == [
        "Of 8 ms of kernels in a mean step (measured), the hardware needs 5 ms as W4A16 (62%) and 4 ms as FP4-naive "
        "(50%).", "Most of the time above the roof is MoE expert GEMM, which runs at 50% of its roof: 2 ms a step."]
    alike = findings.predictions(verdict(("attn", 4e-3, 3e-3, 3e-3), ("other", 2e-3, 0.0, 0.0), simulated=True))
    assert alike == ["Of 6 ms of kernels in a mean step (simulated), the hardware needs 3 ms (50%), in both readings.",
                     "Most of the time above the roof is other kernels, for which no roof is reckoned: 2 ms a step."]
    faster = findings.predictions(verdict(("attn", 2e-3, 3e-3, 3e-3)))
    assert len(faster) == 1, "nothing lies above the roof"


def test_without_a_roofline_the_reason_is_said():
    assert findings.predictions(None, "the trace shows no engine steps") == [
        "No roofline: the trace shows no engine steps."]
    assert figures.predictions(None).layout.annotations[0].text == "no roofline for this trace"
