"""The twin's own trace: what it wrote is what the reader finds, and the verdict follows from it."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pandas as pd
import pytest

from spoc_lib import config
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.kerneltrace import step_text, write_trace
from spoc_lib.nsight import capture_overhead, decompose, diff, explain_idle, measured_steps, roofline
from spoc_lib.nsight.categories import CATEGORIES
from spoc_lib.nsight.nvtx import parse_step

DECODE = Batch(40, 40, 40 * 30_000, 40 * 128, 0, 0, 0.0, 0.0, 0, 40)
MIXED = Batch(2048 + 40, 40, 40 * 30_000, 40 * 128, 1, 2048, 2048 * 20_000 + 2048 * 1024.5, 2048 * 128.0, 20_000, 41)
PREFILL = Batch(4096, 0, 0, 0, 1, 4096, 4096 * 2048.5, 4096 * 128.0, 0, 1)


def steps_of(engine, batches):
    rows, time_s = [], 100.0
    for batch in batches:
        duration = engine.step_time.seconds(batch)
        rows.append({"time_s": time_s, "duration_s": duration, **batch._asdict()})
        time_s += duration
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def engine():
    return EmbeddedEngine.from_cluster(config.load_cluster("sim-4xh100"))


@pytest.fixture(scope="module")
def trace(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("sim") / "trace.sqlite"
    steps = steps_of(engine, [DECODE, MIXED, DECODE, PREFILL, DECODE, DECODE])
    return write_trace(path, engine, steps, 0, 1000), steps


def test_every_step_and_category_comes_back(engine, trace):
    path, steps = trace
    result = decompose(path, expect_gpus=4)
    assert result.simulated and not result.unknown_kernels
    assert len(result.steps) == 4 * len(steps)
    for index, row in steps.iterrows():
        batch = Batch(*(row[f] for f in Batch._fields))
        expected = engine.step_time.components(batch)
        mine = result.steps[result.steps.step == index]
        assert len(mine) == 4
        for category in CATEGORIES:
            got = mine[f"{category}_ns"].to_numpy()
            assert np.allclose(got, expected.get(category, 0.0) * 1e9, atol=2), category
        if index < len(steps) - 1:  # the last step ends with its last kernel: no next one tells the host's gap
            assert np.allclose(mine.duration_ns, row.duration_s * 1e9, atol=2)
    assert result.steps[result.steps.device == 0].phase.tolist() == ["decode", "mixed", "decode", "prefill", "decode",
                                                                     "decode"]
    assert {d["pid"] for d in result.devices} == {1001, 1002, 1003, 1004}
    table = result.table
    for _, rows in table.groupby(["pid", "device", "phase"]):
        assert rows.busy_ns.sum() == rows.window_ns.iloc[0]


def test_the_trace_says_that_it_is_simulated(trace):
    path, _ = trace
    with sqlite3.connect(path) as database:
        capture = dict(database.execute("SELECT name, value FROM META_DATA_CAPTURE"))
        gpus = database.execute("SELECT DISTINCT name FROM TARGET_INFO_GPU").fetchall()
    assert capture["SPOC_SIMULATED"] == "true"
    assert json.loads(capture["SPOC_SIMULATED_BY"])["model"] == "gpt-oss-120b"
    assert all("simulated" in name for (name,) in gpus)


def test_a_window_without_steps_is_refused(engine, trace, tmp_path):
    with pytest.raises(InputError, match="no engine step starts between 0 s and 1 s"):
        write_trace(tmp_path / "none.sqlite", engine, trace[1], 0, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_bounded_by_whole_steps(engine, trace, tmp_path):
    result = decompose(write_trace(tmp_path / "short.sqlite", engine, trace[1], 0, 1000, max_kernels=3000))
    assert set(result.steps.step) == {0, 1}


def test_step_text_is_read_back():
    assert parse_step(step_text(17, MIXED)) == {"step": 17, "phase": "mixed", **MIXED._asdict()}
    vllm = parse_step("execute_context_2(512)_generation_30(30)")
    assert (vllm["phase"], vllm["tokens"], vllm["prefill_tokens"], vllm["decodes"]) == ("mixed", 542, 512, 30)


def test_a_dense_model_on_one_gpu(tmp_path):
    model = config.load_model("gpt-oss-120b").model_copy(update={
        "moe": None, "d_ff": 11520, "name": "dense", "sliding_window": None, "sliding_layers": 0, "weight_gib": 20.0})
    from spoc_lib.engine.flags import EngineFlags

    engine = EmbeddedEngine.build(EngineFlags(), model, config.load_gpu("h100-sxm"), 1)
    result = decompose(write_trace(tmp_path / "dense.sqlite", engine, steps_of(engine, [DECODE, DECODE]), 0, 1000))
    totals = result.totals().iloc[0]
    assert totals.moe_gemm == totals.comm == 0 and totals.gemm > 0 and totals.attn > 0


def test_the_verdict_tells_w4a16_from_fp4(engine, trace):
    verdict = roofline(decompose(trace[0]), engine.model, engine.gpu)
    assert verdict.compute_type == "bf16xmxfp4" and verdict.compute_type_shown and verdict.simulated
    assert verdict.steps == 6 and verdict.gpus == 4
    prefill = verdict.row("moe_gemm", "prefill")
    assert prefill["binds"] == "compute" and prefill["fp4_naive_s"] < prefill["w4a16_s"] < prefill["measured_s"]
    decode = verdict.row("moe_gemm", "decode")
    assert decode["binds"] == "memory" and decode["fp4_naive_s"] == decode["w4a16_s"] < decode["bf16_s"]
    assert "BF16 products on 4-bit weights (bf16xmxfp4)" in " ".join(verdict.sentences)
    assert sum(verdict.resources.values()) == pytest.approx(1.0)
    shares = verdict.table[verdict.table.phase == "all"].share
    assert shares.sum() == pytest.approx(1.0)
    assert verdict.sentence.startswith("Simulated: ")


def test_roofline_numbers_by_hand(engine, trace):
    """Decode of 40 tokens on 4 GPUs: bytes of the experts hit and of the keys and values, over 3.35 TB/s."""
    row = roofline(decompose(trace[0]), engine.model, engine.gpu).row("moe_gemm", "decode")
    hit = 128 * (1 - (1 - 4 / 128) ** 40)
    weights = 36 * hit * 3 * 2880 * 720 * 4.25 / 8
    activations = 36 * 160 * (2 * (2880 + 720)) * 2
    assert row["dram_bytes"] == pytest.approx(weights + activations)
    assert row["flops"] == pytest.approx(36 * 2 * 160 * 3 * 2880 * 720)
    assert row["w4a16_s"] == pytest.approx((weights + activations) / 3.35e12)
    attention = roofline(decompose(trace[0]), engine.model, engine.gpu).row("attn", "decode")
    queries = 36 * 2 * 40 * 16 * 64 * 2
    assert attention["dram_bytes"] == pytest.approx(
        2 * 2 * 64 * 2 * (18 * 40 * 30_000 + 18 * 40 * 128) + queries)


def test_a_trace_that_tells_no_batch_needs_one(new_trace, kernel_names, engine):
    trace = new_trace()
    trace.kernel(kernel_names["moe_gemm"], 0, 5_000_000)
    result = decompose(trace.done())
    with pytest.raises(InputError, match="--batch"):
        roofline(result, engine.model, engine.gpu)
    with pytest.raises(InputError, match="--steps"):
        roofline(result, engine.model, engine.gpu, DECODE)
    verdict = roofline(result, engine.model, engine.gpu, DECODE, gpu_count=4, steps=1)
    assert verdict.row("moe_gemm")["measured_s"] == pytest.approx(0.005)
    assert verdict.row("moe_gemm")["of_roof"] == pytest.approx(verdict.row("moe_gemm")["w4a16_s"] / 0.005)


@pytest.mark.parametrize("name, proof", [
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1", "show BF16 products on 4-bit weights (bf16xmxfp4)"),
    ("fused_moe_kernel", "do not show their types"),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "No expert GEMM ran"),
])
def test_the_verdict_says_what_the_experts_names_prove(new_trace, name, proof):
    trace = new_trace()
    trace.kernel(name, 0, 9_000_000)
    verdict = roofline(decompose(trace.done()), config.load_model("gpt-oss-120b"), config.load_gpu("h100-sxm"), DECODE,
                       steps=1)
    assert any(proof in sentence for sentence in verdict.sentences)


def test_diff_names_what_got_slower(engine, trace, tmp_path):
    before = decompose(trace[0])
    slower = tmp_path / "slower.sqlite"
    slower.write_bytes(trace[0].read_bytes())
    with sqlite3.connect(slower) as database:  # every attention kernel ends 1 us later
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = end + 1000 WHERE demangledName IN "
                         "(SELECT id FROM StringIds WHERE value LIKE '%FlashAttnFwdSm90%')")
    database.close()
    result = diff(before, decompose(slower))
    assert result.unit == "token"
    overall = result.categories[result.categories.phase == "all"].set_index("category")
    assert overall.delta_s.idxmax() == "attn" and "attention +" in result.sentence
    tokens = sum(trace[1].tokens)
    # 36 layers of each step; in decode steps part of it only covers the combine kernel, which is attention as well
    assert 2 * 36e-6 <= overall.delta_s["attn"] * tokens <= 6 * 36e-6
    assert "FlashAttnFwdSm90" in result.kernels.name[0]
    assert set(result.steps.phase) == {"decode", "mixed", "prefill"}
    same = diff(before, before, "step")
    assert same.ratio == 1.0 and same.unit == "step" and same.sentence == "Nothing changed between A and B."


def test_steps_calibrate_what_they_came_from(engine, trace):
    steps = measured_steps(decompose(trace[0]))
    assert len(steps) == 5  # the last has no end
    for row in steps.itertuples():
        batch = Batch(*(getattr(row, f) for f in Batch._fields))
        assert row.seconds == pytest.approx(engine.step_time.seconds(batch), rel=1e-6)
        assert row.attn == pytest.approx(engine.step_time.components(batch)["attn"], rel=1e-6)


def test_what_cannot_calibrate_says_so(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    result = decompose(trace.done())
    with pytest.raises(InputError, match="calibrates nothing"):
        measured_steps(result)
    with pytest.raises(InputError, match="no decode step"):
        capture_overhead(result, 0.01)


def test_the_captures_cost_is_told(engine, trace):
    result = decompose(trace[0])
    plain = engine.step_time.seconds(DECODE)
    assert capture_overhead(result, plain).ratio == pytest.approx(1.0, rel=1e-3)
    assert "inflated" in capture_overhead(result, plain / 1.2).sentence


def test_idle_time_has_causes(engine, trace):
    report = explain_idle(decompose(trace[0]))
    causes = report.table.set_index("cause").seconds
    # a step's kernels are one graph, launched in time: what lies between them is the GPU's own, not the host's
    assert causes["outside"] == causes["waiting"] == causes["launch"] == causes["unknown"] == 0
    assert causes["device"] > 0 and causes["host"] > 0
    assert "idle for" in report.sentence


def test_a_window_leaves_out_the_steps_that_it_cuts(engine, trace):
    whole = decompose(trace[0])
    first = whole.steps.start_ns.min()
    length = whole.steps.duration_ns.iloc[0]
    cut = decompose(trace[0], ((first + length / 2) / 1e9, whole.window_ns[1] / 1e9))
    assert set(cut.steps.step) == {1, 2, 3, 4, 5}
    assert cut.totals().sum(axis=1).unique().tolist() == [cut.window_ns[1] - cut.window_ns[0]]
    assert cut.table[cut.table.phase == "none"].empty  # the cut step's time keeps its phase


def test_the_commands(trace, tmp_path, spoc):
    path, _ = trace
    done = spoc("decompose", path, "--json", "-", "--model", "gpt-oss-120b", "--gpu", "h100-sxm")
    answer = json.loads(done.stdout)
    assert len(answer["devices"]) == 4 and answer["unknown_kernels"] == [] and answer["simulated"]
    for device in answer["devices"]:
        assert sum(device["busy_s"].values()) + device["idle_s"] == pytest.approx(device["window_s"], abs=1e-9)
        assert sum(device["busy_ns"].values()) + device["idle_ns"] == device["window_ns"]
    assert answer["roofline"]["compute_type"] == "bf16xmxfp4"
    assert "simulated trace" in spoc("decompose", path).stdout
    window = f"{answer['window_ns'][0] / 1e9 + 0.001}:{answer['window_ns'][1] / 1e9}"
    cut = spoc("decompose", path, "--window", window, "--untraced-step-s", "0.01", "--model", "gpt-oss-120b", "--gpu",
               "h100-sxm", "--batch", "tokens=40,decodes=40,decode_context=1200000,logits=40", "--steps", "5")
    assert "under the profiler" in cut.stdout and "FP4 naive" in cut.stdout
    assert json.loads(spoc("diff", path, path, "--json", "-").stdout)["ratio"] == 1.0
    verdict = ("--model", "gpt-oss-120b", "--gpu", "h100-sxm")
    for bad, said in ((("decompose", path, "--window", "1"), "--window"),
                      (("decompose", path, "--model", "x"), "--gpu"),
                      (("decompose", path, *verdict, "--batch", "a=1"), "--batch"),
                      (("classify", tmp_path / "none.txt"), "cannot read"),
                      (("decompose", tmp_path / "none.sqlite"), "no such file"),
                      (("plan", "nowhere"), "unknown cluster"),
                      (("diff", path, path, "--unit", "meter"), "--unit")):
        done = spoc(*bad)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1


def test_every_command_shows_an_example(spoc):
    for command in ("decompose", "classify", "diff", "plan"):
        assert "Example: spoc nsight" in spoc(command, "--help").stdout
