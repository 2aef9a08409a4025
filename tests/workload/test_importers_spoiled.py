"""Whatever stands in a trace: sessions and reasons come out, or one sentence; and what comes out can be played."""

from __future__ import annotations

import json
import math

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spoc_lib.core.errors import InputError
from spoc_lib.workload.playback import play
from spoc_lib.workload.traces.importers import import_path

MESSAGES = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "It fails."},
            {"role": "assistant", "content": "Look.", "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]},
            {"role": "tool", "content": "a.py"}, {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}]
KV = {"id": "s", "block_size": 64, "tool_tokens": 64, "system_tokens": 64, "requests": [
    {"t": 5 * k, "in": 640 + 64 * k, "out": 50, "hash_ids": list(range(10 + k)), "input_types": ["tool_result"],
     "api_time": 2.0, "think_time": 3.0} for k in range(3)]}
TRAJECTORY = {"history": MESSAGES, "trajectory": [{"action": "ls", "execution_time": 0.5} for _ in range(2)]}
LINES = [{"timestamp": 1000 * k, "input_length": 900 + 512 * k, "output_length": 9, "hash_ids": list(range(2 + k)),
          "session_id": "m", "delay": 500} for k in range(3)]
TABLE = {"cid": ["a"] * 3, "agent": ["main"] * 3, "k": [0, 1, 2], "t": [0.0, 5.0, 10.0], "inp": [640.0, 704.0, 768.0],
         "out": [5.0] * 3, "lcp": [0.0, 10.0, 11.0], "think": [0.0, 2.0, 2.0], "api": [1.0] * 3}

quick = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path):
    """The import of a file, or None where it was refused in a sentence."""
    try:
        result = import_path(path)
    except InputError as refusal:
        assert refusal.message
        return None
    assert result.turns >= 1
    assert all(record and reason for record, reason in result.skipped)
    for timing in ("closed", "timestamps"):
        if timing == "closed" or all(s.requests[0].time_s is not None for s in result.main_sessions):
            for item in play(result.script(context_limit=4096, timing=timing), 2, 4):
                assert item.turn.prompt_tokens + item.turn.output_tokens <= 4096
                assert 0 <= item.turn.think_time_s < math.inf
    result.to_dict()
    return result


def set_time(form, field, value, at):
    """A trace of three requests (two steps) whose time at one place is `value`."""
    if form == "kv":
        return json.dumps({**KV, "requests": [{**r, field: value} if k == at else r
                                              for k, r in enumerate(KV["requests"])]})
    if form == "trajectory":
        steps = [{**step, field: value} if k == at else step for k, step in enumerate(TRAJECTORY["trajectory"])]
        return json.dumps({**TRAJECTORY, "trajectory": steps})
    return "\n".join(json.dumps({**line, field: value} if k == at else line) for k, line in enumerate(LINES))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e300, "soon", [1], True])
@pytest.mark.parametrize(("form", "field", "file"), [
    ("kv", "t", "x.json"), ("kv", "api_time", "x.json"), ("kv", "think_time", "x.json"),
    ("mooncake", "delay", "x.jsonl"), ("mooncake", "timestamp", "x.jsonl"), ("trajectory", "execution_time", "x.traj"),
])
def test_a_time_that_is_none_is_named(tmp_path, form, field, file, value):
    (tmp_path / file).write_text(set_time(form, field, value, at=0 if form == "trajectory" else 1))
    (tmp_path / "good.json").write_text(json.dumps(MESSAGES))
    result = import_path(tmp_path)
    assert result.to_dict()["formats"]["messages"] == 1
    assert [f"'{field}' is" in reason for _, reason in result.skipped] == [True], result.skipped
    assert result.turns == (2 if form == "trajectory" else 4)  # a trajectory hangs together: it is left out whole


@pytest.mark.parametrize("value", [-1.0, float("inf"), 1e300])
@pytest.mark.parametrize("field", ["t", "think", "api"])
def test_a_time_that_is_none_in_a_table_is_named(tmp_path, field, value):
    pd.DataFrame({**TABLE, field: [0.0, value, 10.0]}).to_parquet(tmp_path / "x.parquet")
    result = import_path(tmp_path / "x.parquet")
    assert result.turns == 2 and f"'{field}' is" in result.skipped[0][1]


@pytest.mark.parametrize("form", ["kv", "table"])
def test_times_that_go_back_are_named(tmp_path, form):
    path = tmp_path / ("x.json" if form == "kv" else "x.parquet")
    if form == "kv":
        path.write_text(set_time("kv", "t", 1, at=2))
    else:
        pd.DataFrame({**TABLE, "t": [0.0, 5.0, 1.0]}).to_parquet(path)
    result = import_path(path)
    assert result.turns == 2
    assert "'t' is 1, before the 5 of the request ahead of it" in result.skipped[0][1]


def test_mooncake_requests_are_taken_in_the_order_of_their_times(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, reversed(LINES))))
    result = import_path(tmp_path / "x.jsonl")
    assert [r.prompt_tokens for r in result.all_sessions[0].requests] == [900, 1412, 1924] and not result.skipped


def test_times_since_1970_are_replayed_from_the_first(tmp_path):
    rows = [{"timestamp": 1.7e12 + 1000 * k, "input_length": 600, "output_length": 5, "hash_ids": [2 * k, 2 * k + 1]}
            for k in range(3)]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script = import_path(tmp_path / "x.jsonl").script(timing="timestamps")
    assert [script.user(k).next(0).think_time_s for k in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(("field", "said"), [("in", "'in' is 1e+15"), ("out", "'out' is 1e+15")])
def test_lengths_that_no_context_holds_are_named(tmp_path, field, said):
    (tmp_path / "x.json").write_text(set_time("kv", field, 10**15, at=1))
    result = import_path(tmp_path / "x.json")
    assert result.turns == 2 and said in result.skipped[0][1]


def test_a_damaged_page_is_skipped_in_a_folder(tmp_path):
    pq.write_table(pa.table({"messages": [MESSAGES[:3]] * 400}), tmp_path / "x.parquet", compression="snappy")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2:])
    with pytest.raises(InputError, match="not a readable Parquet file"):
        import_path(tmp_path / "x.parquet")
    (tmp_path / "good.json").write_text(json.dumps(MESSAGES))
    result = import_path(tmp_path)
    assert result.sessions == 1 and "Parquet" in result.skipped[0][1]


JUNK = st.one_of(st.none(), st.booleans(), st.integers(-10**20, 10**20), st.floats(), st.text(max_size=4), st.just([]),
                 st.just({}), st.just([None]), st.just([{}]), st.just({"role": 5}), st.lists(st.integers(), max_size=3),
                 st.recursive(st.none(), lambda inner: st.lists(inner, max_size=2), max_leaves=6))


def spoil(value, path, junk):
    """`value` with `junk` at a place that `path` leads to."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return junk
    keys = list(value) if isinstance(value, dict) else range(len(value))
    chosen = keys[path[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[chosen] = spoil(value[chosen], path[1:], junk)
    return copy


PLACE = st.lists(st.integers(0, 50), min_size=1, max_size=4)


@settings(quick, max_examples=400)
@given(which=st.integers(0, 3), spots=st.lists(st.tuples(PLACE, JUNK), min_size=1, max_size=3))
def test_spoiled_records(tmp_path, which, spots):
    """Beside a record of any format, spoiled at up to three places, a good one is always read."""
    record = [KV, {"messages": MESSAGES}, LINES[0], TRAJECTORY][which]
    for path, junk in spots:
        record = spoil(record, path, junk)
    (tmp_path / "x.jsonl").write_text(json.dumps(record) + "\n" + json.dumps({"messages": MESSAGES}) + "\n")
    result = read(tmp_path / "x.jsonl")
    assert result is not None and any(s.format == "messages" and len(s.requests) == 2 for s in result.all_sessions)
    (tmp_path / "x.json").write_text(json.dumps(record))
    read(tmp_path / "x.json")


CELLS = st.one_of(
    st.lists(st.floats(), min_size=3, max_size=3), st.lists(st.integers(-2**62, 2**62), min_size=3, max_size=3),
    st.lists(st.sampled_from(["a", "main", "", None]), min_size=3, max_size=3), st.just([None] * 3),
    st.lists(st.lists(st.integers(0, 3), max_size=2), min_size=3, max_size=3), st.just([True, False, None]))


@quick
@given(columns=st.dictionaries(st.sampled_from([*TABLE, "itypes"]), CELLS, min_size=1, max_size=3))
def test_spoiled_tables_of_requests(tmp_path, columns):
    pq.write_table(pa.table({**TABLE, **columns}), tmp_path / "x.parquet")
    read(tmp_path / "x.parquet")


@quick
@given(columns=st.dictionaries(st.sampled_from(["cid", "tool", "system"]), CELLS, min_size=1, max_size=3))
def test_spoiled_tables_of_sessions(tmp_path, columns):
    pq.write_table(pa.table(TABLE), tmp_path / "requests.parquet")
    pq.write_table(pa.table({"cid": ["a", "b", "c"], "tool": [1, 2, 3], "system": [4, 5, 6], **columns}),
                   tmp_path / "conversations.parquet")
    assert read(tmp_path).turns == 3


@quick
@given(cells=CELLS, column=st.sampled_from(["messages", "conversations", "trajectory"]))
def test_spoiled_tables_of_messages(tmp_path, cells, column):
    pq.write_table(pa.table({column: cells}), tmp_path / "x.parquet")
    assert read(tmp_path / "x.parquet") is None


@quick
@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode), st.sampled_from([
           b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "{}".encode("utf-16")])),
       suffix=st.sampled_from([".json", ".jsonl", ".ndjson", ".traj", ".parquet", ".txt"]))
def test_any_bytes(tmp_path, content, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    assert read(path) is None
