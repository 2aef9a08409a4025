"""Steps, phases, launches, collectives: hand-built, with known answers."""

from __future__ import annotations

import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.nsight import collectives, decompose, roofline
from spoc_lib.nsight.text import decomposition_text

ARGMAX = "void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::ArgMaxOps<T1>>>(T3)"
SPLIT = "kernel_unified_attention_3d"
BOTH = "kernel_unified_attention_2d"
CONTEXT = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP16VarSeqQ128Kv128PersistentContext"
GENERATION = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP16MultiCtasKvVarSeqQ8Kv128StaticSwapsAbForGen"
SPARSE = "fmhaSm100fKernel_QkvE4m3OBfloat16HQk576HV512PagedKvDenseStaticTokenSparseP1VarSeqQ32Kv128SwapsAbForGen"
FA2 = ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128, (int)64, (int)128, (int)4>, (bool)1, "
       "(bool)0>(flash::Flash_fwd_params)")
FA2_COMBINE = "void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<(int)128>, 4, 3, true>(P)"


def fa3(rows: int, columns: int, head: int = 128, values: int = 128) -> str:
    """FlashAttention 3 with a tile of rows x columns; head: dimension of keys, values: of values."""
    return (f"void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
            f"flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>>, cute::tuple<cute::C<{rows}>, "
            f"cute::C<{columns}>, cute::C<{head}>>, {values}, cutlass::bfloat16_t>, "
            f"flash::VarlenDynamicPersistentTileScheduler<{rows}, {columns}, 256, 128, false>>>>(T1::Params)")


def steps_of(new_trace, kernel_names, steps: list[list[str]], end: str = ARGMAX) -> list[str]:
    """The phases found in a trace of these attention kernels step by step, a GEMM before each step's sampler. The
    first step found follows one that is left out, since nobody knows where it began."""
    trace, time = new_trace(), 0
    for names in [steps[0], *steps]:
        for name in [*names, kernel_names["gemm"], end]:
            trace.kernel(name, time, time + 10)
            time += 12
    return decompose(trace.done()).steps.phase.tolist()


@pytest.mark.parametrize(("names", "phase"), [
    ([SPLIT], "decode"), ([SPLIT, BOTH], "decode"), ([BOTH], "unknown"),
    ([FA2], "unknown"), ([FA2, FA2_COMBINE], "decode"),
    ([fa3(64, 128)], "decode"), ([fa3(64, 128), fa3(192, 160)], "decode"),  # sliding layers keep the large tile
    ([fa3(128, 160)], "unknown"), ([fa3(192, 128)], "unknown"),  # 8-bit keys decode with 128 rows, too
    ([fa3(64, 64, 64, 512)], "unknown"),  # latent attention has tiles of 64 rows for prompts as well
    ([CONTEXT], "prefill"), ([GENERATION], "decode"), ([CONTEXT, GENERATION], "mixed"),
    ([SPARSE], "unknown"),  # prompts of sparse attention run the generation kernels
    (["void flashinfer::BatchPrefillWithPagedKVCacheKernel<T>(P)"], "unknown"),
    (["void flashinfer::BatchDecodeWithPagedKVCacheKernel<T>(P)"], "decode"),
    (["void flashinfer::BatchDecodeWithPagedKVCacheKernel<T>(P)",
      "void flashinfer::BatchPrefillWithPagedKVCacheKernel<T>(P)"], "unknown"),
    (["void vllm::paged_attention_v2_kernel<T>(P)"], "decode"),
    (["void flash_fwd_splitkv_mla_kernel<T>(P)"], "decode"),
    (["some_attention_kernel"], "unknown"),
])
def test_a_phase_is_told_by_names_that_hold_it_and_by_no_other(new_trace, kernel_names, names, phase):
    assert steps_of(new_trace, kernel_names, [names] * 4) == [phase] * 4


def test_steps_of_unknown_phase_are_said(new_trace, kernel_names):
    trace, time = new_trace(), 0
    for _ in range(5):
        for name in (FA2, kernel_names["gemm"], ARGMAX):
            trace.kernel(name, time, time + 10)
            time += 12
    result = decompose(trace.done())
    assert any("4 steps run attention kernels that serve prompts and single tokens alike" in n for n in result.notes)
    assert "steps of unknown phase: 4" in decomposition_text(result)


@pytest.mark.parametrize("router", [
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(T)", ARGMAX,
    "void cub::DeviceRadixSortOnesweepKernel<T>(T)"])
def test_steps_are_not_counted_from_the_choice_of_experts(new_trace, kernel_names, router):
    """Ten steps of six layers, each choosing its experts by a kernel that samplers run, too."""
    trace, time = new_trace(), 0
    for _ in range(10):
        for name in [*(SPLIT, router, kernel_names["moe_gemm"]) * 6, kernel_names["gemm"], ARGMAX]:
            trace.kernel(name, time, time + 10)
            time += 12
    steps = decompose(trace.done()).steps
    assert len(steps) == 9 and set(steps.kernels) == {20}  # the first has no known start


def test_a_choice_of_experts_without_a_sampler_makes_no_steps(new_trace, kernel_names):
    trace, time = new_trace(), 0
    for _ in range(60):
        for name in (SPLIT, "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(T)",
                     kernel_names["moe_gemm"]):
            trace.kernel(name, time, time + 10)
            time += 12
    assert decompose(trace.done()).steps.empty


def test_steps_follow_the_launches_not_the_clock(new_trace, kernel_names):
    """The host runs ahead: step 2's range has begun while the GPU still computes step 1."""
    trace = new_trace()
    trace.nvtx("spoc step=1 phase=decode tokens=8 decodes=8", 0, 100)
    trace.nvtx("spoc step=2 phase=prefill tokens=64 prefills=1", 110, 200)
    trace.launch(10, 1)
    trace.launch(120, 2)
    trace.kernel(kernel_names["attn"], 150, 250, correlation=1)
    trace.kernel(kernel_names["gemm"], 260, 300, correlation=1)   # runs while step 2's range is open
    trace.kernel(kernel_names["gemm"], 330, 500, correlation=2)
    trace.kernel(kernel_names["gemm"], 600, 700, correlation=99)  # launched outside every step
    steps = decompose(trace.done()).steps
    assert steps[["step", "phase", "start_ns", "duration_ns", "busy_ns", "launch_gap_ns", "host_gap_ns",
                  "kernels"]].values.tolist() == [[1, "decode", 150, 180, 140, 10, 30, 2],
                                                  [2, "prefill", 330, 170, 170, 0, 0, 1]]


def test_time_outside_steps_is_a_phase_of_its_own(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 50, correlation=9)
    trace.kernel(kernel_names["gemm"], 100, 150, correlation=1)
    trace.launch(90, 1)
    trace.nvtx("execute_context_1(16)_generation_0(0)", 80, 95)
    table = decompose(trace.done()).table
    assert table.groupby("phase").window_ns.first().to_dict() == {"none": 100, "prefill": 50}
    assert table.busy_ns.sum() == 150


def test_ranges_without_launches_are_laid_over_the_kernels_by_time(new_trace, kernel_names):
    trace = new_trace()
    trace.nvtx("spoc step=5 phase=decode tokens=1", 0, 100, pid=300)  # of another process: the engine's core
    trace.kernel(kernel_names["gemm"], 10, 90)
    result = decompose(trace.done())
    assert result.steps.step.tolist() == [5]
    assert any("by time" in note for note in result.notes)


def test_kernel_patterns_show_steps_and_phases(new_trace, kernel_names):
    trace = new_trace()
    time = 0
    for attention in ([GENERATION], [GENERATION], [CONTEXT], [GENERATION, CONTEXT], [GENERATION]):
        for name in [kernel_names["gemm"], *attention, ARGMAX]:
            trace.kernel(name, time, time + 10)
            time += 12
        time += 100
    result = decompose(trace.done())
    assert result.metadata["steps_from"] == "kernels"
    assert result.steps.phase.tolist() == ["decode", "prefill", "mixed", "decode"]  # the first has no known start
    assert result.steps.host_gap_ns.tolist()[:2] == [102, 102]
    assert result.table.busy_ns.sum() == result.window_ns[1] - result.window_ns[0]


def test_vllms_detailed_annotation_tells_the_whole_batch(new_trace, kernel_names):
    """Two chunks (100 new after 0, 50 new after 200) and three decodes with contexts of 1000 each."""
    text = (f"execute_153_context_2(sq150sk350sqsq{100**2 + 50**2}sqsk{100 * 100 + 50 * 250})"
            f"_generation_3(sq3sk3000sqsq3sqsk3000)")
    trace = new_trace()
    trace.nvtx(text, 0, 100)
    trace.launch(10, 1)
    trace.kernel(kernel_names["moe_gemm"], 20, 900_000)
    result = decompose(trace.done())
    row = result.steps.iloc[0]
    assert (row.phase, row.tokens, row.decodes, row.decode_context, row.prefills, row.prefill_tokens) == (
        "mixed", 153, 3, 3000, 2, 150)
    assert row.prefill_pairs == 100 * 101 / 2 + 50 * (200 + 51 / 2) and row.prefill_context == 200
    verdict = roofline(result, load_model("gpt-oss-120b"), load_gpu("h100-sxm"), gpu_count=4)
    assert verdict.steps == 1 and verdict.row("moe_gemm", "mixed")["w4a16_s"] > 0


def test_no_pattern_is_said(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 10)
    result = decompose(trace.done())
    assert result.steps.empty and any("no steps recognised" in note for note in result.notes)


def test_waiting_is_told_from_transfer_and_the_late_rank_is_named(new_trace, kernel_names):
    trace = new_trace()
    for k in range(10):
        at = k * 1000
        trace.kernel(kernel_names["comm"], at, at + 300, pid=100, device=0)        # waits 200, transfers 100
        trace.kernel(kernel_names["comm"], at + 50, at + 300, pid=200, device=0)   # waits 150
        trace.kernel(kernel_names["comm"], at + 200, at + 300, pid=300, device=0)  # the last
    path = trace.done()
    result = collectives(path)
    rows = result.ranks.set_index("pid")
    assert result.paired == 10 and result.unpaired == 0
    assert rows.wait_ns.to_dict() == {100: 2000, 200: 1500, 300: 0}
    assert rows.transfer_ns.to_dict() == {100: 1000, 200: 1000, 300: 1000}
    assert rows["last"].to_dict() == {100: 0, 200: 0, 300: 10}
    assert result.late == (300, 0) and result.late_share == 1.0
    assert result.wait_share == pytest.approx(3500 / 6500)
    assert "process 300" in result.sentence
    assert decompose(path).waiting.late == (300, 0)


def test_ranks_that_arrive_together_blame_nobody(new_trace, kernel_names):
    trace = new_trace()
    for device in range(4):
        for k in range(20):
            trace.kernel(kernel_names["comm"], k * 100 + device % 2, k * 100 + 60, device=device)
    result = collectives(trace.done())
    assert result.late is None and "arrive together" in result.sentence


def test_a_window_that_cuts_one_rank_shifts_the_pairs(new_trace, kernel_names):
    trace = new_trace()
    for k in range(20):
        for device in range(2):
            if (k, device) != (0, 1):  # GPU 1 started before the capture did
                trace.kernel(kernel_names["comm"], k * 1000 + 500 * device, k * 1000 + 600, device=device)
    result = collectives(trace.done())
    assert result.paired == 19 and result.unpaired == 1 and result.late == (100, 1)


def test_collectives_of_separate_groups_are_no_pairs(new_trace, kernel_names):
    trace = new_trace()
    for k in range(4):
        trace.kernel(kernel_names["comm"], k * 1000, k * 1000 + 100, device=0)
        trace.kernel(kernel_names["comm"], k * 1000 + 500, k * 1000 + 600, device=1)
    result = collectives(trace.done())
    assert result.paired == 0 and result.unpaired == 8 and "No collective ran on all GPUs" in result.sentence


def test_the_real_pair_of_gpus_waits_for_one_of_them(shared):
    result = collectives(shared("data/nsight/two_h100/mfu_2gpu_before.sqlite"))
    assert result.paired == 33 and result.late == (145, 1)
    rows = result.ranks.set_index("pid")
    assert (rows.wait_ns + rows.transfer_ns).to_dict() == {144: 17172652, 145: 8229100}


def test_idle_time_is_explained_by_length(new_trace, kernel_names):
    trace = new_trace()
    edges = [0, 5_000, 55_000, 555_000, 5_555_000, 55_555_000]  # gaps of 5 us, 50 us, 500 us, 5 ms, 50 ms
    at = 0
    for gap in (5_000, 50_000, 500_000, 5_000_000, 50_000_000, None):
        trace.kernel(kernel_names["gemm"], at, at + 1000)
        at += 1000 + (gap or 0)
    gaps = decompose(trace.done()).gaps
    assert gaps.gaps.tolist() == [1, 1, 1, 1, 1] and gaps.total_ns.sum() == edges[-1]
