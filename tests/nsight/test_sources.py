"""What is read, and what is refused with a reason."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.core.errors import InputError
from spoc_lib.nsight import decompose
from spoc_lib.nsight.sources import ParquetSource, SqliteSource
from spoc_lib.nsight.sqlitepages import NULL


def refusal(path, **options):
    with pytest.raises(InputError) as caught:
        decompose(path, **options)
    assert "\n" not in caught.value.message
    return caught.value


def test_graph_entries_are_refused_and_the_flag_is_named(new_trace, kernel_names):
    trace = new_trace()
    trace.database.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER)")
    trace.insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=0, end=100)
    trace.kernel(kernel_names["gemm"], 0, 100)
    error = refusal(trace.done())
    assert error.code == "graph-mode" and "--cuda-graph-trace=node" in error.message


def test_graph_mode_without_kernels_is_refused(new_trace):
    trace = new_trace()
    trace.meta("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Graph")
    error = refusal(trace.done())
    assert error.code == "no-kernels" and "--cuda-graph-trace=node" in error.message


def test_graph_mode_with_hardly_any_kernel_is_refused_unless_accepted(new_trace, kernel_names):
    trace = new_trace()
    trace.meta("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Graph")
    trace.kernel(kernel_names["gemm"], 0, 100)
    trace.kernel(kernel_names["gemm"], 1_000_000, 1_000_100)
    path = trace.done()
    assert refusal(path).code == "graph-mode"
    result = decompose(path, accept_graph_mode=True)
    assert any("graph mode" in note for note in result.notes)


def test_node_mode_is_accepted(new_trace, kernel_names):
    trace = new_trace()
    trace.meta("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Node")
    trace.kernel(kernel_names["gemm"], 0, 100)
    trace.kernel(kernel_names["gemm"], 1_000_000, 1_000_100)
    assert not any("graph" in note for note in decompose(trace.done()).notes)


def test_the_real_edge_cases(shared):
    error = refusal(shared("data/nsight/edge_cases/graph_mode_two_kernels.sqlite"))
    assert error.code == "graph-mode" and "--cuda-graph-trace=node" in error.message
    error = refusal(shared("data/nsight/edge_cases/no_kernel_table.sqlite"))
    assert error.code == "no-kernels" and "Not all CUDA events might have been collected." in error.message


def test_absent_empty_foreign_and_unknown_files(tmp_path, new_trace):
    assert refusal(tmp_path / "absent.sqlite").code == "unreadable"
    (tmp_path / "empty.sqlite").touch()
    assert "is empty" in refusal(tmp_path / "empty.sqlite").message
    (tmp_path / "text.sqlite").write_text("start,end\n" * 30)
    assert "is not an SQLite file" in refusal(tmp_path / "text.sqlite").message
    foreign = new_trace("CREATE TABLE users (id INTEGER, name TEXT);").done()
    assert refusal(foreign).code == "unknown-schema"
    (tmp_path / "folder").mkdir()
    assert "no Parquet files" in refusal(tmp_path / "folder").message
    no_end = new_trace("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
                       "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, deviceId INTEGER, shortName INTEGER);")
    assert "lacks end" in refusal(no_end.done()).message


def test_a_truncated_file_is_no_idle_gpu(new_trace, kernel_names):
    trace = new_trace()
    for i in range(3000):
        trace.kernel(kernel_names["gemm"], i * 10, i * 10 + 5)
    path = trace.done()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert refusal(path).code == "truncated"


def test_a_damaged_page_is_said(new_trace, kernel_names):
    trace = new_trace()
    for i in range(3000):
        trace.kernel(kernel_names["gemm"], i * 10, i * 10 + 5)
    path = trace.done()
    root = sqlite3.connect(path).execute(
        "SELECT rootpage FROM sqlite_master WHERE name = 'CUPTI_ACTIVITY_KIND_KERNEL'").fetchone()[0]
    content = bytearray(path.read_bytes())
    content[(root - 1) * 4096:(root - 1) * 4096 + 200] = b"\xff" * 200
    path.write_bytes(content)
    assert refusal(path).code == "damaged"


def test_random_damage_never_crashes(new_trace, kernel_names):
    trace = new_trace()
    for i in range(2000):
        trace.kernel(kernel_names["gemm"], i * 10, i * 10 + 5)
    path = trace.done()
    whole = path.read_bytes()
    random = np.random.default_rng(5)
    for _ in range(60):
        content = bytearray(whole)
        at = int(random.integers(100, len(whole) - 64))
        content[at:at + 64] = random.bytes(64)
        path.write_bytes(content)
        try:
            result = decompose(path)
            assert sum(result.devices[0]["busy_ns"].values()) + result.devices[0]["idle_ns"] > 0
        except InputError:
            pass


def test_an_unfinished_export_is_refused(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    path = trace.done()
    path.with_name(path.name + "-wal").write_bytes(b"x")
    assert refusal(path).code == "unfinished"


def test_a_nsys_rep_without_nsys_names_the_export_command(tmp_path, monkeypatch):
    report = tmp_path / "run.nsys-rep"
    report.write_bytes(b"QDSTRM")
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refusal(report)
    assert error.code == "no-nsys" and "nsys export --type sqlite run.nsys-rep" in error.message


def test_a_nsys_rep_is_exported_by_nsys_beside_nothing_of_the_users(tmp_path, new_trace, kernel_names, monkeypatch):
    """A program called nsys that copies a known export stands for NVIDIA's."""
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    known = trace.done()
    tools, folder = tmp_path / "bin", tmp_path / "mine"
    tools.mkdir()
    folder.mkdir()
    nsys = tools / "nsys"
    nsys.write_text(f"#!{sys.executable}\nimport shutil, sys\n"
                    f"shutil.copy({str(known)!r}, sys.argv[sys.argv.index('--output') + 1])\n")
    nsys.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    (folder / "run.nsys-rep").write_bytes(b"report")
    assert decompose(folder / "run.nsys-rep").devices[0]["busy_ns"]["gemm"] == 100
    assert [p.name for p in folder.iterdir()] == ["run.nsys-rep"]
    nsys.write_text("#!/bin/sh\necho 'the report is of a newer version' >&2\nexit 3\n")
    assert "the report is of a newer version" in refusal(folder / "run.nsys-rep").message


def test_a_parquetdir_gives_the_same_answer(tmp_path, new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    trace.kernel(kernel_names["comm"], 50, 200, device=1)
    trace.launch(-3, 1)
    trace.nvtx("spoc step=1 phase=mixed tokens=9", -5, -1, registered=True)
    path = trace.done()
    folder = tmp_path / "parquet"
    folder.mkdir()
    with sqlite3.connect(path) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            cursor = database.execute(f"SELECT * FROM {table}")
            names = [c[0] for c in cursor.description]
            rows = [dict(zip(names, row, strict=True)) for row in cursor]
            if rows:
                pq.write_table(pa.Table.from_pylist(rows), folder / f"{table}.parquet")
    a, b = decompose(path).to_dict(), decompose(folder).to_dict()
    a.pop("trace"), b.pop("trace")
    assert a == b
    kernels = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    whole = kernels.read_bytes()
    kernels.write_bytes(whole[:4] + b"\xff" * 200 + whole[204:])  # the footer holds, the first pages do not
    assert refusal(folder).code == "damaged"
    pq.write_table(pa.table({"start": [0.5], "end": [1.5], "deviceId": [0], "demangledName": [1]}), kernels)
    assert "column start does not hold integers" in refusal(folder).message
    kernels.write_bytes(whole)
    (folder / "StringIds.parquet").write_bytes(b"PAR1 torn")
    assert refusal(folder).code == "damaged"
    assert "TARGET_INFO_SYSTEM_ENV" not in ParquetSource(folder).tables()


values = st.one_of(st.none(), st.integers(-2**63 + 1, 2**63 - 1), st.integers(-300, 300), st.sampled_from([0, 1]))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(values, st.one_of(st.text(max_size=40), st.floats(allow_nan=False), st.none()), values,
                               values), min_size=0, max_size=400),
       page=st.sampled_from([512, 4096, 65536]))
def test_pages_decode_as_sqlite_reads_them(tmp_path_factory, rows, page):
    path = tmp_path_factory.mktemp("pages") / "t.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA page_size = {page}")
        database.execute("CREATE TABLE t (a INTEGER, filler, b INTEGER, c INTEGER)")
        database.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
        database.execute("DELETE FROM t WHERE rowid % 7 = 3")
    database.close()
    source = SqliteSource(path)
    chunks = list(source.integers("t", ["c", "a"]))
    got = np.concatenate(chunks, axis=1).T.tolist() if chunks else []
    kept = [row for i, row in enumerate(rows, start=1) if i % 7 != 3]
    assert got == [[NULL if row[3] is None else row[3], NULL if row[0] is None else row[0]] for row in kept]
    source.close()


def test_big_and_awkward_tables_fall_back_to_sqlite(tmp_path):
    path = tmp_path / "t.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, note TEXT, value INTEGER)")
        database.execute("CREATE TABLE late (note TEXT, value INTEGER)")
        database.executemany("INSERT INTO t VALUES (?, 'x', ?)", ((i, -i) for i in range(50_000)))
        database.executemany("INSERT INTO late VALUES (?, ?)",
                             (("x" * (9000 if i == 40_000 else 3), i) for i in range(50_000)))
        database.execute("ALTER TABLE late ADD COLUMN added INTEGER")
    database.close()
    source = SqliteSource(path)
    both = np.concatenate(list(source.integers("t", ["id", "value"])), axis=1)
    assert (both == np.array([np.arange(50_000), -np.arange(50_000)])).all()
    late = np.concatenate(list(source.integers("late", ["value", "added"])), axis=1)  # one row overflows its page
    assert (late[0] == np.arange(50_000)).all() and (late[1] == NULL).all()
    with pytest.raises(InputError, match="something else than integers"):
        list(source.integers("late", ["note"]))
    source.close()


def test_times_that_are_no_integers_are_refused_not_rounded(new_trace, kernel_names):
    trace = new_trace("""
      CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
      CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, demangledName);""")
    code = trace.string(kernel_names["gemm"])
    trace.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=1.0, end=5.0, deviceId=0, demangledName=code)
    trace.database.commit()
    assert decompose(trace.path).devices[0]["busy_ns"]["gemm"] == 4
    trace.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=5.0, end=7.5, deviceId=0, demangledName=code)
    assert refusal(trace.done()).code == "bad-table"


def test_no_index_and_no_lock_is_left(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    path = trace.done()
    path.chmod(0o444)
    path.parent.chmod(0o555)
    try:
        code = ("import sys; from spoc_lib.nsight import decompose; "
                "print(decompose(sys.argv[1]).devices[0]['busy_ns']['gemm'])")
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    finally:
        path.parent.chmod(0o755)
    assert done.stdout.strip() == "100"


def test_parquet_integers_of_any_width_and_sign_keep_their_bits(tmp_path):
    """An unsigned id above 2^63 is the negative integer that SQLite holds; NULL is NULL."""
    pq.write_table(pa.table({"a": pa.array([2**63 + 5, None], pa.uint64()), "b": pa.array([1, 2], pa.int32())}),
                   tmp_path / "T.parquet")
    (chunk,) = ParquetSource(tmp_path).integers("T", ("a", "b"))
    assert chunk.tolist() == [[5 - 2**63, NULL], [1, 2]] and chunk.dtype == np.int64
