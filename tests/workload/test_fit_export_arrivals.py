"""Fits, peers' formats, open arrivals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import parse
from spoc_lib.workload import build_script, load_personas
from spoc_lib.workload import export as exports
from spoc_lib.workload.arrivals import arrival_times, open_script
from spoc_lib.workload.audit import audit
from spoc_lib.workload.audit.sharing import measure
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.fitting.fit import CHECKED, fit, realised_quantities
from spoc_lib.workload.fitting.output import draw, to_yaml
from spoc_lib.workload.model import plan as plans
from spoc_lib.workload.personas import PersonaSet
from spoc_lib.workload.playback import play
from spoc_lib.workload.template import MESSAGE_TOKENS
from spoc_lib.workload.traces.importers import import_path

#: callanjfox/kv-cache-tester, 710 sessions: p25, p50, p75, p90 as its own tables give them.
MEASURED = {
    "requests a session": (18, 45, 94, 155), "first prompt, tokens": (18_600, 24_500, 104_000, 259_000),
    "last prompt, tokens": (93_000, 134_000, 184_000, 335_000),
    "growth a step, tokens": (324, 646, 1534, 3510), "output, tokens": (137, 216, 429, 899),
    "gap after a tool, s": (5, 9, 19, 74), "gap before a human turn, s": (40, 127, 409, 1540),
}


@pytest.mark.parametrize("seed", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_coding_agent_keeps_the_measured_quantiles(seed):
    """Every row of the table, by whole conversations of 6000 users, no cap on gaps or context."""
    realised = realised_quantities(load_personas("coding_agent"), 6000, seed)
    for quantity, measured in MEASURED.items():
        for q, value in zip(CHECKED, measured, strict=True):
            assert np.percentile(realised[quantity], q) == pytest.approx(value, rel=0.05, abs=0.5), (quantity, q)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Sessions exported from known personas, read back."""
    path = tmp_path_factory.mktemp("recorded") / "tiny.jsonl"
    script = build_script("tiny", 3, start="cold", gap_cap_s=600)
    path.write_bytes(b"".join(exports.lines(exports.mooncake(script, 150, 5, block_tokens=16))))
    return import_path(path)


@pytest.mark.slow
def test_fit_recovers_what_it_is_given(recorded):
    result = fit(recorded, groups=2, check_users=600)
    table = result.table.set_index("quantity")
    assert table.loc["output, tokens", "worst_error"] < 0.1
    assert table.loc["first prompt, tokens", "worst_error"] < 0.1
    again = parse(PersonaSet, yaml.safe_load(to_yaml(result)), "the written file")
    assert again == result.personas
    families = result.families[result.families.quantity == "output, tokens"].set_index("family")
    assert families.distance.idxmin() == "lognormal"  # tiny's outputs are log-normal
    assert "measured" in draw(result) and "cdn" not in draw(result).split("<body>")[0].lower()


@pytest.mark.slow
def test_audit_of_conversations_that_are_scaled_to_their_end():
    loaded = load_personas("coding_agent")
    result = audit(build_script(loaded, 2, gap_cap_s=60), loaded, None, 150, 10)
    assert result.passed, [gate for gate in result.gates if not gate.passed]
    growth = [gate.sentence for gate in result.gates if "growth" in gate.name and "too few" not in gate.sentence]
    assert growth and all("scaled to where each conversation ends" in sentence for sentence in growth)


def test_planned_conversations_come_to_their_end():
    persona = load_personas("coding_agent").personas[1]
    assert persona.at_context_limit == "end"
    ends, turns = [], []
    for conversation in range(800):
        plan = plans.draw(persona, 5, 0, conversation, limit=persona.context_limit_tokens, gap_cap_s=60)
        last = plans.walk(plan, persona.context_limit_tokens)[-1]
        ends.append(last.base_tokens + sum(plan.append_tokens[k] + plan.output_tokens[k - 1] + 2 * MESSAGE_TOKENS
                                           for k in range(last.base + 1, last.turn + 1)))
        turns.append(plan.turns)
    assert np.median(ends) == pytest.approx(persona.end_prompt_tokens.quantile(50), rel=0.08)
    correlation = np.corrcoef(np.argsort(np.argsort(ends)), np.argsort(np.argsort(turns)))[0, 1]
    assert correlation == pytest.approx(persona.end_follows_turns, abs=0.15)


def test_fit_needs_sessions(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    with pytest.raises(InputError, match="10"):
        fit(import_path(path))


def test_mooncake_round_trip(tmp_path):
    script = build_script("tiny", 5, start="cold")
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"".join(exports.lines(exports.mooncake(script, 12, 8))))
    result = import_path(path)
    assert not result.skipped
    by_session = {}
    for item in play(script, 12, 8):
        by_session.setdefault(f"{item.turn.user}-{item.turn.conversation}", []).append(item.turn)
    assert result.sessions == len(by_session)
    for session in result.all_sessions:
        turns = by_session[session.name]
        assert [(r.prompt_tokens, r.output_tokens) for r in session.requests] == [
            (t.prompt_tokens, t.output_tokens) for t in turns]
        assert [r.gap_s for r in session.requests[1:]] == pytest.approx([t.think_time_s for t in turns[1:]], abs=1e-3)


def test_mooncake_hashes_are_the_sharing():
    """An infinite cache of whole blocks hits as often on the exported hashes as on the script."""
    script = build_script("tiny", 5)
    played = list(play(script, 12, 8))
    seen, hits = set(), 0
    for line in exports.mooncake(script, 12, 8, block_tokens=16):
        assert len(line["hash_ids"]) == -(-line["input_length"] // 16)
        whole = line["hash_ids"][: line["input_length"] // 16]
        for block in whole:
            if block not in seen:
                break
            hits += 16
        seen.update(line["hash_ids"])
    assert hits == pytest.approx(measure(played, 16).hit_tokens, rel=0.02)


@pytest.mark.parametrize("form", ["openai", "sharegpt"])
def test_message_round_trip(tmp_path, form):
    script, corpus = build_script("tiny", 5, start="cold"), Corpus.from_directory(max_bytes=1 << 20)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(exports.lines(exports.FORMATS[form](script, 8, 6, corpus))))
    result = import_path(path)
    turns = [item.turn for item in play(script, 8, 6)]
    assert [r.prompt_tokens for s in result.all_sessions for r in s.requests] == [t.prompt_tokens for t in turns]
    assert [r.output_tokens for s in result.all_sessions for r in s.requests] == [t.output_tokens for t in turns]


def test_aiperf_and_guidellm_lines():
    script, corpus = build_script("tiny", 5, start="cold"), Corpus.from_directory(max_bytes=1 << 20)
    turns = [item.turn for item in play(script, 4, 5)]
    lines = list(exports.aiperf(script, 4, 5, corpus))
    said = [turn for line in lines for turn in line["turns"] if turn.get("role") != "system"]
    assert [turn["output_length"] for turn in said] == [t.output_tokens for t in turns]
    assert all(("timestamp" in turn) != ("delay" in turn) for turn in said)
    assert all(line["turns"][0]["role"] == "system" and "timestamp" in line["turns"][1] for line in lines)
    count = corpus.tokenizer.count
    own = [sum(s.tokens for s in t.append if s.layer in ("session", "turn")) for t in turns]
    assert [count(turn["text"]) for turn in said] == own
    records = list(exports.guidellm(script, 4, 5, corpus))
    budgets = [value for record in records for key, value in record.items() if key.startswith("output_tokens_count_")]
    assert budgets == [t.output_tokens for t in turns]
    assert all(record["prefix"].startswith("#") and "prompt_0" in record for record in records)


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("gamma", 0.3)])
def test_arrivals_have_their_rate_and_burstiness(kind, cv):
    times = arrival_times(5.0, 4000, 3, kind=kind, cv=cv)
    assert len(times) / 4000 == pytest.approx(5, rel=0.05 * max(1, cv))
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert (times == arrival_times(5.0, 4000, 3, kind=kind, cv=cv)).all()


def test_open_script_plays_each_conversation_once():
    script = open_script(build_script("tiny", 1), 2.0, 10.0)
    for number, at in enumerate(script.times_s):
        user = script.user(number)
        first = user.next(0)
        assert first.think_time_s == at and first.kind == "start"
        history, turn = 0, first
        for _ in range(200):
            history = (0 if turn.starts else history) + sum(s.tokens for s in turn.append) + turn.output_tokens
            turn = user.next(history)
            if turn.conversation != first.conversation:
                break
        assert turn.think_time_s >= 1e9
    assert script.user(len(script.times_s)).next(0).think_time_s >= 1e9


def test_open_arrivals_reach_the_exported_timestamps():
    script = open_script(build_script("tiny", 1), 3.0, 60.0)
    lines = list(exports.mooncake(script, len(script.times_s), 50))
    firsts = {}
    for line in lines:
        firsts.setdefault(line["conversation_id"], line["timestamp"])
    assert sorted(firsts.values()) == [round(1000 * at) for at in script.times_s]
    assert max(line["timestamp"] for line in lines) < 10**7  # nobody is never due


def test_replay_by_timestamp(tmp_path):
    rows = [{"timestamp": 1000 * k, "input_length": 600, "output_length": 5, "hash_ids": [2 * k, 2 * k + 1]}
            for k in range(4)]
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    script = import_path(path).script(timing="timestamps")
    assert [script.user(k).next(0).think_time_s for k in range(4)] == [0, 1, 2, 3]
    assert script.user(4).next(0).think_time_s >= 1e9


@pytest.mark.parametrize("fields", [{"rate_per_s": 0}, {"rate_per_s": 1e9}, {"kind": "bursty"},
                                    {"cv": 0, "kind": "gamma"}])
def test_bad_arrivals(fields):
    with pytest.raises(InputError):
        open_script(build_script("tiny", 1), **{"rate_per_s": 1.0, "duration_s": 5.0, **fields})
