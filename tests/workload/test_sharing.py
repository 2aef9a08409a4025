"""Sharing: against a block-by-block LRU cache played by hand, and invariants of the audit."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from spoc_lib.workload import build_script, load_personas
from spoc_lib.workload.audit import audit
from spoc_lib.workload.audit.sharing import common_prefix_tokens, layout, measure
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.playback import Played, play, sessions_table
from spoc_lib.workload.script import Segment, Turn


def turn(user, append, *, starts=True, number=0, output=16, think=1.0):
    tokens = sum(s.tokens for s in append)
    return Turn("P", user, 0, number, "start", starts, tuple(append), tokens + 10, output, think)


def slow_lru(played, size):
    """Hit tokens of a cache of `size` tokens that holds single tokens, each known by all that stands before it.

    A request is judged before it is entered, and entered back to front, as a prefix cache frees its blocks.
    """
    cache: OrderedDict = OrderedDict()
    contexts, hits = {}, 0
    for item in sorted(played, key=lambda p: (p.time_s, p.turn.user, p.turn.turn)):
        runs, contexts[item.turn.user] = layout(contexts.get(item.turn.user), item.turn)
        chain, keys = 0, []
        for stream, tokens in runs:
            for k in range(tokens):
                chain = hash((chain, stream, k))
                keys.append(chain)
        for key in keys:
            if key not in cache:
                break
            hits += 1
        for key in reversed(keys):
            cache.pop(key, None)
            cache[key] = None
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


def test_lru_curve_equals_a_cache_played_token_by_token():
    played = list(play(build_script("tiny", 3), 6, 8))
    sharing = measure(played, sizes=12)
    for row in sharing.lru.itertuples():
        assert row.hit_ratio * sharing.prompt_tokens == pytest.approx(slow_lru(played, row.cache_tokens), abs=1)


def test_cut_streams_are_shared_up_to_the_cut():
    root, more = 111, 222
    played = [
        Played(0.0, turn(0, [Segment(root, 100, "organisation"), Segment(1, 50, "session")])),
        Played(1.0, turn(1, [Segment(root, 60, "organisation"), Segment(2, 50, "session")])),
        Played(2.0, turn(2, [Segment(root, 100, "organisation"), Segment(more, 30, "repository"),
                             Segment(3, 50, "session")])),
    ]
    sharing = measure(played, block_tokens=1)
    assert sharing.hit_tokens == (60 + 4) + (100 + 4)
    layers = sharing.layers.set_index("layer")
    assert layers.loc["organisation", "reused_tokens"] == 168
    assert layers.loc["repository", "reused_tokens"] == 0
    assert common_prefix_tokens(played[0].turn, played[1].turn) == 60
    assert common_prefix_tokens(played[0].turn, played[2].turn) == 100


def test_own_history_is_reused_with_its_reply():
    played = [Played(0.0, turn(0, [Segment(1, 100, "session")], output=30)),
              Played(9.0, turn(0, [Segment(2, 20, "turn")], starts=False, number=1))]
    assert measure(played, block_tokens=1).hit_tokens == 104
    more = [*played, Played(20.0, turn(0, [Segment(3, 20, "turn")], starts=False, number=2))]
    assert measure(more, block_tokens=1).hit_tokens == 104 + (104 + 34 + 24)


@pytest.mark.parametrize("start", ["cold", "stationary"])
def test_runs_account_for_every_token(start):
    played = list(play(build_script("spoc", 2, start=start), 20, 12))
    sharing = measure(played)
    assert sharing.layers.prompt_tokens.sum() + 2 * sharing.requests == sharing.prompt_tokens
    assert (sharing.layers.reused_tokens + sharing.layers.first_seen_tokens == sharing.layers.prompt_tokens).all()
    assert (np.diff(sharing.lru.hit_ratio) >= 0).all()
    assert sharing.lru.hit_ratio.iloc[-1] >= sharing.hit_ratio  # whole blocks only in the latter


@pytest.mark.parametrize("personas", ["spoc", "tiny"])
def test_audit_of_what_ships_passes(personas):
    loaded = load_personas(personas)
    result = audit(build_script(loaded, 1), loaded, Corpus.from_directory(max_bytes=1 << 20), 120, 20, sample_users=2)
    assert result.passed, [gate for gate in result.gates if not gate.passed]
    names = {gate.name for gate in result.gates}
    assert {"mix of personas", "context limit", "common ground first", "exact sizes"} <= names
    assert list(result.gap_caps.gap_cap_s) == [30, 60, 120, 600]
    assert result.gap_caps.in_flight_ratio.is_monotonic_decreasing
    assert 0.5 < result.ideal_hit_ratio < 1
    assert set(result.to_dict()) >= {"gates", "mix", "quantities", "sharing", "gap_caps", "passed"}


def test_audit_notices_another_workload():
    """The gates are no formality: sizes drawn from other personas must not pass."""
    intended = load_personas("spoc")
    doubled = intended.model_dump()
    for persona in doubled["personas"]:
        persona["output_tokens"]["median"] *= 2
    script = build_script(type(intended).model_validate(doubled), 1)
    failed = [gate.name for gate in audit(script, intended, None, 100, 20).gates if not gate.passed]
    assert any("output" in name for name in failed)


def test_sessions_table_has_the_schema(tmp_path):
    from spoc_lib.core.schemas import SESSIONS
    from spoc_lib.core.tables import read_table, write_table

    table = sessions_table(build_script("spoc", 1), 5, 4)
    assert len(table) == 20
    back = read_table(write_table(tmp_path / "sessions.parquet", table, SESSIONS), SESSIONS)
    assert list(back.prompt_tokens) == list(table.prompt_tokens)
