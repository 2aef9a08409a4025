"""A capture's window over real HTTP, and what is made of the report."""

from __future__ import annotations

import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spoc_lib import config
from spoc_lib.core.errors import InputError
from spoc_lib.nsight import decompose
from spoc_lib.nsight.capture import collect, profiling, under_nsys
from spoc_lib.nsight.nsysrep import find_importer


@pytest.fixture
def engine():
    """A server with vLLM's two profiling routes; `engine.calls` in order, `engine.status` its answer."""
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):  # noqa: N802
            self.server.calls.append(self.path)
            self.send_response(self.server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.calls, server.status = [], 200
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """A program called nsys that exports a report by copying it stands for NVIDIA's."""
    tools = tmp_path / "bin"
    tools.mkdir()
    program = tools / "nsys"
    program.write_text(f"#!{sys.executable}\nimport shutil, sys\n"
                       f"shutil.copy(sys.argv[-1], sys.argv[sys.argv.index('--output') + 1])\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return program


def test_the_window_is_closed_however_the_block_ends(engine):
    with pytest.raises(RuntimeError), profiling(engine.url + "/v1"):
        assert engine.calls == ["/start_profile"]
        raise RuntimeError("the load broke")
    assert engine.calls == ["/start_profile", "/stop_profile"]


def test_an_engine_without_a_profiler_is_told_which_flag_it_lacks(engine):
    engine.status = 404
    with pytest.raises(InputError, match="--profiler-config.profiler cuda"), profiling(engine.url):
        pytest.fail("the window did not open")


def test_the_twin_is_not_wrapped(nsys, tmp_path):
    with pytest.raises(InputError, match="spoc nsight plan sim-4xh100"), \
            under_nsys(config.load_cluster("sim-4xh100"), tmp_path / "trace"):
        pytest.fail("it was")


def test_a_report_is_exported_and_a_partial_capture_refused(nsys, tmp_path, new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    (tmp_path / "run.nsys-rep").write_bytes(trace.done().read_bytes())
    target = tmp_path / "run.sqlite"
    with pytest.raises(InputError, match="1 of 4 GPUs"):
        collect(tmp_path / "run", target, 4, sleep=lambda s: None)
    assert not target.exists()
    assert decompose(collect(tmp_path / "run", target, 1, sleep=lambda s: None)).devices[0]["busy_ns"]["gemm"] == 100


def test_a_report_that_never_comes_is_said(tmp_path):
    with pytest.raises(InputError, match="wrote no report"):
        collect(tmp_path / "run", tmp_path / "run.sqlite", 1, timeout_s=0.0, sleep=lambda s: None)


def test_a_left_over_qdstrm_is_converted_then_exported(nsys, tmp_path, new_trace, kernel_names):
    """QdstrmImporter stands in the host folder beside nsys; what it leaves is exported as any report is."""
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    (tmp_path / "run.qdstrm").write_bytes(trace.done().read_bytes())
    with pytest.raises(InputError, match="QdstrmImporter"):
        decompose(tmp_path / "run.qdstrm")
    host = nsys.parent.parent / "host-linux-x64"
    host.mkdir()
    importer = host / "QdstrmImporter"
    importer.write_text(f"#!{sys.executable}\nimport shutil, sys\n"
                        f"shutil.copy(*(sys.argv[sys.argv.index(o) + 1] for o in ('--input-file', '--output-file')))\n")
    importer.chmod(0o755)
    assert find_importer() == str(importer)
    found = decompose(collect(tmp_path / "run", tmp_path / "run.sqlite", 1, sleep=lambda s: None))
    assert found.devices[0]["busy_ns"]["gemm"] == 100
    assert decompose(tmp_path / "run.qdstrm").path == str(tmp_path / "run.qdstrm")
    importer.write_text("#!/bin/sh\necho 'the stream ends early' >&2\nexit 4\n")
    with pytest.raises(InputError, match="the conversion of .*run.qdstrm failed: the stream ends early"):
        decompose(tmp_path / "run.qdstrm")
