"""A real capture: nsys traces the embedded engine's step ranges, without a GPU, and the reader finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import yaml

from spoc_lib import config
from spoc_lib.config import Engine
from spoc_lib.core.errors import InputError
from spoc_lib.engine.http.marks import profiled
from spoc_lib.nsight import decompose, nvtx
from spoc_lib.nsight.capture import under_nsys
from spoc_lib.nsight.dcgmpause import Pause
from spoc_lib.nsight.nsysrep import find_importer
from spoc_lib.nsight.session import heard, in_session, recording
from spoc_lib.nsight.trace import open_source
from spoc_lib.pipeline.limit_capture import Window, require, tracing_cost

PROGRAM = """
from importlib.metadata import version
from spoc_lib import config
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.kerneltrace import step_text
from spoc_lib.engine.http.marks import mark

engine = EmbeddedEngine.from_cluster(config.load_cluster("sim-2xh200"))
core = engine.core()
core.add_request("a", list(range(300)), 6)
core.add_request("b", list(range(40)), 3)
number = 0
with mark("rung 1"):
    while core.has_requests:
        planned = core.schedule()
        with mark(step_text(number, planned.batch)):
            core.update(planned)
        number += 1
print(version("nvtx"), number)
"""


def test_nothing_is_marked_where_no_profiler_listens(monkeypatch):
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    assert not profiled()


def real(**engine):
    return config.load_cluster("sim-4xh100").model_copy(update={"engine": Engine(**engine)})


@pytest.fixture
def nsys_on_path(tmp_path, monkeypatch):
    """A PATH with a program called nsys, to see the commands that would be run."""
    program = tmp_path / "nsight" / "bin" / "nsys"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def test_a_capture_that_cannot_be_made_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InputError, match="nsys is not on this machine"):
        require(real(kind="process", command=["vllm", "serve", "m"]))
    with pytest.raises(InputError, match="of kind remote"):
        require(real(kind="remote", base_url="http://gpu-7:8000"))
    with pytest.raises(InputError, match="exclude each other"):
        require(config.load_cluster("sim-4xh100"), "trace.sqlite")
    require(config.load_cluster("sim-4xh100"))


def test_the_command_line_refuses_before_a_run_begins(tmp_path, monkeypatch, capsys):
    """Exit 2 and one sentence, no run folder; and a stage that captures is not skipped."""
    from spoc_lib import cli
    from spoc_lib.pipeline.execute import skip_reason
    from spoc_lib.pipeline.parameters import check

    outputs = tmp_path / "outputs"
    monkeypatch.setenv("SPOC_OUTPUTS", str(outputs))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(real(kind="process", command=["vllm", "serve", "m"]).model_dump(
        mode="json", exclude_none=True)))
    assert "--capture" in skip_reason("04", check("04", {"cluster": str(path)}))
    assert skip_reason("04", check("04", {"cluster": str(path), "capture": "true"})) == ""
    monkeypatch.setenv("PATH", "/nonexistent")
    for arguments, said in ((["--capture"], "nsys is not on this machine"),
                            (["--only", "04", "--capture", "--set", "trace=x.sqlite"], "exclude each other"),
                            (["--only", "03", "--capture"], "capture")):
        monkeypatch.setattr("sys.argv", ["spoc", "run", str(path), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2 and said in capsys.readouterr().err
    assert not outputs.exists()


def test_a_process_starts_under_nsys_with_the_profilers_window(nsys_on_path, tmp_path):
    cluster = real(kind="process", command=["vllm", "serve", "m"], environment={"A": "b"})
    with under_nsys(cluster, tmp_path / "out") as traced:
        command = traced.engine.command
        assert command[:2] == ["nsys", "profile"] and f"--output={tmp_path / 'out'}" in command
        assert {"--capture-range=cudaProfilerApi", "--cuda-graph-trace=node"} <= set(command)
        assert command[-5:] == ["vllm", "serve", "m", "--profiler-config.profiler", "cuda"]
        assert traced.engine.environment == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                                             "VLLM_NVTX_SCOPES_FOR_PROFILING": "1", "A": "b"}


def test_a_container_gets_the_hosts_nsys_and_secrets_by_name(nsys_on_path, tmp_path):
    cluster = real(kind="container", image="vllm/vllm-openai:v0.13.0", environment={"TOKEN": "secret"})
    with under_nsys(cluster, tmp_path / "out") as traced:
        command = traced.engine.command
        assert traced.engine.kind == "process" and "secret" not in " ".join(command)
        root = nsys_on_path.parent.parent
        assert f"{root}:{root}:ro" in command and f"{tmp_path}:{tmp_path}" in command
        at = command.index("--entrypoint")
        assert command[at + 1:at + 4] == [str(nsys_on_path), "vllm/vllm-openai:v0.13.0", "profile"]
        assert command[command.index("--network") + 1] == "host" and "SYS_ADMIN" in command


def test_the_window_opens_when_all_are_answered_or_the_load_is_long_warm():
    events = []

    @contextmanager
    def context():
        events.append("open")
        yield
        events.append("close")

    for state, steady in (({"elapsed_s": 1.0, "completed": 4}, True), ({"elapsed_s": 2.0, "completed": 1}, False)):
        window = Window(context, users=4, warmup_s=1.0, seconds=0.05)
        window.watch({"elapsed_s": 0.9, "completed": 9})
        window.watch({"elapsed_s": 1.9, "completed": 3})
        assert not events and window.opened_s is None
        window.watch(state)
        window.wait()
        assert events == ["open", "close"] and window.steady is steady
        assert window.closed_s - window.opened_s >= 0.05
        events.clear()


def test_what_goes_wrong_in_the_window_reaches_the_caller():
    @contextmanager
    def context():
        raise InputError("no-profiler", "the engine has no profiler")
        yield

    window = Window(context, 1, 0.0, 0.0)
    with pytest.raises(InputError, match="before it was steady"):
        window.wait()
    window.watch({"elapsed_s": 1.0, "completed": 1})
    with pytest.raises(InputError, match="has no profiler"):
        window.wait()


def test_what_tracing_costs_is_seen_by_the_clients():
    window = Window(lambda: None, 1, 0, 0, opened_s=1.0, closed_s=2.0)
    times = [0.1 * n for n in range(11)] + [1.0 + 0.2 * n for n in range(1, 6)]
    chunks = pd.DataFrame({"request": 0, "time_s": times, "tokens": 1.0})
    cost = tracing_cost(chunks, window)
    assert cost["untraced_itl_p50_s"] == pytest.approx(0.1) and cost["traced_itl_p50_s"] == pytest.approx(0.2)
    assert "tracing costs +" in cost["sentence"]
    assert "unknown" in tracing_cost(chunks[:3], window)["sentence"]


def test_the_gap_in_dcgms_profiling_counters_stays_open():
    metrics = pd.DataFrame({"metric": ["DCGM_FI_PROF_SM_ACTIVE"] * 3 + ["DCGM_FI_DEV_GPU_TEMP"],
                            "time_s": [1.0, 2.0, 3.0, 2.0]})
    left = Pause(1.5, 2.5).without_gap(metrics)
    assert list(zip(left.metric.str[8:11], left.time_s, strict=True)) == [("PRO", 1.0), ("PRO", 3.0), ("DEV", 2.0)]
    assert len(Pause().without_gap(metrics)) == 4


def test_a_session_that_nsys_refuses_is_said(nsys_on_path, tmp_path, new_trace, kernel_names):
    nsys_on_path.write_text("#!/bin/sh\necho 'no such session' >&2\nexit 1\n")
    with pytest.raises(InputError, match="nsys start failed: no such session"), recording("s", tmp_path / "engine"):
        pytest.fail("it records")
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 1)
    assert "no step range" in heard(trace.done())


@pytest.mark.slow
def test_nsys_records_a_window_of_the_served_engine(tmp_path):
    """The embedded server in a session of nsys: started, asked, recorded, and its report read."""
    if shutil.which("nsys") is None:
        pytest.skip("nsys is not installed (Debian: nsight-systems in non-free)")
    from spoc_lib.servers import launch
    from spoc_lib.servers.readiness import Endpoint

    name = f"spoctest{os.getpid()}"
    with launch(in_session(config.load_cluster("sim-2xh200"), name, tmp_path), {}, tmp_path / "server") as server:
        with recording(name, tmp_path / "engine"):
            Endpoint(server.base_url).complete(server.model, tokens=40)
            time.sleep(0.5)
        report = next(Path(tmp_path).glob("engine.*"))
        assert report.suffix in (".qdstrm", ".nsys-rep")
        if report.suffix == ".qdstrm" and find_importer() is None:
            pytest.skip("nsys left a .qdstrm and QdstrmImporter is not installed")
        assert heard(report).startswith("nsys captured")


@pytest.mark.slow
def test_nsys_sees_the_engines_steps(tmp_path):
    nsys = shutil.which("nsys")
    if nsys is None:
        pytest.skip("nsys is not installed (Debian: nsight-systems in non-free)")
    report = tmp_path / "engine"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [nsys, "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none", f"--output={report}", sys.executable,
         str(program)], capture_output=True, text=True, timeout=110, env={**os.environ, "HF_TOKEN": "hf_secret"})
    assert done.returncode == 0, done.stderr
    version, number = done.stdout.split()[:2] if done.stdout.split() else ("?", "0")
    captured = next((p for s in ("nsys-rep", "qdstrm") if (p := report.with_suffix(f".{s}")).exists()), None)
    assert captured is not None, done.stdout
    if captured.suffix == ".qdstrm" and find_importer() is None:
        pytest.skip("nsys left a .qdstrm and QdstrmImporter is not installed")
    with open_source(captured) as source:
        ranges = nvtx.read_ranges(source)
        assert "TARGET_INFO_SYSTEM_ENV" not in source.tables()
    if not ranges and tuple(map(int, version.split(".")[:3])) >= (0, 2, 12):
        pytest.skip(f"nvtx {version} loses its ranges under this old nsys; 0.2.11 keeps them")
    steps = [nvtx.parse_step(r.text) for r in ranges if nvtx.is_step(r.text)]
    assert [s["step"] for s in steps] == list(range(int(number))) and len(steps) >= 6
    assert steps[0]["phase"] == "prefill" and steps[0]["tokens"] == 340 and steps[-1]["phase"] == "decode"
    rung = next(r for r in ranges if r.text == "rung 1")
    assert all(rung.start <= r.start and r.end <= rung.end for r in ranges)
    with pytest.raises(InputError, match="holds no GPU kernels"):
        decompose(captured)
