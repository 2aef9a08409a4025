"""Command lines of every kind of engine."""

from __future__ import annotations

import shlex
import sys

import pytest

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.servers import launch_command, shell_command
from spoc_lib.servers.commands import _container, flag_arguments, help_command, prepare


def cluster(**engine) -> Cluster:
    return Cluster.model_validate({
        "name": "here", "title": "commands", "hardware": {"gpu": "h100-sxm", "count": 2}, "engine": engine,
        "model": "gpt-oss-120b", "ladder": {"users": [1]}, "flags": {"tensor_parallel_size": 2},
        "slos": [{"metric": "ttft", "limit_s": 1.0}],
    })


def test_flags_are_spelt_as_vllm_does():
    assert flag_arguments({"max_num_seqs": 64, "enable_prefix_caching": False, "async_scheduling": True,
                           "gpu_memory_utilization": 0.9, "num_gpu_blocks_override": None}) == [
        "--max-num-seqs", "64", "--no-enable-prefix-caching", "--async-scheduling",
        "--gpu-memory-utilization", "0.9"]


def test_shell_command_can_be_pasted():
    line = shell_command(load_cluster("sim-4xh100"), {"max_num_batched_tokens": 2048})
    assert line == "vllm serve openai/gpt-oss-120b --tensor-parallel-size 4 --max-num-batched-tokens 2048"
    assert shlex.join(shlex.split(line)) == line


def test_a_flag_of_the_launch_wins_over_the_clusters():
    assert "--tensor-parallel-size 1" in shell_command(cluster(kind="embedded"), {"tensor-parallel-size": 1})


def test_process_gets_the_flags_appended():
    words = launch_command(cluster(kind="process", command=["vllm", "serve", "x"]), {"max_num_seqs": 8}, 8123)
    assert words == ["vllm", "serve", "x", "--tensor-parallel-size", "2", "--max-num-seqs", "8", "--host", "127.0.0.1",
                     "--port", "8123"]


def test_embedded_runs_this_python_with_the_cluster_as_it_is_in_memory(tmp_path):
    command = prepare(cluster(kind="embedded"), {"max_num_seqs": 8}, 0, tmp_path)
    assert command.arguments[:5] == [sys.executable, "-m", "spoc_lib", "engine", "serve"]
    path = command.arguments[command.arguments.index("--cluster") + 1]
    assert load_cluster(path) == cluster(kind="embedded")


def test_a_relative_program_is_found_below_the_project_from_any_folder(tmp_path, monkeypatch):
    root = tmp_path / "project"
    (root / "data" / "models").mkdir(parents=True)
    (root / "tool").mkdir()
    (root / "tool" / "engine").write_text("")
    monkeypatch.setenv("SPOC_DATA", str(root / "data"))
    spec = cluster(kind="process", command=["tool/engine"])
    monkeypatch.chdir(tmp_path)
    assert prepare(spec, {}, 1, tmp_path).directory == root
    monkeypatch.chdir(root)
    assert prepare(spec, {}, 1, tmp_path).directory is None
    assert prepare(cluster(kind="process", command=["no/engine"]), {}, 1, tmp_path).program is None


def test_container_is_published_on_loopback_and_removed_by_name(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    spec = cluster(kind="container", image="vllm/vllm-openai:v0.32", environment={"VLLM_LOGGING_LEVEL": "INFO"})
    command = _container(spec, {"max_num_seqs": 8}, 8123, "docker")
    line = shlex.join(command.arguments)
    assert line.startswith("docker run --rm --name spoc-")
    assert "--gpus 2" in line and "--publish 127.0.0.1:8123:8000" in line
    assert "--env VLLM_LOGGING_LEVEL --env HF_TOKEN --env VLLM_API_KEY" in line and "secret" not in line
    assert line.endswith("vllm/vllm-openai:v0.32 --model openai/gpt-oss-120b --tensor-parallel-size 2 "
                         "--max-num-seqs 8 --port 8000")
    name = command.arguments[command.arguments.index("--name") + 1]
    assert command.cleanup == [["docker", "rm", "--force", name]]
    assert command.environment == {"VLLM_LOGGING_LEVEL": "INFO"}


def test_a_container_is_asked_for_its_flags_with_the_gpus_of_a_launch():
    spec = cluster(kind="container", image="vllm/vllm-openai:v0.32", environment={"VLLM_LOGGING_LEVEL": "INFO"})
    asked = help_command(spec, "--help=all", "docker")
    assert shlex.join(asked.arguments) == ("docker run --rm --gpus 2 --env VLLM_LOGGING_LEVEL vllm/vllm-openai:v0.32 "
                                           "--help=all")
    assert asked.environment == {"VLLM_LOGGING_LEVEL": "INFO"}
    assert help_command(spec, "--help", "podman").arguments[:4] == ["podman", "run", "--rm", "--device"]
    assert help_command(cluster(kind="process", command=["vllm", "serve", "x"]), "--help").arguments == [
        "vllm", "serve", "x", "--help"]


def test_podman_names_its_gpus(monkeypatch):
    command = _container(cluster(kind="container", image="i"), {}, 1, "podman")
    assert "--device nvidia.com/gpu=0 --device nvidia.com/gpu=1" in shlex.join(command.arguments)


def test_remote_is_never_started():
    with pytest.raises(InputError, match="never started from here"):
        launch_command(cluster(kind="remote", base_url="http://h:1"), {}, 1)
