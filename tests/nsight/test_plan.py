"""The capture plan of each kind of cluster."""

from __future__ import annotations

import shlex

from spoc_lib import config
from spoc_lib.config import Engine
from spoc_lib.nsight.plan import capture_plan


def cluster(**engine):
    base = config.load_cluster("sim-4xh100")
    return base.model_copy(update={"engine": Engine(**engine)})


def command(plan, title):
    return next(s.command for s in plan.steps if s.title.startswith(title))


def test_a_process_is_started_under_nsys_with_all_that_vllm_needs():
    plan = capture_plan(cluster(kind="process", command=["vllm", "serve", "openai/gpt-oss-120b"],
                                environment={"HF_TOKEN": "hf_secret"}))
    words = shlex.split(command(plan, "start the engine"))
    assert {"VLLM_WORKER_MULTIPROC_METHOD=spawn", "--cuda-graph-trace=node", "--trace-fork-before-exec=true",
            "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--capture-range=cudaProfilerApi"} <= set(words)
    assert words.count("openai/gpt-oss-120b") == 1
    assert words[words.index("--profiler-config.profiler") + 1] == "cuda"
    assert words[words.index("--tensor-parallel-size") + 1] == "4" and plan.expect_gpus == 4
    assert "--expect-gpus 4" in command(plan, "decompose")
    assert command(plan, "pause DCGM") == "dcgmi profile --pause"
    assert any("--capture" in note for note in plan.notes)
    assert "hf_secret" not in plan.text() and "HF_TOKEN" in plan.text()


def test_a_container_gets_the_right_to_trace_and_its_secrets_by_name():
    plan = capture_plan(cluster(kind="container", image="vllm/vllm-openai:v0.32.0", environment={"TOKEN": "secret"}))
    line = command(plan, "start the engine")
    assert "--cap-add SYS_ADMIN" in line and "vllm/vllm-openai:v0.32.0 nsys profile" in line
    assert "--env TOKEN " in line and "secret" not in line


def test_a_remote_engine_is_toggled_where_it_stands():
    plan = capture_plan(cluster(kind="remote", base_url="http://gpu-7:8000/v1"))
    assert "http://gpu-7:8000/start_profile" in command(plan, "open and close")
    assert "on the engine's own host" in plan.steps[0].title


def test_flags_change_the_expected_gpus():
    plan = capture_plan(cluster(kind="process", command=["vllm", "serve", "m"]),
                        {"tensor_parallel_size": 2, "pipeline_parallel_size": 3})
    assert plan.expect_gpus == 6


def test_the_twin_needs_no_capture():
    plan = capture_plan(config.load_cluster("sim-2xh200"))
    assert [s.command for s in plan.steps] == ["spoc run sim-2xh200 --only 04"]
