"""Foreign traces: what is read, what is skipped and why, and that sessions play as they were recorded."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.workload import build_script, load_personas, template
from spoc_lib.workload.audit import audit
from spoc_lib.workload.audit.sharing import measure
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.messages import Conversation
from spoc_lib.workload.playback import play
from spoc_lib.workload.tokenizer import offline_tokenizer
from spoc_lib.workload.traces.importers import import_path, import_paths
from spoc_lib.workload.traces.sessions import shared_blocks


def kv_request(t, tokens, ids, out=50, **more):
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_ids": ids, "input_types": ["tool_result"],
            "api_time": 2.0, "think_time": 5.0, **more}


def kv_session(requests, name="s", **more):
    return {"id": name, "block_size": 64, "hash_id_scope": "local", "tool_tokens": 64, "system_tokens": 64,
            "requests": requests, **more}


def write(path, value):
    path.write_text(json.dumps(value) if not isinstance(value, str) else value)
    return path


def test_own_history_reuse_by_hand(tmp_path):
    session = kv_session([
        kv_request(0, 640, list(range(10))),
        kv_request(10, 1280, [*range(10), *range(100, 110)]),          # keeps all 640
        kv_request(20, 960, [*range(5), *range(200, 210)]),            # rewrites: keeps 320
        kv_request(30, 1280, [*range(10), *range(100, 110)]),          # back to the second prompt: keeps all of it
    ])
    result = import_path(write(tmp_path / "s.json", session))
    assert (result.sessions, result.turns, result.tokens) == (1, 4, 640 + 1280 + 960 + 1280)
    assert result.own_history_reuse == pytest.approx((640 + 320 + 1280) / (1280 + 960 + 1280))
    assert [request.gap_s for request in result.all_sessions[0].requests] == [5.0] * 4


def test_shared_blocks_is_the_common_prefix():
    rng = np.random.default_rng(0)
    for _ in range(300):
        one, other = (rng.integers(0, 3, rng.integers(0, 9)).tolist() for _ in range(2))
        differ = [k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        assert shared_blocks(one, other) == (differ or [min(len(one), len(other))])[0]


@pytest.mark.parametrize(("break_it", "said"), [
    ({"t": -3.0}, "'t' is -3"), ({"think_time": -1}, "'think_time' is -1"), ({"in": "many"}, "'in' is not a number"),
    ({"hash_ids": []}, "'hash_ids' is missing"), ({"in": None}, "'in' is missing"), ({"hash_ids": [1, "x"]}, "whole"),
])
def test_a_broken_request_is_skipped_with_its_reason(tmp_path, break_it, said):
    session = kv_session([kv_request(0, 640, list(range(10))), {**kv_request(5, 700, list(range(11))), **break_it},
                          kv_request(9, 704, list(range(11)))])
    result = import_path(write(tmp_path / "s.json", session))
    assert result.turns == 2 and len(result.skipped) == 1
    assert result.skipped[0][0] == "s request 1" and said in result.skipped[0][1]


def test_nothing_but_negative_times_is_refused(tmp_path):
    path = write(tmp_path / "s.json", kv_session([kv_request(-5, 640, list(range(10)))]))
    with pytest.raises(InputError) as error:
        import_path(path)
    assert "'t' is -5" in error.value.message and "negative" in error.value.message


def test_broken_files_in_a_folder_do_not_end_the_import(tmp_path):
    write(tmp_path / "good.json", kv_session([kv_request(0, 64, [1]), kv_request(1, 128, [1, 2])]))
    write(tmp_path / "half.json", '{"id": "x", "requests": [')
    write(tmp_path / "other.json", {"weather": "fine"})
    write(tmp_path / "lines.jsonl", '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": '
                                    '"b"}]}\nnot json\n{"messages": [{"role": "sheep", "content": "a"}]}\n')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "notes.txt").write_text("not a trace")
    result = import_path(tmp_path)
    assert result.sessions == 2
    reasons = dict(result.skipped)
    assert "not valid JSON" in reasons["half.json"] and "unknown" in reasons["other.json"]
    assert "not valid JSON" in reasons["lines.jsonl line 2"] and "sheep" in reasons["lines.jsonl line 3"]
    assert "Parquet" in reasons["bad.parquet"]


@pytest.mark.parametrize(("name", "content", "said"), [
    ("x.json", '{"weather": 1}', "unknown"), ("x.json", "{", "not valid JSON"), ("x.jsonl", '{"a": 1}\n', "no line"),
    ("x.parquet", "hello", "Parquet"), ("x.csv", "a,b", "not valid JSON"), ("x.traj", "[]", "unknown"),
])
def test_an_unreadable_file_is_one_sentence(tmp_path, name, content, said):
    with pytest.raises(InputError) as error:
        import_path(write(tmp_path / name, content))
    assert said in error.value.message and name in error.value.message and "known are" in error.value.message


def test_absent_path_and_empty_folder(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InputError):
            import_path(path)


@pytest.mark.parametrize("name", ["hub:someone/something", "someone/something", "hub:someone/something:test"])
def test_hub_while_offline(monkeypatch, name):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InputError) as error:
        import_path(name)
    assert "someone/something" in error.value.message and "not reachable" in error.value.message


def test_hub_while_offline_by_choice(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set"):
        import_path("someone/something")


def test_a_hub_behind_a_proxy_is_sought_at_the_proxy(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    with pytest.raises(InputError, match="127.0.0.1 is not reachable"):
        import_path("someone/something")


MESSAGES = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "It fails."},
            {"role": "assistant", "content": "Look.", "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}]},
            {"role": "tool", "content": "a.py"}, {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}]


@pytest.mark.parametrize("form", ["list", "lists", "object", "jsonl", "json text", "sharegpt", "parquet"])
def test_message_lists_in_all_their_wrappings(tmp_path, form):
    path = tmp_path / ("x.parquet" if form == "parquet" else "x.jsonl" if form in ("jsonl", "json text") else "x.json")
    plain = [{**m, "content": m["content"] if isinstance(m["content"], str) else "Done."} for m in MESSAGES]
    for message in plain:
        message.pop("tool_calls", None)
    if form == "parquet":
        pd.DataFrame({"messages": [plain]}).to_parquet(path)
    else:
        share = {"conversations": [{"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]),
                                    "value": m["content"]} for m in plain]}
        write(path, {"list": MESSAGES, "lists": [MESSAGES, MESSAGES], "object": {"messages": MESSAGES},
                     "jsonl": json.dumps({"messages": MESSAGES}) + "\n", "sharegpt": [share],
                     "json text": json.dumps({"trajectory": json.dumps(MESSAGES)}) + "\n"}[form])
    result = import_path(path)
    assert result.sessions == (2 if form == "lists" else 1)
    first, second = result.all_sessions[0].requests
    count = offline_tokenizer().count
    assert first.prompt_tokens == count("You fix code.") + count("It fails.") + 2 * 4 + 2
    assert second.prompt_tokens == first.prompt_tokens + first.output_tokens + 4 + count("a.py") + 4
    assert first.human and not second.human
    # played, the prompts have the recorded lengths
    turns = [item.turn for item in play(result.script(), 1, 2)]
    assert [turn.prompt_tokens for turn in turns] == [first.prompt_tokens, second.prompt_tokens]


def test_swe_agent_trajectory(tmp_path):
    history = [{"role": "system", "content": "Sys", "agent": "main"},
               {"role": "user", "content": "A demonstration", "is_demo": True, "agent": "main"},
               {"role": "user", "content": "The issue", "agent": "main"},
               {"role": "assistant", "content": "ls", "agent": "main"}, {"role": "user", "content": "a.py"},
               {"role": "assistant", "content": "edit", "agent": "main"}]
    steps = [{"action": "ls", "observation": "a.py", "response": "ls", "execution_time": 0.25},
             {"action": "edit", "observation": "", "response": "edit", "execution_time": 0.5}]
    whole = import_path(write(tmp_path / "a.traj", {"history": history, "trajectory": steps}))
    assert whole.turns == 2 and whole.to_dict()["formats"] == {"swe-agent": 1}
    assert whole.all_sessions[0].requests[1].gap_s == 0.25
    assert [r.human for r in whole.all_sessions[0].requests] == [True, False]


def test_recorded_text_is_what_is_sent(tmp_path):
    result = import_path(write(tmp_path / "x.json", MESSAGES))
    script = result.script()
    corpus = script.texts(Corpus.from_directory(max_bytes=1 << 20))
    conversation, user = Conversation(corpus), script.user(0)
    messages = conversation.apply(user.next(0))
    assert messages == [{"role": "system", "content": "You fix code."}, {"role": "user", "content": "It fails."}]
    conversation.add_reply("Looked.")
    turn = user.next(conversation.history_tokens)
    messages = conversation.apply(turn)
    assert messages[2:] == [{"role": "assistant", "content": "Looked."}, {"role": "user", "content": "a.py"}]
    assert len(template.encode(messages, offline_tokenizer().encode)) == turn.prompt_tokens


def test_traces_wherever_personas_are_named(tmp_path):
    path = write(tmp_path / "x.json", MESSAGES)
    turn = build_script(f"traces:{path}", 1, context_limit=4096).user(0).next(0)
    recorded = import_path(path).all_sessions[0].requests[0]
    assert turn.persona == "imported" and turn.prompt_tokens == recorded.prompt_tokens


def test_mooncake_sessions_are_chains(tmp_path):
    rows = [{"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [0, 1]},
            {"timestamp": 100, "input_length": 1000, "output_length": 9, "hash_ids": [0, 5]},     # only the common root
            {"timestamp": 4000, "input_length": 2000, "output_length": 9, "hash_ids": [0, 1, 2, 3]},
            {"timestamp": 5000, "input_length": -1, "output_length": 9, "hash_ids": [0]}]
    result = import_path(write(tmp_path / "m.jsonl", "\n".join(map(json.dumps, rows))))
    assert (result.sessions, result.turns, len(result.skipped)) == (2, 3, 1)
    assert result.own_history_reuse == pytest.approx(1024 / 2000)
    shared = measure(play(result.script(), 2, 1), block_tokens=1)
    assert 500 <= shared.hit_tokens <= 520  # the common root block, found again when played


def test_subagents_are_counted_apart(tmp_path):
    nested = {"type": "subagent", "agent_id": "agent_007", "t": 3.0,
              "requests": [kv_request(3, 64, [50]), kv_request(4, 128, [50, 51])]}
    session = kv_session([kv_request(0, 64, [1]), nested, kv_request(9, 128, [1, 2])])
    result = import_path(write(tmp_path / "s.json", session)).to_dict()
    assert (result["sessions"], result["turns"]) == (1, 2)
    assert (result["subagent_sessions"], result["subagent_turns"]) == (1, 2)


def test_played_sessions_keep_lengths_and_sharing(shared):
    """Ten real sessions, played with the server's replies in the history, against what their hashes say."""
    folder = shared("data/traces/claude_code_sessions")
    result = import_paths(sorted(folder.glob("trace_*.json")))
    assert (result.sessions, result.turns, result.tokens) == (10, 256, 20_762_163)
    script = result.script(gap_cap_s=120)
    played = []
    for number in range(10):
        count = len(result.all_sessions[script.main[number]].requests)
        played += [item for item in play(script, number + 1, count) if item.turn.user == number]
    errors = []
    for item in played:
        recorded = result.all_sessions[script.main[item.turn.user]].requests[item.turn.turn]
        errors.append(abs(item.turn.prompt_tokens / recorded.prompt_tokens - 1))
        assert item.turn.output_tokens == recorded.output_tokens
        assert item.turn.turn == 0 or item.turn.think_time_s == min(120, recorded.gap_s)
    assert np.mean(errors) < 0.002 and np.max(errors) < 0.05
    prompts = {item.turn.user: 0 for item in played}
    first = sum(item.turn.prompt_tokens for item in played if item.turn.turn == 0)
    for item in played:
        prompts[item.turn.user] += item.turn.prompt_tokens
    later = sum(prompts.values()) - first
    own = measure(played).layers.set_index("layer").reused_tokens
    # replies stay reusable when played, so reuse is a little above what prompts alone could share
    assert result.own_history_reuse <= own.sum() / later + 0.005
    assert own.sum() / later < result.own_history_reuse + 0.03


def test_broken_rows_of_a_table_are_skipped(tmp_path):
    frame = pd.DataFrame({"cid": ["a", "a", "a", None, "b"], "agent": ["main"] * 4 + [None], "k": [0, 1, 2, 0, 0],
                          "t": [0.0, 5.0, -1.0, 0.0, 0.0], "inp": [640, 704, 768, 640, 640], "out": [5.0] * 5,
                          "lcp": [0, 10, 11, 0, 0], "think": [0.0, 2.0, 2.0, 0.0, float("nan")]})
    frame.to_parquet(tmp_path / "requests.parquet")
    result = import_path(tmp_path / "requests.parquet")
    assert (result.sessions, result.turns) == (2, 3)
    assert {"'cid' is missing", "'t' is -1, below 0: a negative time or length cannot be played"} == {
        reason for _, reason in result.skipped}
    assert result.own_history_reuse == pytest.approx(640 / 704)


def test_recorded_users_are_found_in_mid_session(shared):
    folder = shared("data/traces/claude_code_sessions")
    result = import_paths(sorted(folder.glob("trace_*.json")))
    script = result.script(5, start="stationary", context_limit=131_072)
    firsts = [user.next(0) for user in script.users(60)]
    assert sum(bool(turn.history) for turn in firsts) > 40
    assert max(turn.think_time_s for turn in firsts) <= 60
    for turn in firsts:
        held = sum(s.tokens + reply for s, reply in turn.history) + sum(s.tokens for s in turn.append)
        replies = sum(reply > 0 for _, reply in turn.history)
        assert turn.prompt_tokens == held + template.overhead_tokens(2 + 2 * replies)
        assert turn.prompt_tokens + turn.output_tokens <= 131_072
    openings = [s for t in firsts for s in (*(s for s, _ in t.history), *t.append)]
    private = [s.stream for s in openings if s.layer in ("session", "turn")]
    assert len(private) == len(set(private))
    sizes = {r.prompt_tokens for s in result.main_sessions for r in s.requests}
    near = [min(abs(t.prompt_tokens / size - 1) for size in sizes) for t in firsts]
    assert np.mean(near) < 0.002


@pytest.fixture(scope="module")
def every_session(shared):
    """All 710 sessions: ten from their own files, the others from the table of requests."""
    return load_personas(f"traces:{shared('data/traces/claude_code_sessions')}")


def test_recorded_set_passes_its_own_audit(every_session):
    loaded = every_session
    result = audit(build_script(loaded, 1, context_limit=131_072), loaded, None, 100, 15)
    assert result.passed, [gate for gate in result.gates if not gate.passed]


def test_reuse_of_the_710_sessions(every_session):
    """The source's own figure: 97.4 % of the tokens of all prompts but the first."""
    result = every_session.recorded
    assert (result.sessions, result.turns) == (710, 48_658)
    assert result.own_history_reuse == pytest.approx(0.974, abs=0.005)
    assert result.all_sessions[0].root_tokens  # from the table of sessions
    assert all("own file" in reason for _, reason in result.skipped)


def test_real_trajectories_and_mooncake(shared):
    swe = import_path(shared("data/traces/swe_agent")).to_dict()
    assert (swe["sessions"], swe["turns"], swe["skipped"]) == (10, 97, [])
    mooncake = import_path(shared("data/traces/mooncake")).to_dict()
    assert mooncake["turns"] == 4000 and not mooncake["skipped"]
