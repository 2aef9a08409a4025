"""How to capture a kernel trace of a cluster's engine: the commands, in order, and why each option is there."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spoc_lib.config import Cluster
from spoc_lib.config.access import root_url
from spoc_lib.nsight.attach import COLLECTED, TRACED, Inside, launch_command
from spoc_lib.nsight.nsysrep import find_nsys
from spoc_lib.servers.commands import flag_arguments, merged_flags, model_argument

#: The engine's own profiler endpoints open and close the window.
_WINDOW = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")
#: fork drops the workers' ranges silently, spawn keeps them; the scopes are vLLM's own NVTX ranges.
ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_NVTX_SCOPES_FOR_PROFILING": "1"}
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True)
class Step:
    """One step of a plan. command: what to type, or None where there is nothing to type."""

    title: str
    command: str | None
    why: str


@dataclass(frozen=True)
class CapturePlan:
    """The steps, and how many GPUs with kernels the trace must show (TP x PP), fewer being a failed capture."""

    cluster: str
    expect_gpus: int
    steps: list[Step]
    notes: list[str]

    def to_dict(self) -> dict:
        """For JSON."""
        return {"cluster": self.cluster, "expect_gpus": self.expect_gpus, "notes": self.notes,
                "steps": [{"title": s.title, "command": s.command, "why": s.why} for s in self.steps]}

    def text(self) -> str:
        """For people."""
        lines = [f"How to capture a kernel trace of {self.cluster} ({self.expect_gpus} GPUs)"]
        for number, step in enumerate(self.steps, start=1):
            lines += [f"{number}. {step.title}: {step.why}", *([f"     {step.command}"] if step.command else [])]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def gpus_of(cluster: Cluster, flags: Mapping[str, Any]) -> int:
    """TP x PP (x DP) of the launch; the cluster's GPUs where no such flag is set."""
    merged = merged_flags(cluster, flags)
    parallel = [int(merged[name]) for name in _PARALLEL if merged.get(name)]
    return math.prod(parallel) if parallel else cluster.hardware.count


def tensor_parallel(cluster: Cluster, flags: Mapping[str, Any]) -> int | None:
    """GPUs that share the model, where the launch's flags say."""
    value = merged_flags(cluster, flags).get("tensor_parallel_size")
    return int(value) if value else None


def capture_plan(cluster: Cluster, flags: Mapping[str, Any] | None = None, *, output: str = "trace",
                 seconds: float = 5.0, inside: Inside | None = None) -> CapturePlan:
    """The plan for one capture of `seconds` at the steady state of the load, into `output`.nsys-rep.

    inside: a running container to capture in (its engine was started by `nsys launch`); default: nsys starts the
    engine, and the engine's own endpoints open the window.
    """
    flags = flags or {}
    gpus = gpus_of(cluster, flags)
    if cluster.simulated:
        return CapturePlan(cluster.name, gpus, [Step(
            "run the trace analysis", f"spoc run {cluster.name} --only 04",
            "the embedded engine writes its own kernel trace, labelled simulated; there is nothing to capture")], [])
    base = root_url(cluster.engine.base_url or "http://127.0.0.1:8000")
    report = shlex.quote(output)
    notes = [] if cluster.engine.kind == "remote" else [
        f"all of this in one go, where nsys and the GPUs are: spoc run {cluster.name} --capture"]
    steps = [
        _launched(cluster, flags, inside) if inside else _start(cluster, flags, output),
        Step("load it", f"spoc sweep run {cluster.name}", "bring the engine to the users of the capacity limit and "
             "wait until its metrics are steady; a ramp shows a server that nobody runs"),
        Step("pause DCGM's profiling counters", "dcgmi profile --pause",
             "they and nsys share one lock on the GPU's counters; the gap in the metrics is marked, not filled"),
        Step("open and close the window", inside.window(output, seconds) if inside else
             f"curl -fsS -X POST {base}/start_profile && sleep {seconds:g} && curl -fsS -X POST {base}/stop_profile",
             "a few hundred steps are enough, and tracing slows every step a little"),
        Step("resume DCGM", "dcgmi profile --resume", "so that the rest of the run is measured"),
        Step("fetch the report", inside.fetch(output), "it lies in the container, as a .qdstrm where nsys' host folder "
             "is not there: the reader converts that") if inside else
        Step("stop the engine after the report is written", None,
             "workers that are killed during the capture leave a .qdstrm: QdstrmImporter turns it into a report"),
        Step("export", f"nsys export --type sqlite --output {report}.sqlite {report}.nsys-rep",
             "the reader takes SQLite, a parquetdir, or the report itself where nsys is installed"),
        Step("decompose", f"spoc nsight decompose {report}.sqlite --expect-gpus {gpus} "
             f"--model {shlex.quote(cluster.model)} --gpu {shlex.quote(cluster.hardware.gpu)}",
             f"fewer than {gpus} GPUs with kernels mean that a rank was not captured")]
    notes += ["the container needs SYS_ADMIN, and nsys in its image or mounted into it" if inside else
              "the engine needs /start_profile and /stop_profile, which vLLM offers from 0.13 on with "
              "--profiler-config.profiler cuda",
              "dcgmi pauses the host engine that it reaches (localhost:5555, another with --host): a dcgm-exporter "
              "that embeds its own (no -r) is not reached, so stop it for the window if nsys reports a lock",
              "where the engine's profiler config knows detailed_trace_annotation, set it: its step ranges then tell "
              "the roofline what each step computed"]
    if cluster.engine.environment:
        notes.append(f"set {', '.join(cluster.engine.environment)} as the cluster file does; values are not "
                     f"repeated here")
    if find_nsys() is None:
        notes.append("nsys is not on this machine: run these steps where the engine runs")
    if cluster.hardware.gpu == "cpu":
        notes.append("this cluster runs on the CPU: there are no GPU kernels to trace")
    return CapturePlan(cluster.name, gpus, steps, notes)


def nsys_command(output: str) -> list[str]:
    """The profiler's part of the command; the engine's follows it."""
    return ["nsys", "profile", *TRACED, *_WINDOW, *COLLECTED, f"--output={output}"]


def _launched(cluster: Cluster, flags: Mapping[str, Any], inside: Inside) -> Step:
    command = [*launch_command(), "vllm", "serve", model_argument(cluster),
               *flag_arguments(merged_flags(cluster, flags))]
    prefix = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    return Step(f"start the engine of {inside.name} by nsys launch", f"{prefix} {shlex.join(command)}",
                "this is the container's command and environment; nsys cannot begin to trace an engine that started "
                "without it")


def _start(cluster: Cluster, flags: Mapping[str, Any], output: str) -> Step:
    profiler = ["--profiler-config.profiler", "cuda"]
    serve = [model_argument(cluster), *flag_arguments(merged_flags(cluster, flags)), *profiler]
    if cluster.engine.kind == "container":
        variables = [part for name, value in ENVIRONMENT.items() for part in ("--env", f"{name}={value}")]
        variables += [part for name in cluster.engine.environment for part in ("--env", name)]
        command = ["docker", "run", "--rm", "--gpus", str(cluster.hardware.count), "--ipc", "host",
                   "--cap-add", "SYS_ADMIN", "--volume", "/opt/nvidia/nsight-systems:/opt/nvidia/nsight-systems:ro",
                   "--volume", ".:/captures", "--publish", "127.0.0.1:8000:8000", *variables, "--entrypoint", "",
                   str(cluster.engine.image), *nsys_command(f"/captures/{output}"), "vllm", "serve", *serve]
        return Step("start the engine under nsys", shlex.join(command),
                    "the container needs SYS_ADMIN and the host's nsys; graphs are traced node by node, all ranks")
    own = cluster.engine.command if cluster.engine.kind == "process" else None
    engine = [*own, *serve[1:]] if own else ["vllm", "serve", *serve]
    prefix = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    where = " on the engine's own host" if cluster.engine.kind == "remote" else ""
    return Step(f"start the engine under nsys{where}", f"{prefix} {shlex.join([*nsys_command(output), *engine])}",
                "spawned workers keep their ranges; graphs are traced node by node, or their kernels would be hidden")
