"""Hand-built traces with known answers: every nanosecond is accounted for."""

from __future__ import annotations

import hashlib
import sqlite3

import pytest

from spoc_lib.core import schemas, tables
from spoc_lib.core.errors import InputError
from spoc_lib.nsight import CATEGORIES, decompose


def busy(result, device=0, pid=100):
    found = next(d for d in result.devices if (d["pid"], d["device"]) == (pid, device))
    return {c: ns for c, ns in found["busy_ns"].items() if ns} | {"idle": found["idle_ns"]}


def test_compute_hides_communication_and_the_window_is_whole(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    trace.kernel(kernel_names["comm"], 50, 180, stream=9)  # 50 hidden, 80 exposed
    trace.kernel(kernel_names["attn"], 200, 300)
    result = decompose(trace.done())
    assert busy(result) == {"gemm": 100, "comm": 80, "attn": 100, "idle": 20}
    assert result.collectives.iloc[0].to_dict() == {"pid": 100, "device": 0, "total_ns": 130, "exposed_ns": 80,
                                                    "hidden_ns": 50}
    assert result.table.busy_ns.sum() == result.window_ns[1] - result.window_ns[0] == 300
    tables.as_table(result.table, schemas.DECOMPOSITION)


def test_nested_zero_length_and_negative_intervals(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 1000)
    trace.kernel(kernel_names["gemm"], 100, 200, stream=8)     # nested in its own category: counts once
    trace.kernel(kernel_names["attn"], 300, 400, stream=8)     # nested: attention owns it
    trace.kernel(kernel_names["attn"], 500, 500, stream=8)     # no length
    trace.kernel(kernel_names["attn"], 700, 600, stream=8)     # ends before it starts
    result = decompose(trace.done())
    assert busy(result) == {"gemm": 900, "attn": 100, "idle": 0}
    assert any("end before they start" in note for note in result.notes)
    assert result.kernels.set_index("name").kernels.to_dict() == {kernel_names["gemm"]: 2, kernel_names["attn"]: 3}


def test_a_kernel_that_starts_before_its_predecessor_ends_is_no_negative_gap(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 200, 300)  # written out of order, too
    trace.kernel(kernel_names["gemm"], 0, 210)
    result = decompose(trace.done())
    assert busy(result) == {"gemm": 300, "idle": 0}
    assert result.gaps.gaps.sum() == 0


def test_two_processes_with_equal_device_and_correlation_ids_stay_apart(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100, pid=100, device=0, correlation=1)
    trace.kernel(kernel_names["attn"], 0, 60, pid=200, device=0, correlation=1)
    for pid, start in ((100, 0), (200, 10)):
        trace.nvtx(f"spoc step=1 phase={'decode' if pid == 100 else 'prefill'} tokens=4", start, start + 5, pid=pid)
        trace.launch(start + 1, 1, pid=pid)
    result = decompose(trace.done())
    assert busy(result, pid=100) == {"gemm": 100, "idle": 0}
    assert busy(result, pid=200) == {"attn": 60, "idle": 40}
    assert result.steps.set_index("pid").phase.to_dict() == {100: "decode", 200: "prefill"}


def test_eight_gpus_are_not_one_union(new_trace, kernel_names):
    trace = new_trace()
    for device in range(8):
        trace.kernel(kernel_names["gemm"], device * 100, device * 100 + 100, device=device)
    result = decompose(trace.done())
    assert len(result.devices) == 8
    assert all(busy(result, device) == {"gemm": 100, "idle": 700} for device in range(8))


def test_copies_and_fills_count_as_mem_and_stand_behind_kernels(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 50)
    trace.copy(40, 90, kind=1)
    trace.insert("CUPTI_ACTIVITY_KIND_MEMSET", start=95, end=100, deviceId=0, streamId=7,
                 globalPid=(1 << 48) | (100 << 24))
    result = decompose(trace.done())
    assert busy(result) == {"gemm": 50, "mem": 45, "idle": 5}
    assert {"[CUDA memcpy Host-to-Device]", "[CUDA memset]"} <= set(result.kernels.name)


def test_window_and_nvtx_range_cut_the_trace(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 1_000)
    trace.kernel(kernel_names["attn"], 2_000, 3_000)
    trace.nvtx("rung 3", 500, 2_500, registered=True)
    path = trace.done()
    assert busy(decompose(path, (500e-9, 2_500e-9))) == {"gemm": 500, "attn": 500, "idle": 1_000}
    assert busy(decompose(path, nvtx_range="rung 3")) == {"gemm": 500, "attn": 500, "idle": 1_000}
    with pytest.raises(InputError, match="no NVTX range named 'rung 4'"):
        decompose(path, nvtx_range="rung 4")


def test_an_empty_window_is_refused_and_names_what_is_covered(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 1_000_000_000, 2_000_000_000)
    path = trace.done()
    for window in ((5.0, 6.0), (1.5, 1.5), (0.0, 0.5)):
        with pytest.raises(InputError, match=r"covers 1\.000000 s to 2\.000000 s"):
            decompose(path, window)


def test_a_silent_gpu_in_the_window_is_said(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100, device=0)
    trace.kernel(kernel_names["gemm"], 0, 10, device=1)
    result = decompose(trace.done(), (50e-9, 100e-9))
    assert busy(result, 1) == {"idle": 50}
    assert any("GPU 1 of process 100 ran nothing" in note for note in result.notes)


def test_a_missing_rank_is_refused(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    with pytest.raises(InputError, match="1 of 4 GPUs"):
        decompose(trace.done(), expect_gpus=4)


def test_collectives_tell_of_gpus_that_are_not_there(new_trace, kernel_names):
    alone = new_trace()
    alone.kernel(kernel_names["comm"], 0, 100)
    assert any("others exist" in note for note in decompose(alone.done()).notes)
    partial = new_trace()
    for device in range(2):
        partial.kernel("void vllm::cross_device_reduce_1stage<__nv_bfloat16, (int)8>(T1)", 0, 9, device=device)
    assert any("over 8 GPUs" in note and "holds 2" in note for note in decompose(partial.done()).notes)


def test_unknown_kernels_are_ranked_by_time_and_a_rule_can_be_added(new_trace, kernel_names, tmp_path):
    trace = new_trace()
    trace.kernel("my_small_kernel", 0, 10)
    trace.kernel("my_big_kernel", 10, 100)
    path = trace.done()
    unknown = decompose(path).unknown_kernels
    assert [k["name"] for k in unknown] == ["my_big_kernel", "my_small_kernel"]
    assert unknown[0]["share"] == 0.9
    rules = tmp_path / "mine.yaml"
    rules.write_text("name: mine\nrules:\n  - {category: act, pattern: '^my_big'}\n")
    from spoc_lib.nsight import rule_book

    result = decompose(path, rules=rule_book(rules))
    assert busy(result) == {"act": 90, "other": 10, "idle": 0}
    assert [k["name"] for k in result.unknown_kernels] == ["my_small_kernel"]


def test_the_users_file_is_not_touched_and_the_environment_not_read(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    trace.database.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, "
                           "nameEnum INTEGER, value TEXT)")
    trace.database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, 'x', 'HF_TOKEN', 1, 'hf_secret')")
    trace.meta("PROCESS_0:ARGUMENT_3", "--api-key=sk-secret")
    path = trace.done()
    before = hashlib.sha256(path.read_bytes()).hexdigest(), sorted(p.name for p in path.parent.iterdir())
    from spoc_lib.core.files import to_json
    from spoc_lib.nsight.sources import SqliteSource
    from spoc_lib.nsight.text import decomposition_text

    result = decompose(path)
    assert "secret" not in to_json(result.to_dict()) + decomposition_text(result)
    assert "TARGET_INFO_SYSTEM_ENV" not in SqliteSource(path).tables()
    assert before == (hashlib.sha256(path.read_bytes()).hexdigest(), sorted(p.name for p in path.parent.iterdir()))


@pytest.mark.parametrize("version", ["2022.4.2-full-lazy-false", "2023.3.3-3.4.0", "2025.1.3-3.17.2",
                                     "2026.1.1-3.24.14", "2026.2.1-3.25.0"])
def test_every_exporter_version(new_trace, kernel_names, shared, ddl_table, version):
    """The real DDL of each version; tables that it left out because they were empty come from the newest one."""
    own = shared(f"data/nsight/schemas/schema-nsys-{version}.sql").read_text()
    newest = shared("data/nsight/schemas/schema-nsys-2026.2.1-3.25.0.sql").read_text()
    wanted = ("StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET",
              "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "PROCESSES", "TARGET_INFO_SESSION_START_TIME")
    ddl = [ddl_table(own, t) or ddl_table(newest, t) for t in wanted]
    meta = [ddl_table(own, t) for t in ("EXPORT_META_DATA", "META_DATA_EXPORT", "META_DATA_CAPTURE")]
    trace = new_trace("\n".join(part for part in [*ddl, *meta] if part))
    trace.kernel(kernel_names["gemm"], 0, 100, device=1, correlation=3)
    trace.copy(150, 200, kind=2, device=1)
    trace.launch(-50, 3)
    trace.nvtx("spoc step=7 phase=decode tokens=4 decodes=4", -60, -40, registered=True)
    table = "EXPORT_META_DATA" if trace.has("EXPORT_META_DATA") else "META_DATA_EXPORT"
    trace.insert(table, name="EXPORT_SCHEMA_VERSION", value=version)
    trace.insert("TARGET_INFO_SESSION_START_TIME", utcEpochNs=17)
    result = decompose(trace.done())
    assert busy(result, 1) == {"gemm": 100, "mem": 50, "idle": 50}
    assert result.metadata["schema"] == version and result.metadata["utc_epoch_ns"] == 17
    assert result.steps[["step", "phase", "tokens", "decodes"]].values.tolist() == [[7, "decode", 4, 4]]


def test_columns_are_found_by_name_wherever_they_stand(new_trace, kernel_names):
    trace = new_trace("""
      CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
      CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (demangledName INTEGER, note TEXT, globalPid INTEGER, end INTEGER,
        ratio REAL, deviceId INTEGER, start INTEGER);""")
    trace.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=5, end=10, demangledName=trace.string(kernel_names["gemm"]),
                 deviceId=3, note="text before the numbers", ratio=1.5, globalPid=(1 << 48) | (100 << 24))
    assert busy(decompose(trace.done()), 3) == {"gemm": 5, "idle": 0}


def test_a_machine_with_equal_pids_keeps_its_ranks(new_trace, kernel_names):
    trace = new_trace()
    code = trace.string(kernel_names["gemm"])
    for machine in (1, 2):
        trace.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=0, end=10 * machine, deviceId=0, demangledName=code,
                     globalPid=(machine << 48) | (100 << 24))
    result = decompose(trace.done())
    assert len({d["pid"] for d in result.devices}) == 2
    assert sorted(d["busy_ns"]["gemm"] for d in result.devices) == [10, 20]


def independent(path, window):
    """{(globalPid, deviceId): {'busy': union of all, 'comm': exposed, 'kinds': {...}}} by plain SQL and a sweep over
    a sorted list, sharing nothing with the product."""
    connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    rows = connection.execute(
        "SELECT k.globalPid, k.deviceId, k.start, k.end, s.value FROM CUPTI_ACTIVITY_KIND_KERNEL k "
        "JOIN StringIds s ON s.id = k.demangledName UNION ALL "
        "SELECT globalPid, deviceId, start, end, 'copy' FROM CUPTI_ACTIVITY_KIND_MEMCPY UNION ALL "
        "SELECT globalPid, deviceId, start, end, 'copy' FROM CUPTI_ACTIVITY_KIND_MEMSET").fetchall()

    def kind(name):
        if name == "copy":
            return "copy"
        return "comm" if name.startswith("nccl") else "attn" if "flash::" in name else "compute"

    def covered(intervals):
        total, reach = 0, None
        for start, end in sorted(intervals):
            if reach is None or start > reach:
                total, reach = total + end - start, end
            elif end > reach:
                total, reach = total + end - reach, end
        return total

    result = {}
    for key in {(r[0], r[1]) for r in rows}:
        mine = [(s, e, kind(name)) for p, d, s, e, name in rows if (p, d) == key]
        everything = covered([(s, e) for s, e, _ in mine])
        compute = covered([(s, e) for s, e, k in mine if k in ("attn", "compute")])
        with_comm = covered([(s, e) for s, e, k in mine if k in ("attn", "compute", "comm")])
        result[key] = {"busy": everything, "comm": with_comm - compute,
                       "attn": covered([(s, e) for s, e, k in mine if k == "attn"])}
    connection.close()
    return result


def test_the_two_h100_trace_agrees_with_an_independent_computation(shared):
    path = shared("data/nsight/two_h100/mfu_2gpu_before.sqlite")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    result = decompose(path, expect_gpus=2)
    truth = independent(path, result.window_ns)
    assert result.window_ns == (60111513113, 60411390119)
    for (global_pid, device), expected in truth.items():
        got = busy(result, device, (global_pid >> 24) & 0xFFFFFF)
        assert sum(got.values()) == 60411390119 - 60111513113
        assert sum(got.values()) - got["idle"] == expected["busy"]
        assert got["comm"] == expected["comm"] and got["attn"] == expected["attn"]
    assert {d["pid"]: d["busy_ns"]["comm"] for d in result.devices} == {144: 17172652, 145: 8229100}
    assert {d["pid"]: d["busy_ns"]["attn"] for d in result.devices} == {144: 135961783, 145: 136355595}
    assert not result.unknown_kernels and not result.simulated
    assert any("CUDA graph mode" in note for note in result.notes)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert set(result.totals().columns) == {*CATEGORIES, "idle"}


def test_activities_without_an_end_are_left_out_and_said(new_trace, kernel_names):
    """A capture that stops while kernels run leaves them without an end; CREATE TABLE AS drops NOT NULL."""
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    trace.kernel(kernel_names["gemm"], 200, 300)
    trace.database.executescript("""
        CREATE TABLE copied AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL;
        UPDATE copied SET "end" = NULL WHERE start = 200;
        DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL;
        ALTER TABLE copied RENAME TO CUPTI_ACTIVITY_KIND_KERNEL;""")
    result = decompose(trace.done())
    assert busy(result) == {"gemm": 100, "idle": 0}
    assert any(note.startswith("1 activities have no start or no end") for note in result.notes)


def test_another_number_of_gpus_than_expected_is_refused_both_ways(new_trace, kernel_names):
    trace = new_trace()
    for device in range(2):
        trace.kernel(kernel_names["gemm"], 0, 100, device=device)
    path = trace.done()
    with pytest.raises(InputError, match="2 GPUs where 1 were expected"):
        decompose(path, expect_gpus=1)
    assert len(decompose(path, expect_gpus=2).devices) == 2


def test_a_window_that_is_not_finite_is_refused(new_trace, kernel_names):
    trace = new_trace()
    trace.kernel(kernel_names["gemm"], 0, 100)
    path = trace.done()
    for window in ((float("nan"), 1.0), (0.0, float("inf"))):
        with pytest.raises(InputError, match="not finite"):
            decompose(path, window)


def test_ids_of_any_size_name_kernels(new_trace, kernel_names):
    """Exporters number strings from 0, but nothing says that they must."""
    trace = new_trace()
    trace.string("one that no kernel has")
    trace.kernel(kernel_names["gemm"], 0, 100)
    trace.kernel(kernel_names["attn"], 100, 250)
    trace.database.execute("UPDATE StringIds SET id = id * 900000000000 WHERE value = ?", (kernel_names["attn"],))
    trace.database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = demangledName * 900000000000 "
                           "WHERE start = 100")
    result = decompose(trace.done())
    assert busy(result) == {"gemm": 100, "attn": 150, "idle": 0}
    assert set(result.kernels.name) == {kernel_names["gemm"], kernel_names["attn"]}
