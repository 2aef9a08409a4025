"""What people hand over as a trace: several reports, other kinds of file, versions of tables; read, or named."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import collectives, decompose

CLOCK = "CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT);"
SECOND = 1_000_000_000


def node(trace, names, *, epoch, host=None, pid=100, offset=0, late=0, steps=30):
    """A report of one GPU: a collective every ms after `offset` on the node's own clock, which began at `epoch`."""
    trace.database.executescript(CLOCK)
    if epoch is not None:
        trace.insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=epoch)
    if host:
        trace.meta("DEVICE_DISPLAY_NAME", host)
    for k in range(steps):
        at = offset + k * 1_000_000 + (k % 7) * 40_000  # no perfect period
        trace.kernel(names["gemm"], at, at + 300_000 + late, pid=pid)
        trace.kernel(names["comm"], at + 400_000 + late, at + 600_000, pid=pid)
    return trace.done()


def test_reports_of_two_nodes_are_one_trace_on_one_clock(new_trace, kernel_names, tmp_path):
    """Equal pids, clocks that NTP keeps 3 ms apart: the late node is still the late one, and no other figure moves."""
    folder = tmp_path / "nodes"
    folder.mkdir()
    first = node(new_trace(), kernel_names, epoch=50 * SECOND, host="one", offset=2 * SECOND)
    second = node(new_trace(), kernel_names, epoch=51 * SECOND + 3_000_000, host="two", offset=SECOND, late=100_000)
    for number, path in enumerate((first, second)):
        shutil.copy(path, folder / f"rank{number}.sqlite")
    found = decompose(folder, expect_gpus=2)
    assert [d["pid"] for d in found.devices] == [10_000_100, 20_000_100]
    assert [r["host"] for r in found.metadata["reports"]] == ["one", "two"]
    assert found.metadata["reports"][1]["shift_ns"] == SECOND + 3_000_000
    assert found.window_ns[0] == 2 * SECOND + 3_000_000  # both cover it from here on
    assert found.waiting.paired >= 22 and found.waiting.late == (20_000_100, 0)
    assert found.waiting.wait_share == pytest.approx(1 / 3, abs=0.02) and "3.000 ms off" in found.waiting.notes[0]
    assert "2 reports as one trace: rank0.sqlite of one" in found.notes[0]
    each = decompose([first, second])
    assert each.totals().sum(axis=1).tolist() == [found.window_ns[1] - found.window_ns[0]] * 2


def test_reports_that_share_no_time_are_refused(new_trace, kernel_names):
    paths = [node(new_trace(), kernel_names, epoch=n * 100 * SECOND) for n in (1, 2)]
    with pytest.raises(InputError, match="share no time.*nsight diff"):
        decompose(paths)
    with pytest.raises(InputError, match="given twice"):
        decompose([paths[0], paths[0]])


def test_without_a_wall_clock_nobody_waits_across_reports(new_trace, kernel_names):
    paths = [node(new_trace(), kernel_names, epoch=None, offset=n * SECOND) for n in (1, 5)]
    found = decompose(paths)
    assert len(found.devices) == 2 and found.waiting.paired == 0
    assert any("waiting across reports is not judged" in note for note in found.notes)


def test_a_report_beside_its_export_counts_once(new_trace, kernel_names, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    shutil.copy(node(new_trace(), kernel_names, epoch=1), folder / "run.sqlite")
    (folder / "run.nsys-rep").write_bytes(b"report")
    (folder / "notes.txt").write_text("x")
    assert len(decompose(folder).devices) == 1
    assert collectives(folder).paired == 0


def test_a_packed_export_is_read_where_it_lies(new_trace, kernel_names, tmp_path):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    packed = tmp_path / "run.sqlite.gz"
    packed.write_bytes(gzip.compress(trace.done().read_bytes()))
    found = decompose(packed)
    assert found.devices[0]["busy_ns"]["gemm"] == 100 and found.path == str(packed)
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(InputError, match="packed by gzip and torn"):
        decompose(packed)


@pytest.mark.parametrize("version", ["", "_V2", "_V11"])
def test_tables_with_a_version_in_their_name(new_trace, kernel_names, version):
    trace = new_trace()
    trace.launch(-50, 3)
    trace.kernel(kernel_names["gemm"], 0, 100, correlation=3)
    trace.nvtx("spoc step=7 phase=decode tokens=4 decodes=4", -60, -40)
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
        if version:
            trace.database.execute(f"ALTER TABLE {table} RENAME TO {table}{version}")
    found = decompose(trace.done())
    assert found.devices[0]["busy_ns"]["gemm"] == 100 and found.steps.step.tolist() == [7]


OTHERS = {
    "a.h5": (b"\x89HDF\r\n\x1a\n" + bytes(90), "an HDF5 export: export the report with 'nsys export --type sqlite'"),
    "a.jsonl": (b'{"data":["{}"]}\n', "a JSON export: export the report"),
    "a.json": (b'{"schemaVersion": 1, "deviceProperties": []}', "torch's profiler"),
    "a.parquet": (b"PAR1" + bytes(90), "one table of a parquetdir: give its folder"),
    "a.zip": (b"PK\x03\x04" + bytes(90), "a zip archive: unpack it"),
    "a.zst": (b"\x28\xb5\x2f\xfd" + bytes(90), "zstd -d"),
    "a.ncu-rep": (b"NVR\0" + bytes(90), "Nsight Compute"),
    "a.csv": (b"Time (%),Total Time (ns),Instances,Name\n50.0,100,1,nvjet\n", "spoc nsight classify"),
    "a.sqlite": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "b.sqlite": (b"<!DOCTYPE html>", "an HTML or XML page"),
    "c.sqlite": (b"SQLite format 3\0" + bytes(20), "is truncated: it holds 36 bytes"),
    "old.qdrep": (b"NVIDIA Tegra Profiler Report 1." + bytes(90), "nsys export --type sqlite old.qdrep"),
    "d.sqlite": (b"NVIDIA Tegra Profiler Report 1." + bytes(90), "nsys export --type sqlite d.sqlite"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_named_with_what_to_do(tmp_path, monkeypatch, name):
    content, said = OTHERS[name]
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        decompose(tmp_path / name)
    assert said in caught.value.message and "\n" not in caught.value.message and name in caught.value.message


def test_folders_without_a_report_say_what_they_are(tmp_path):
    for name, inside, said in (("arrow", "StringIds.arrow", "an arrowdir"), ("logs", "a.log", "holds no report")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_text("x")
        with pytest.raises(InputError, match=said):
            decompose(tmp_path / name)
    with tarfile.open(tmp_path / "runs.tar", "w") as packed:
        packed.add(tmp_path / "logs", "logs")
    with pytest.raises(InputError, match="tar archive|not an SQLite"):
        decompose(tmp_path / "runs.tar")


def test_only_what_must_be_unpacked_needs_a_place_to_write(new_trace, kernel_names, monkeypatch):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    path = trace.done()
    monkeypatch.setattr("tempfile.tempdir", os.devnull)
    assert decompose(path).devices[0]["busy_ns"]["gemm"] == 100
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match="cannot read the trace"):
        decompose(packed)
