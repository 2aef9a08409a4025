"""A real capture: nsys traces the embedded engine's step ranges, without a GPU, and the reader finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.engine.marks import profiled
from spoc_lib.nsight import decompose, nvtx
from spoc_lib.nsight.nsysrep import find_importer
from spoc_lib.nsight.trace import open_source

PROGRAM = """
from importlib.metadata import version
from spoc_lib import config
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.kerneltrace import step_text
from spoc_lib.engine.marks import mark

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
