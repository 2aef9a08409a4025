"""Idle time by whether the launch came late, and copies between host and device: hand-built, with known answers."""

from __future__ import annotations

import sqlite3
from collections import defaultdict

import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.nsight import decompose, explain_idle, roofline
from spoc_lib.nsight.advice import advice
from spoc_lib.nsight.roofline import batch_of

STEP = "execute_context_0(0)_generation_64(64)"
BATCH = batch_of("tokens=64,decodes=64,decode_context=64000,decode_window=8192,logits=64")


def causes(path, **options):
    table = explain_idle(decompose(path, **options)).table
    return {row.cause: round(row.seconds * 1e9) for row in table.itertuples() if row.seconds}


def test_a_gap_is_the_hosts_where_its_launch_began_after_the_gpu_had_gone_idle(new_trace, kernel_names):
    """Late by 60 of a 100 ns gap, in time for a gap of 30, and a graph's kernels share their launch."""
    trace = new_trace()
    for number, (start, end, launched) in enumerate(((0, 100, -9), (200, 300, 140), (330, 400, 290)), start=1):
        trace.launch(launched, number)
        trace.kernel(kernel_names["gemm"], start, end, correlation=number)
    trace.kernel(kernel_names["gemm"], 450, 500, correlation=3)  # node of the graph that 3 launched
    trace.kernel(kernel_names["gemm"], 520, 600, correlation=77)  # launched by nothing that the trace holds
    assert causes(trace.done()) == {"host": 100, "device": 80, "unknown": 20}


def test_correlation_ids_are_joined_within_their_process(new_trace, kernel_names):
    trace = new_trace()
    for pid, launched in ((100, 90), (200, 150)):  # the same ids: in time in one process, late in the other
        for number, start in ((1, 0), (2, 200)):
            trace.launch(start - 5 if number == 1 else launched, number, pid=pid)
            trace.kernel(kernel_names["gemm"], start, start + 100, pid=pid, correlation=number)
    assert causes(trace.done()) == {"host": 50, "device": 50}  # means over the two GPUs of 100 ns each


def test_within_a_step_idle_time_is_never_for_want_of_requests(new_trace, kernel_names):
    """12 ms of the host before each step of 8 ms: however long, the step is running on the host."""
    trace = new_trace()
    for n in range(5):
        at = n * 20_000_000
        trace.nvtx(STEP, at, at + 19_999_999)
        trace.launch(at + 11_900_000, n + 1)
        trace.kernel(kernel_names["gemm"], at + 12_000_000, at + 20_000_000, correlation=n + 1)
    path = trace.done()
    assert causes(path) == {"host": 4 * 12_000_000}
    said = explain_idle(decompose(path)).sentence
    assert "the host between steps" in said and "nothing to do" not in said and "no request" not in said
    assert advice(decompose(path), None)[0].startswith("The host between steps, 55% at stake")


def test_a_trace_without_steps_does_not_speak_of_the_time_between_them(new_trace, kernel_names):
    trace = new_trace()
    for n in range(2):
        trace.launch(n * 1000, n + 1)
        trace.kernel(kernel_names["gemm"], n * 1000 + 10, n * 1000 + 100, correlation=n + 1)
    said = explain_idle(decompose(trace.done())).sentence
    assert said.endswith("most of it gaps whose next kernel was launched after the GPU had gone idle (83%).")


def test_where_no_step_runs_on_the_host_either_it_is_said(new_trace, kernel_names):
    trace = new_trace()
    for n in range(4):
        at = n * 1_000_000
        trace.nvtx(STEP, at, at + 300_000)
        trace.launch(at + 100_000, n + 1)
        trace.kernel(kernel_names["gemm"], at + 100_100, at + 600_100, correlation=n + 1)
    # of 500 us between two steps, 399.9 are before the next step's range opens
    assert causes(trace.done()) == {"host": 3 * 100_100, "outside": 3 * 399_900}


def test_a_window_does_not_make_a_late_launch_early(new_trace, kernel_names):
    trace = new_trace()
    for number, (start, launched) in enumerate(((0, -5), (1_000, 500)), start=1):
        trace.launch(launched, number)
        trace.kernel(kernel_names["gemm"], start, start + 100, correlation=number)
    path = trace.done()
    assert causes(path, window=(700e-9, 1_100e-9)) == {"host": 300}  # idle since 100, launched at 500


def independent(path):
    """{(globalPid, device): [late, in time, unknown] ns} by SQL and a sorted list, sharing nothing with the product."""
    base = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    calls = {}
    for start, thread, number in base.execute(
            "SELECT start, globalTid, correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME ORDER BY start DESC"):
        calls[thread >> 24, number] = start
    ran = defaultdict(list)
    for table in ("KERNEL", "MEMCPY", "MEMSET"):
        for pid, device, start, end, number in base.execute(
                f"SELECT globalPid, deviceId, start, end, correlationId FROM CUPTI_ACTIVITY_KIND_{table}"):
            ran[pid, device].append((start, end, calls.get((pid >> 24, number))))
    result = {}
    for key, events in ran.items():
        sums, reach = [0, 0, 0], None
        for start, end, launched in sorted(events, key=lambda e: e[:2]):
            if reach is not None and start > reach:
                sums[2 if launched is None else 0 if launched >= reach else 1] += start - reach
            reach = end if reach is None else max(reach, end)
        result[key] = sums
    return result


def test_the_real_traces_idle_time_agrees_with_an_independent_sum(shared):
    path = shared("data/nsight/two_h100/mfu_2gpu_before.sqlite")
    idle = decompose(path).idle.groupby("device")[["late_ns", "early_ns"]].sum()
    for (_, device), (late, early, _) in independent(path).items():
        assert idle.loc[device].tolist() == [late, early]
    assert independent(path) and idle.late_ns.round(-4).to_dict() == {0: 21_460_000, 1: 27_530_000}


def test_copies_from_the_host_are_a_resource_of_their_own(new_trace, kernel_names):
    """One kernel of 1 ms, then 99 ms of copies: the link to the host limits, and the advice is about it."""
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 10_000_000, 11_000_000)
    for n in range(99):
        trace.copy(11_000_000 + n * 1_000_000, 12_000_000 + n * 1_000_000, kind=1 + n % 2)
    found = decompose(trace.done())
    assert found.devices[0]["host_copies_s"] == 0.099 and found.devices[0]["busy_s"]["mem"] == 0.099
    said = explain_idle(found).sentence
    assert "for 99% of the window a GPU only copies" in said and "are the limit" not in said
    assert advice(found, None)[0].startswith("Copies between host and device, 99% at stake")
    verdict = roofline(found, load_model("gpt-oss-120b"), load_gpu("h100-sxm"), BATCH, gpu_count=1, steps=1)
    assert verdict.binding_resource == "copy" and verdict.resources["copy"] == pytest.approx(0.99)
    assert verdict.sentence.endswith("the nearest roof is copies between host and device.")
    assert verdict.row("mem") == {}
    assert sum(verdict.resources.values()) == pytest.approx(1.0)


def test_which_copies_cross_the_link(new_trace, kernel_names, shared, ddl_table):
    """Managed memory that migrates does, a copy within the GPU or to another one does not; pageable memory is said."""
    newest = shared("data/nsight/schemas/schema-nsys-2026.2.1-3.25.0.sql").read_text()
    trace = new_trace("\n".join(ddl_table(newest, t) for t in ("StringIds", "CUPTI_ACTIVITY_KIND_KERNEL",
                                                               "CUPTI_ACTIVITY_KIND_MEMCPY")))
    trace.kernel(kernel_names["gemm"], 0, 50)
    kinds = ((1, 0, 2), (2, 2, 1), (11, 4, 4), (12, 4, 4), (8, 2, 2), (10, 2, 2), (0, 2, 0))
    for n, (kind, source, target) in enumerate(kinds):
        trace.insert("CUPTI_ACTIVITY_KIND_MEMCPY", start=100 * (n + 1), end=100 * (n + 1) + 10, deviceId=0,
                     copyKind=kind, globalPid=(1 << 48) | (100 << 24), srcKind=source, dstKind=target)
    trace.copy(140, 200, kind=8)  # within the GPU, behind a copy from the host
    trace.kernel(kernel_names["gemm"], 200, 205)  # hides half of one
    found = decompose(trace.done())
    row = found.host_copies.iloc[0]
    assert (row.total_ns, row.exposed_ns, row.pageable_ns) == (50, 45, 20)
    assert {n[13:-1] for n in found.kernels.name if n.startswith("[CUDA memcpy ")} == {
        "Host-to-Device, pageable", "Device-to-Host", "Device-to-Host, pageable", "Unified Host-to-Device",
        "Unified Device-to-Host", "Device-to-Device", "Peer-to-Peer"}
