"""A trace held against the GPU, the model and the ranks that a roofline assumes; and what its commands are told."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

import spoc_lib
from spoc_lib.config import load_gpu, load_model
from spoc_lib.core.errors import InputError
from spoc_lib.nsight import decompose, diff, measured_steps, roofline
from spoc_lib.pipeline.parameters import P04

GPUS = """CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, totalMemory INTEGER,
  memoryBandwidth INTEGER, smCount INTEGER, clockRate INTEGER, uuid TEXT);
CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER NOT NULL, pid INTEGER NOT NULL);"""
MODEL, GPU = load_model("gpt-oss-120b"), load_gpu("h100-sxm")
DECODE = "execute_64_context_0(sq0sk0sqsq0sqsk0)_generation_64(sq64sk64000sqsq64sqsk64000)"
PREFILL = "execute_4096_context_1(sq4096sk4096sqsq16777216sqsk16777216)_generation_0(sq0sk0sqsq0sqsk0)"
ATTENTION = "kernel_unified_attention_3d"


def steps_of(trace, names, *, layers=36, count=3, name=ATTENTION, experts=True, labels=(DECODE,), pid=100, first=0):
    number = 0
    for n in range(first, count):
        at = n * 10_000_000
        trace.nvtx(labels[n % len(labels)], at, at + 9_000_000, pid=pid)
        for k in range(layers):
            number += 1
            trace.launch(at + 1 + k, number, pid=pid)
            begin = at + 1000 + k * 200_000
            trace.kernel(name, begin, begin + 50_000, pid=pid, correlation=number)
            trace.kernel(names["gemm"], begin + 50_000, begin + 100_000, pid=pid, correlation=number)
            if experts:
                trace.kernel(names["moe_gemm"], begin + 100_000, begin + 200_000, pid=pid, correlation=number)
    return trace


def on_gpu(trace, **told):
    trace.database.executescript(GPUS)
    for board in (0, 1):
        values = told if board == 1 else {"name": "NVIDIA T4", "totalMemory": 2**34}
        trace.insert("TARGET_INFO_GPU", vmId=1, id=board, **values)
    trace.insert("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=0, pid=100)
    return trace.done()


@pytest.mark.parametrize("told, why", [
    (dict(name="NVIDIA H100 80GB HBM3", totalMemory=85_029_158_912, memoryBandwidth=3_352_320_000_000, smCount=132,
          clockRate=1_980_000_000), None),
    (dict(name="NVIDIA H100 80GB HBM3"), None),
    (dict(name="NVIDIA H100 PCIe", totalMemory=85_029_158_912, smCount=114), "another form, 114 SMs, not 132"),
    (dict(name="NVIDIA H100 NVL"), "another form"),
    (dict(name="NVIDIA H100 80GB HBM3 MIG 1g.10gb"), "another form"),
    (dict(name="NVIDIA GH200 480GB"), "another chip"),
    (dict(name="NVIDIA H20"), "another chip"),
    (dict(name="NVIDIA H200"), "another chip"),
    (dict(name="NVIDIA A100-SXM4-80GB"), "another chip"),
    (dict(name="NVIDIA H100 64GB HBM3"), "64 GiB, not 79.6"),
    (dict(name=None, memoryBandwidth=2_039_000_000_000), "2.039 TB/s, not 3.35"),
    (dict(name="NVIDIA H100 80GB HBM3", clockRate=1_095_000_000), "1095 MHz, not 1980"),
])
def test_the_trace_s_gpu_is_the_roofline_s_or_there_is_no_roofline(new_trace, kernel_names, told, why):
    found = decompose(on_gpu(steps_of(new_trace(), kernel_names), **told))
    if why is None:
        assert roofline(found, MODEL, GPU).steps == 3
    else:
        with pytest.raises(InputError, match=re.escape(why)) as caught:
            roofline(found, MODEL, GPU)
        assert caught.value.code == "another-machine" and "T4" not in caught.value.message


def test_what_the_trace_does_not_tell_is_said(new_trace, kernel_names):
    found = decompose(steps_of(new_trace(), kernel_names).done())
    assert "The trace does not name its GPU" in " ".join(roofline(found, MODEL, GPU).sentences)


@pytest.mark.parametrize("options, why", [
    (dict(layers=24), "24 kernels of attention, and gpt-oss-120b has 36 layers"),
    (dict(layers=18), "a pipeline's stage"),
    (dict(experts=False), "it runs no experts, and gpt-oss-120b has 128"),
    (dict(name="_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernel"), "an AMD GPU"),
])
def test_another_model_or_maker_is_no_bound(new_trace, kernel_names, options, why):
    found = decompose(steps_of(new_trace(), kernel_names, **options).done())
    with pytest.raises(InputError, match=why):
        roofline(found, MODEL, GPU)


def test_experts_are_told_by_their_router_and_by_a_dense_model(new_trace, kernel_names):
    trace = steps_of(new_trace(), kernel_names)
    trace.kernel("void vllm::moe::topkGating<(int)8, (int)64, (int)4, (int)16>(float const*)", 0, 900)
    found = decompose(trace.done())
    with pytest.raises(InputError, match="routes among 64 experts, and gpt-oss-120b has 128"):
        roofline(found, MODEL, GPU)
    with pytest.raises(InputError, match="it runs experts, and dense has none"):
        roofline(found, MODEL.model_copy(update={"moe": None, "d_ff": 8192, "name": "dense"}), GPU)


def test_the_command_keeps_the_decomposition_and_ends_with_one(new_trace, kernel_names, spoc):
    path = on_gpu(steps_of(new_trace(), kernel_names), name="NVIDIA H20")
    done = spoc("decompose", path, "--model", "gpt-oss-120b", "--gpu", "h100-sxm", "--json", "-")
    told = json.loads(done.stdout)
    assert done.returncode == 1 and told["roofline"] is None and "NVIDIA H20" in told["no_roofline"]
    assert told["devices"][0]["busy_ns"]["attn"] and "No roofline: " in spoc(
        "decompose", path, "--model", "gpt-oss-120b", "--gpu", "h100-sxm").stdout


def test_vllms_detailed_labels_calibrate(new_trace, kernel_names):
    """Two ranks, the second's window opened a step later: prompts meet prompts, and sliding windows are reckoned."""
    trace = steps_of(new_trace(), kernel_names, count=9, labels=(DECODE, PREFILL), layers=3)
    steps_of(trace, kernel_names, count=9, labels=(DECODE, PREFILL), layers=3, pid=200, first=1)
    found = decompose(trace.done())
    assert found.steps.groupby("step").phase.nunique().max() == 1
    assert found.steps.groupby("pid").step.min().to_dict() == {100: 0, 200: 1}
    steps = measured_steps(found, MODEL)
    assert len(steps) == 8 and steps.decode_window.tolist()[:2] == [64 * 128, 0]
    assert steps.prefill_window_pairs.tolist()[:2] == [0, 4096 * 128]
    with pytest.raises(InputError, match="detailed_trace_annotation"):
        measured_steps(found)


def test_diff_says_what_its_table_says(new_trace, kernel_names):
    """A second of idle time more is the largest change, and another mix of phases is no slower step."""
    def trace(gap):
        made = new_trace()
        for n in range(4):
            made.kernel(kernel_names["gemm"], n * (1_000_000 + gap), n * (1_000_000 + gap) + 1_000_000)
        return decompose(made.done())

    a, b = trace(0), trace(500_000)
    found = diff(a, b)
    top = found.categories.loc[found.categories.delta_s.abs().idxmax()]
    assert found.unit == "second" and top.category in ("idle", "gemm") and "changes most" in found.sentence
    assert f"{top.a_s:.1%} in A, {top.b_s:.1%} in B" in found.sentence and any("window lasts" in n for n in found.notes)
    many = decompose(steps_of(new_trace(), kernel_names, count=8, labels=(DECODE, DECODE, PREFILL), layers=2).done())
    few = decompose(steps_of(new_trace(), kernel_names, count=8, labels=(DECODE, PREFILL), layers=2).done())
    said = diff(many, few, "step").sentence
    assert "other mixes (decode" in said and "within a phase: decode" in said


def test_whatever_a_sentence_names_exists(spoc):
    """Options of the command line, parameters of notebook 04, engine flags: each that the room's texts name."""
    root = Path(spoc_lib.__file__).parent
    texts = [node.value for path in (root / "nsight").glob("*.py")
             if path.name not in ("attach.py", "capture.py", "session.py")
             for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {word for text in texts for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    helped = "".join(spoc(command, "--help").stdout for command in ("decompose", "diff", "plan", "classify"))
    known = yaml.safe_load((root.parent / "data/flags/vllm.yaml").read_text())["flags"]
    flags = {f"--{name.replace('_', '-')}" for name in known}
    others = set(re.findall(r"--[a-z-]+", """nsys', docker's and other commands' own: --type --trace-fork-before-exec
        --cuda-graph-trace --include-json --profiler-config --output --force-overwrite --capture-range --pause --resume
        --capture-range-end --input-file --output-file --host --only --capture --rm --gpus --ipc --cap-add --volume
        --publish --env --entrypoint --json"""))
    missing = {word for word in named if word not in helped and word not in flags | others}
    assert not missing
    parameters = {w for text in texts for w in re.findall(r"(\w+)(?:=\w+)? in notebook 04", text)}
    assert {"batch", "steps", "accept_graph_mode", "rules"} <= parameters <= set(P04.model_fields)
