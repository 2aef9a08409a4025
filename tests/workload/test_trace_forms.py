"""Conversations as today's tools write them: every text that costs tokens is counted, what has none is said by kind."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.workload.tokenizer import offline_tokenizer
from spoc_lib.workload.traces.importers import import_path

COUNT = offline_tokenizer().count
LONG = " ".join(f"word{k}" for k in range(60))
N = COUNT(LONG)
U, A = {"role": "user", "content": LONG}, {"role": "assistant", "content": "ok"}


def read(tmp_path, *values, name="t.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, values)))
    return import_path(path)


def sizes(result):
    return [(r.prompt_tokens, r.output_tokens) for s in result.main_sessions for r in s.requests]


def blocks(*parts, role="user"):
    return {"role": role, "content": list(parts)}


@pytest.mark.parametrize(
    "middle",
    [
        [A, {"role": "user", "content": LONG}],
        [A, blocks({"type": "tool_result", "tool_use_id": "t", "content": LONG})],
        [A, blocks({"type": "tool_result", "content": [{"type": "text", "text": LONG}]})],
        [A, {"role": "observation", "content": LONG}],
        [A, {"role": "environment", "content": LONG}],
        [A, blocks({"type": "input_text", "text": LONG})],
        [A, {"role": "Human", "content": {"text": LONG}}],
        [A, {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": LONG}}]}],
        [{"role": "MODEL", "parts": [{"text": "ok"}]}, {"role": "user", "parts": [{"text": LONG}]}],
        [{"from": "bing", "value": "ok"}, {"from": "human", "value": LONG}],
        [{"type": "ai", "data": {"content": "ok"}}, {"type": "human", "data": {"content": LONG}}],
        [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call_output", "call_id": "c", "output": LONG},
        ],
    ],
)
def test_all_text_of_a_prompt_is_counted(tmp_path, middle):
    result = read(tmp_path, {"messages": [U, *middle, A, {"role": "exit", "content": "diff"}]})
    assert sizes(result) == [(N + 6, 1), (2 * N + 6 + 1 + 4 + 4, 1)]
    assert not result.skipped and result.notes == ("left out: 1 x closing message of role 'exit'",)


@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": "ok", "reasoning_content": LONG},
        {"role": "assistant", "content": "ok", "reasoning": LONG},
        blocks(
            {"type": "thinking", "thinking": LONG, "signature": "x"}, {"type": "text", "text": "ok"}, role="assistant"
        ),
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": json.dumps({"x": LONG})}},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": LONG}}}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"x": LONG})}}],
        },
        blocks({"type": "tool_use", "id": "t", "name": "f", "input": {"x": LONG}}, role="assistant"),
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": LONG}}}]},
        {"type": "function_call", "name": "f", "arguments": json.dumps({"x": LONG}), "call_id": "c"},
    ],
)
def test_reasoning_and_calls_are_output_and_history(tmp_path, reply):
    (first, output), (second, _) = sizes(read(tmp_path, {"messages": [U, reply, U, A]}))
    assert N <= output <= N + 20 and second == first + output + 4 + N + 4


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:x"}}, "image"),
        ({"type": "input_audio", "input_audio": {}}, "audio"),
        ({"type": "document", "source": {"type": "base64", "data": "JVBERi0"}}, "document"),
        ({"inlineData": {"mimeType": "image/png", "data": "x"}}, "inlinedata"),
        ({"type": "redacted_thinking", "data": "x"}, "sealed reasoning"),
    ],
)
def test_what_has_no_text_is_counted_as_lost(tmp_path, part, kind):
    result = read(tmp_path, {"messages": [blocks({"type": "text", "text": LONG}, part), A]})
    assert sizes(result) == [(N + 6, 1)]
    assert [record for record, _ in result.skipped] == [f"1 x {kind}"] and "missing" in result.skipped[0][1]


def test_a_document_given_as_text_is_kept(tmp_path):
    part = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": LONG}}
    assert sizes(read(tmp_path, {"messages": [blocks(part), A]})) == [(N + 6, 1)]


def test_an_unknown_role_amid_a_conversation_is_refused(tmp_path):
    with pytest.raises(InputError, match="unknown role 'sheep'"):
        read(tmp_path, {"messages": [U, {"role": "sheep", "content": LONG}, A]})


@pytest.mark.parametrize(
    "record",
    [
        {"custom_id": "1", "method": "POST", "body": {"model": "m", "messages": [U, A]}},
        {"request": {"messages": [U]}, "response": {"choices": [{"message": A}]}},
        {"request": {"body": {"messages": [U]}}, "response": {"body": {"choices": [{"message": A}]}}},
        {"messages": [U], "response": "ok"},
        {"instruction": LONG, "input": "", "output": "ok"},
        {"prompt": LONG, "completion": "ok"},
        {"body": {"input": LONG, "max_output_tokens": 1}},
        {"prompt": LONG, "output_tokens": 1},
        {"messages": [U], "usage": {"completion_tokens": 1}},
    ],
)
def test_requests_as_they_are_logged(tmp_path, record):
    assert sizes(read(tmp_path, record)) == [(N + 6, 1)]


def test_an_http_archive(tmp_path):
    entry = {
        "request": {"postData": {"text": json.dumps({"messages": [U]})}},
        "response": {"content": {"text": json.dumps({"choices": [{"message": A}]})}},
    }
    assert sizes(read(tmp_path, {"log": {"entries": [entry]}}, name="t.har")) == [(N + 6, 1)]


def claude(kind, uuid, parent, content, at, **more):
    return {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s",
        "isSidechain": False,
        "timestamp": f"2026-01-01T00:00:{at:02d}Z",
        "message": {"role": kind, "content": content, **more},
    }


def test_a_claude_code_log(tmp_path):
    """Two lines of one reply with a call each, their results on branches, a message taken back, a sub-agent."""
    use = [{"type": "tool_use", "id": f"t{k}", "name": "ls", "input": {}} for k in (1, 2)]
    result = read(
        tmp_path,
        {"type": "summary", "summary": "x", "leafUuid": "a4"},
        claude("user", "u0", None, LONG, 0),
        claude("assistant", "a1", "u0", [use[0]], 5, id="m1"),
        claude("assistant", "a2", "a1", [use[1]], 6, id="m1"),
        claude("user", "u1", "a1", [{"type": "tool_result", "tool_use_id": "t1", "content": LONG}], 8),
        claude("user", "u2", "a2", [{"type": "tool_result", "tool_use_id": "t2", "content": LONG}], 9),
        claude("assistant", "a3", "u2", [{"type": "text", "text": "ok"}], 11, id="m2"),
        claude("user", "u3", "a3", "taken back", 12),
        claude("user", "u4", "a3", LONG, 20),
        claude("assistant", "a4", "u4", "ok", 22, id="m3"),
        {**claude("user", "x0", None, LONG, 7), "isSidechain": True},
        {**claude("assistant", "x1", "x0", "ok", 8), "isSidechain": True},
    )
    assert len(result.main_sessions) == 1 and len(result.all_sessions) == 2
    requests = result.main_sessions[0].requests
    calls = COUNT('{"name": "ls", "arguments": {}}\n{"name": "ls", "arguments": {}}')
    appended = COUNT(f"{LONG}\n{LONG}")
    assert sizes(result) == [
        (N + 6, calls),
        (N + 6 + calls + appended + 8, 1),
        (N + 6 + calls + appended + 8 + 1 + N + 8, 1),
    ]
    assert [r.human for r in requests] == [True, False, True] and [r.gap_s for r in requests] == [None, 3.0, 9.0]
    assert any("1 x message on an abandoned branch" in note and "system prompt" in note for note in result.notes)


def test_a_codex_rollout(tmp_path):
    def item(**payload):
        return {"timestamp": "2026-01-01T00:00:00Z", "type": "response_item", "payload": payload}

    text = [{"type": "input_text", "text": LONG}]
    result = read(
        tmp_path,
        {"type": "session_meta", "payload": {"id": "s", "instructions": "Be brief."}},
        item(type="message", role="user", content=text),
        {"type": "event_msg", "payload": {"type": "user_message"}},
        item(type="reasoning", summary=[], encrypted_content="gAAA"),
        item(type="function_call", name="sh", arguments="{}", call_id="c"),
        item(type="function_call_output", call_id="c", output=LONG),
        item(type="message", role="assistant", content=[{"type": "output_text", "text": "ok"}]),
    )
    call, head = COUNT('{"name": "sh", "arguments": {}}'), COUNT("Be brief.")
    assert sizes(result) == [(head + N + 10, call), (head + N + 10 + call + N + 8, 1)]
    assert result.skipped[0][0] == "1 x sealed reasoning" and not result.all_sessions[0].requests[1].human


@pytest.mark.parametrize("wrap", [lambda e: {"history": e}, lambda e: {"trajectory": e}, lambda e: e])
def test_openhands_events(tmp_path, wrap):
    events = [
        {"source": "user", "action": "message", "args": {"content": LONG}},
        {"source": "environment", "observation": "agent_state_changed", "content": ""},
        {"source": "agent", "action": "run", "args": {"command": "ls", "thought": ""}},
        {"source": "agent", "observation": "run", "content": LONG},
        {"source": "agent", "action": "finish", "args": {"thought": "ok"}},
    ]
    (first, output), (second, _) = sizes(read(tmp_path, wrap(events), name="t.json"))
    assert (first, second) == (N + 6, N + 6 + output + N + 8)


def test_one_message_a_line_and_tables_of_structs(tmp_path):
    assert sizes(read(tmp_path, U, A, U, A)) == [(N + 6, 1), (2 * N + 15, 1)]
    rows = [{**m, "conversation_id": name} for name in "ab" for m in (U, A)]
    assert sizes(read(tmp_path, *rows)) == [(N + 6, 1)] * 2
    pq.write_table(pa.table({"conversation": [[U, A], [U, A]], "id": [1, 2]}), tmp_path / "x.parquet")
    assert sizes(import_path(tmp_path / "x.parquet")) == [(N + 6, 1)] * 2


def mooncake(block, rows=30, tokens=2000, shared=160, **more):
    count = -(-tokens // block)
    return [
        {
            "timestamp": 1000 * k,
            "input_length": tokens,
            "output_length": 9,
            **more,
            "hash_ids": [*range(shared // block), *(10_000 * (k + 1) + j for j in range(count - shared // block))],
        }
        for k in range(rows)
    ]


@pytest.mark.parametrize("block", [16, 32, 64, 20, 512, 1024])
def test_blocks_of_any_size_are_known_by_the_lengths(tmp_path, block):
    result = read(tmp_path, *mooncake(block))
    assert result.sessions == 30
    assert {s.requests[0].kept_tokens for s in result.main_sessions} == {0, 160 // block * block} | {0}
    assert (block in (512,)) == (not any(f"blocks of {block} tokens" in note for note in result.notes))


def test_blocks_that_fit_no_length_are_refused_and_a_stated_size_is_taken(tmp_path):
    rows = [{**row, "input_length": 700 + 450 * k} for k, row in enumerate(mooncake(16))]
    with pytest.raises(InputError, match="fits blocks of no one size"):
        read(tmp_path, *rows)
    stated = read(tmp_path, *mooncake(16, block_size=16))
    assert {s.requests[0].kept_tokens for s in stated.main_sessions} == {0, 160} and not stated.notes
    assert (
        "more than the 3 tokens" in read(tmp_path, *mooncake(512), {**mooncake(16)[0], "input_length": 3}).skipped[0][1]
    )


def test_seconds_chats_and_text_in_traces_of_requests(tmp_path):
    rows = [
        {
            "chat_id": k,
            "parent_chat_id": k - 1,
            "timestamp": 1.5 * k,
            "input_length": 64 + 32 * k,
            "output_length": 9,
            "hash_ids": list(range(4 + 2 * k)),
        }
        for k in range(3)
    ]
    (session,) = read(tmp_path, *rows).all_sessions
    assert [r.gap_s for r in session.requests] == [None, 1.5, 1.5] and session.requests[2].own_tokens == 96
    text = read(tmp_path, {"timestamp": 0, "text_input": LONG, "output_length": 7})
    assert sizes(text) == [(N, 7)]
    short = read(tmp_path, {"timestamp": 0, "input_length": 100, "hash_ids": [1]})
    assert sizes(short) == [(100, 1)] and any("no 'output_length'" in note for note in short.notes)


def test_packed_files_are_known_by_their_bytes(tmp_path):
    data = (json.dumps({"messages": [U, A]}) + "\n").encode()
    zstd = pa.compress(data, codec="zstd", asbytes=True)
    for k, packed in enumerate(
        (
            gzip.compress(data),
            bz2.compress(data),
            lzma.compress(data),
            zstd,
            data.decode().encode("utf-16"),
            data.decode().encode("utf-16-le"),
            data + b"\0\0\0",
        )
    ):
        for name in (f"{k}.jsonl", f"{k}.jsonl.gz", f"{k}.json"):
            (tmp_path / name).write_bytes(packed)
            assert sizes(import_path(tmp_path / name)) == [(N + 6, 1)], (k, name)


def test_values_over_several_lines_and_a_cut_last_one(tmp_path):
    value = json.dumps({"messages": [U, A]}, indent=1)
    for name in ("a.json", "a.jsonl"):
        (tmp_path / name).write_text(f"{value}\n{value}\n")
        assert sizes(import_path(tmp_path / name)) == [(N + 6, 1)] * 2
    (tmp_path / "b.jsonl").write_text("[" + value.replace("\n", "") + "]\n" + '{"messages": [{"role": "us')
    cut = import_path(tmp_path / "b.jsonl")
    assert sizes(cut) == [(N + 6, 1)] and "b.jsonl line 2" in cut.skipped[0][0]
    whole = gzip.compress(
        b"".join(
            json.dumps({"messages": [{"role": "user", "content": str(k)}, A]}).encode() + b"\n" for k in range(20_000)
        )
    )
    (tmp_path / "c.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    half = import_path(tmp_path / "c.jsonl.gz")
    assert 0 < half.sessions < 20_000 and "and all after it" in half.skipped[-1][0]


def test_folders_as_people_keep_them(tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    (real / "a.jsonl").write_text(json.dumps({"messages": [U, A]}))
    (real / "._a.jsonl").write_bytes(b"\0\5\x16\7")
    (real / ".DS_Store").write_bytes(b"\0")
    (real / "README.md").write_text("a card")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    os.symlink(real, snapshot / "data")
    os.symlink(snapshot, real / "back")  # a circle
    result = import_path(snapshot)
    assert sizes(result) == [(N + 6, 1)] and not result.skipped
    assert result.notes == (
        "2 hidden files and folders were left out: .DS_Store, ._a.jsonl",
        "1 files of other kinds were left out: README.md",
    )
