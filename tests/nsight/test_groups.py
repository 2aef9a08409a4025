"""Collectives within their process group: tensor, pipeline, data and expert parallelism, and several machines."""

from __future__ import annotations

import numpy as np
import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.nsight import collectives, decompose, roofline
from spoc_lib.nsight.roofline import batch_of

SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def groups(result):
    return [[device for _, device in group] for group in result.groups]


@pytest.mark.parametrize("offset", [20_000, 50_000, 130_000, 200_000, None])
def test_replicas_of_tensor_parallel_groups_make_no_straggler(new_trace, kernel_names, offset):
    """Two groups of two, the second later by a constant, or by chance (None); each arrives together."""
    trace, rng = new_trace(), np.random.default_rng(1)
    for group in range(2):
        at = 1_000_000
        for _ in range(120):
            at += 400_000 if offset is not None else int(rng.integers(150_000, 650_000))
            for device in (2 * group, 2 * group + 1):
                begin = at + (offset or 0) * group
                trace.kernel(kernel_names["comm"], begin + int(rng.integers(0, 1500)),
                             begin + 100_000 + int(rng.integers(0, 800)), pid=100 + device, device=device)
    result = collectives(trace.done())
    assert result.late is None and result.wait_share < 0.05
    if offset != 20_000:  # a fifth of a collective apart all the time, and nobody can tell them from one group
        assert groups(result) == [[0, 1], [2, 3]]


def test_a_late_rank_is_late_in_its_own_group(new_trace, kernel_names):
    trace = new_trace()
    for k in range(50):
        for device, late in ((0, 0), (1, 60_000), (2, 0), (3, 0)):
            begin = k * 400_000 + (170_000 if device > 1 else 0)
            trace.kernel(kernel_names["comm"], begin + late, begin + 100_000, pid=100 + device, device=device)
    result = collectives(trace.done())
    assert groups(result) == [[0, 1], [2, 3]] and result.late == (101, 1) and result.late_share == 1.0
    rows = result.ranks.set_index("device")
    assert rows.wait_ns.to_dict() == {0: 50 * 60_000, 1: 0, 2: 0, 3: 0} and "of its group (2 groups)" in result.sentence


def test_one_kernel_in_two_groups_of_its_ranks(new_trace, kernel_names):
    """The same name reduces over tensor parallel pairs, then over data parallel pairs, again and again."""
    trace = new_trace()
    for k in range(40):
        for pairs, base in ((((0, 1), (2, 3)), 0), (((0, 2), (1, 3)), 200_000)):
            for n, pair in enumerate(pairs):
                for device in pair:
                    at = k * 500_000 + base + 60_000 * n
                    trace.kernel(kernel_names["comm"], at, at + 50_000, device=device)
    result = collectives(trace.done())
    assert groups(result) == [[0, 1], [0, 2], [1, 3], [2, 3]] and result.paired == 160 and result.late is None


def test_a_pipelines_sends_and_receives_blame_nobody(new_trace, kernel_names):
    """TP 2 x PP 2: stage 1's receive waits for stage 0's work in every step; within a stage all arrive together."""
    trace = new_trace()
    for k in range(30):
        at = k * 1_000_000
        for device in range(4):
            stage = device // 2
            trace.kernel(kernel_names["comm"], at + stage * 500_000, at + stage * 500_000 + 50_000, device=device)
            begin = at + (400_000 if stage == 0 else 60_000)  # who receives waits 340 us
            trace.kernel(SEND, begin, at + 420_000, device=device, stream=9)
    result = collectives(trace.done())
    assert result.late is None and result.wait_share == 0 and result.paired == 60
    assert any("stages of a pipeline" in note for note in result.notes)


def test_an_all_to_all_of_experts_shows_who_is_late(new_trace):
    trace = new_trace()
    for k in range(30):
        for device in range(4):
            trace.kernel(SEND, k * 1_000_000 + (300_000 if device == 2 else 0), k * 1_000_000 + 400_000 + device * 500,
                         device=device)
    result = collectives(trace.done())
    assert groups(result) == [[0, 1, 2, 3]] and result.late == (100, 2)


def test_unequal_counts_pair_what_belongs_together(new_trace, kernel_names):
    trace = new_trace()
    for k in range(30):
        for device in range(2):
            if not (device == 1 and k in (0, 7, 8)):
                trace.kernel(GATHER, k * 1_000_000, k * 1_000_000 + 100_000, device=device)
    result = collectives(trace.done())
    assert result.paired == 27 and result.unpaired == 3 and result.late is None


def test_the_communicator_is_taken_from_nccls_own_ranges(new_trace, kernel_names, shared, ddl_table):
    """Two communicators whose collectives end at the same time are told apart by the payload of NCCL's calls."""
    newest = shared("data/nsight/schemas/schema-nsys-2026.2.1-3.25.0.sql").read_text()
    trace = new_trace("\n".join(ddl_table(newest, t) for t in (
        "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS")))
    for k in range(20):
        for device in range(4):
            at, pid = k * 1_000_000, 100 + device
            trace.insert("NVTX_EVENTS", start=at - 900, end=at - 700, eventType=59, domainId=1,
                         globalTid=(1 << 48) | (pid << 24) | 5, textId=trace.string("ncclAllReduce"),
                         jsonText=f'{{"NCCL communicator ID": {7 + device // 2}, "Message size [bytes]": 64}}')
            trace.launch(at - 800, k + 1, pid=pid)
            trace.kernel(kernel_names["comm"], at + (50_000 if device > 1 else 0), at + 100_000, pid=pid, device=device,
                         correlation=k + 1)
    result = collectives(trace.done())
    assert groups(result) == [[0, 1], [2, 3]] and result.wait_share == 0 and result.late is None


def test_a_roofline_of_more_gpus_than_a_group_is_refused(new_trace, kernel_names):
    trace = new_trace()
    for k in range(20):
        for device in range(4):
            at = k * 400_000 + (170_000 if device > 1 else 0)
            trace.kernel(kernel_names["comm"], at, at + 100_000, device=device)
            trace.kernel(kernel_names["moe_gemm"], at + 100_000, at + 200_000, device=device)
    found = decompose(trace.done())
    batch = batch_of("tokens=64,decodes=64,decode_context=64000,logits=64")
    model, gpu = load_model("gpt-oss-120b"), load_gpu("h100-sxm")
    with pytest.raises(InputError, match=r"groups of 2 GPUs, and 4 were to share the model \(--tp 2\)"):
        roofline(found, model, gpu, batch, steps=20)
    assert roofline(found, model, gpu, batch, steps=20, gpu_count=2).gpus == 2
