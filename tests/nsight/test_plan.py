"""The capture plan of each kind of cluster."""

from __future__ import annotations

import shlex

import pytest
import yaml

from spoc_lib import cli, config
from spoc_lib.config import Engine
from spoc_lib.nsight.attach import Inside
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


def test_a_capture_inside_a_running_container_opens_a_session_from_outside():
    """Docker, Podman and kubectl: the engine is the container's, only the window and the copy come from here."""
    engine = cluster(kind="remote", base_url="http://gpu-7:8000")
    plan = capture_plan(engine, output="limit", seconds=3, inside=Inside("docker", "vllm-1"))
    start = shlex.split(command(plan, "start the engine of vllm-1"))
    assert start[2:4] == ["nsys", "launch"] and "--session-new=spoc" in start and start[-1] != "--wait=primary"
    assert "--cuda-graph-trace=node" in start and "VLLM_WORKER_MULTIPROC_METHOD=spawn" in start
    assert command(plan, "open and close") == (
        "docker exec vllm-1 nsys start --session=spoc --sample=none --cpuctxsw=none --force-overwrite=true "
        "--output=/tmp/limit && sleep 3 && docker exec vllm-1 nsys stop --session=spoc")
    assert command(plan, "fetch") == "docker cp vllm-1:/tmp/limit.nsys-rep limit.nsys-rep"
    assert any("SYS_ADMIN" in note for note in plan.notes)

    pod = capture_plan(engine, inside=Inside("kubectl", "vllm-0", "serving"))
    assert command(pod, "open and close").startswith("kubectl exec --namespace serving vllm-0 -- nsys start")
    assert command(pod, "fetch") == "kubectl cp --namespace serving vllm-0:tmp/trace.nsys-rep trace.nsys-rep"
    assert "podman exec v nsys start" in command(capture_plan(engine, inside=Inside("podman", "v")), "open and close")


def test_the_command_line_prints_the_plan_of_a_container_or_a_pod(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(cluster(kind="remote", base_url="http://gpu-7:8000").model_dump(
        mode="json", exclude_none=True)))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["spoc", "nsight", "plan", str(path), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr()

    code, said = run("--pod", "serving/vllm-0")
    assert code == 0 and "kubectl exec --namespace serving vllm-0" in said.out
    assert "docker exec ctr nsys stop" in run("--container", "ctr")[1].out
    code, said = run("--container", "a", "--pod", "b")
    assert code == 2 and "--container and --pod" in said.err
    code, said = run("--seconds", "0")
    assert code == 2 and "--seconds 0" in said.err
