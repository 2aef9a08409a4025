"""Scripts: pure, seeded, shares kept, limits kept, stationary start, identities."""

from __future__ import annotations

import copy
import hashlib

import numpy as np
import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.workload import build_script, load_personas
from spoc_lib.workload.arrivals import arrival_times
from spoc_lib.workload.playback import play
from spoc_lib.workload.script import SHARED_LAYERS
from spoc_lib.workload.template import overhead_tokens


def turns_of(script, number, count):
    return [item.turn for item in play(script, number + 1, count) if item.turn.user == number]


@pytest.mark.parametrize("personas", ["spoc", "tiny", "coding_agent"])
def test_same_seed_same_turns_any_order(personas):
    one, other = build_script(personas, 5), build_script(personas, 5)
    late = [turns_of(other, k, 6) for k in (7, 3)]
    assert turns_of(one, 3, 6) == late[1] and turns_of(one, 7, 6) == late[0]
    assert turns_of(build_script(personas, 6), 3, 6) != late[1]


def digest(turns):
    """Of all that a script says, as text: the same for any Python, numpy and processor."""
    lines = [repr((t.persona, t.user, t.conversation, t.turn, t.kind, t.starts, t.prompt_tokens, t.output_tokens,
                   float(t.think_time_s), [(s.stream, s.tokens, s.layer) for s in t.append],
                   [(s.stream, s.tokens, s.layer, reply) for s, reply in t.history])) for t in turns]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("personas", "known"), [
    ("spoc", "8a72897d94dd8aa5"), ("coding_agent", "4c3822a9911c1571"), ("tiny", "2d56b9677a79a7be"),
])
def test_a_seed_means_the_same_on_every_machine(personas, known):
    assert digest(item.turn for item in play(build_script(personas, 1), 20, 12)) == known


def test_arrivals_are_the_same_on_every_machine():
    times = [arrival_times(2.0, 60.0, 1, kind="gamma", cv=2.0).tolist(), arrival_times(2.0, 60.0, 1).tolist()]
    assert hashlib.sha256(repr(times).encode()).hexdigest()[:16] == "ec04355deaccc343"


def test_scripts_go_to_other_processes():
    """A copy is made as for another process: from the parameters alone."""
    script = build_script("spoc", 5, salt=2, gap_cap_s=30)
    turns_of(script, 3, 2)
    assert turns_of(copy.copy(script), 3, 6) == turns_of(script, 3, 6)


def test_salt_changes_identities_only():
    plain, salted = (turns_of(build_script("spoc", 5, salt=salt), 4, 12) for salt in (0, 1))
    streams = [{s.stream for t in turns for s in (*t.append, *(s for s, _ in t.history))} for turns in (plain, salted)]
    assert not streams[0] & streams[1]
    sizes = [[(t.prompt_tokens, t.output_tokens, t.think_time_s, t.kind, [s.tokens for s in t.append]) for t in turns]
             for turns in (plain, salted)]
    assert sizes[0] == sizes[1]


def test_mix_is_as_near_as_whole_users_can():
    personas = load_personas("spoc")
    script = build_script(personas, 1)
    counts = {p.name: 0 for p in personas.personas}
    for n, user in enumerate(script.users(400), 1):
        counts[user.persona] += 1
        assert all(abs(counts[p.name] - p.share * n) < 1 for p in personas.personas)


@pytest.mark.parametrize("start", ["stationary", "cold"])
@pytest.mark.parametrize(("personas", "limit"), [
    ("spoc", 131072), ("spoc", 40000), ("tiny", 4096), ("coding_agent", 32768)])
def test_prompts_are_consistent_and_within_limits(personas, limit, start):
    script = build_script(personas, 3, start=start, context_limit=limit)
    history, messages = {}, {}
    for item in play(script, 30, 40):
        turn = item.turn
        assert turn.output_tokens >= 1 and all(s.tokens >= 1 for s in turn.append)
        assert turn.prompt_tokens + turn.output_tokens <= limit
        assert 0 <= turn.think_time_s <= 60
        shared = sum(s.layer in SHARED_LAYERS for s in [*turn.append, *(s for s, _ in turn.history)])
        if turn.starts:
            history[turn.user] = sum(s.tokens + reply for s, reply in turn.history)
            messages[turn.user] = (shared > 0) + 1 + 2 * sum(reply > 0 for _, reply in turn.history)
        else:
            messages[turn.user] += 2
        history[turn.user] += sum(s.tokens for s in turn.append)
        assert turn.prompt_tokens == history[turn.user] + overhead_tokens(messages[turn.user])
        history[turn.user] += turn.output_tokens


def test_replies_as_they_really_came_count():
    user = build_script("spoc", 2, start="cold").user(0)
    first = user.next(0)
    held = sum(s.tokens for s in first.append)
    short, long = (build_script("spoc", 2, start="cold").user(0) for _ in range(2))
    short.next(0)
    long.next(0)
    assert long.next(held + 500).prompt_tokens - short.next(held + 100).prompt_tokens == 400


def test_context_limit_ends_or_compacts_and_is_counted():
    script = build_script("spoc", 1, start="cold")
    by_persona = {}
    for user in script.users(10):
        by_persona.setdefault(user.persona, user)
    for persona, user in by_persona.items():
        first = user.next(0)
        turn = user.next(script.limit(load_personas("spoc").persona(persona)))
        assert turn.starts and user.context_limit_hits == 1
        compacts = persona == "P2"
        assert user.compactions == compacts
        assert (turn.conversation == first.conversation) == compacts
        assert turn.append[0].layer == "organisation"


def test_stationary_start_has_real_history_and_the_rest_of_a_gap():
    script = build_script("spoc", 4)
    first = [user.next(0) for user in script.users(200)]
    assert sum(bool(turn.history) for turn in first) > 150
    assert all(turn.starts for turn in first)
    left = np.array([turn.think_time_s for turn in first])
    assert left.min() >= 0 and left.max() <= 60
    assert 20 < left.mean() < 32  # gaps by their length, uniformly cut: about half of a capped gap
    sizes = [turn.prompt_tokens for turn in first if turn.persona == "P0"]
    assert np.median(sizes) > 15_000  # cold starts have about 7.5k


def test_users_share_the_root_first_and_private_text_never():
    script = build_script("spoc", 1)
    firsts = [user.next(0) for user in script.users(60)]
    openings = [[s for s, _ in t.history] + list(t.append) for t in firsts]
    assert len({o[0].stream for o in openings}) == 1
    private = [s.stream for o in openings for s in o if s.layer in ("session", "turn")]
    assert len(private) == len(set(private))
    depths = {sum(s.layer in SHARED_LAYERS for s in o) for o in openings}
    assert depths == {1, 2, 3, 4}


def test_block_alignment_on_purpose():
    geometry = load_personas("spoc").geometry.model_dump() | {"align_tokens": 16}
    for turn in (user.next(0) for user in build_script("spoc", 1, start="cold", geometry=geometry).users(40)):
        shared = 3
        for segment in turn.append:
            if segment.layer in SHARED_LAYERS:
                shared += segment.tokens
                assert shared % 16 == 0


def test_scale_shrinks_sizes_only():
    whole, tenth = (build_script("spoc", 1, start="cold", scale=scale) for scale in (1.0, 0.1))
    for a, b in zip(whole.users(20), tenth.users(20), strict=True):
        one, small = a.next(0), b.next(0)
        assert small.prompt_tokens == pytest.approx(one.prompt_tokens / 10, rel=0.02)
        assert small.think_time_s == one.think_time_s


def test_gap_cap_cuts_off_and_nothing_else():
    loose, tight = (build_script("spoc", 1, start="cold", gap_cap_s=cap) for cap in (600, 30))
    for a, b in zip(play(loose, 10, 20), play(tight, 10, 20), strict=True):
        assert b.turn.think_time_s == min(30, a.turn.think_time_s)
        assert a.turn.append == b.turn.append


@pytest.mark.parametrize(("fields", "said"), [
    ({"context_limit": 20}, "at least"), ({"gap_cap_s": 0}, "gap_cap_s"), ({"start": "warm"}, "start"),
    ({"scale": -1}, "scale"), ({"geometry": {"organisation_tokens": 5}}, "geometry: field 'repositories'"),
])
def test_bad_parameters(fields, said):
    with pytest.raises(InputError) as error:
        build_script("spoc", 1, **fields)
    assert said in error.value.message
