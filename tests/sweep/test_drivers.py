"""Rungs that are too short say what they need, and are played again where that is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spoc_lib.config import load_cluster
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.sweep.drivers import twin_rung
from spoc_lib.sweep.record import Timing, long_enough, needed
from spoc_lib.workload import build_script

USERS = 12


@pytest.fixture(scope="module")
def engine():
    return EmbeddedEngine.from_cluster(load_cluster("sim-2xh200"), {"max_num_seqs": 2})


def play(engine, timing: Timing, salt: int = 0, gap_cap_s: float = 2.0):
    script = build_script("tiny", 5 + salt, salt=salt, gap_cap_s=gap_cap_s, context_limit=4096)
    record = twin_rung(engine, script, USERS, timing, 0)
    return replace(record, needs=needed(record.requests, USERS, timing, 0.0))


def test_a_rung_that_outlasts_its_cold_start_and_a_turn_needs_nothing(engine):
    assert play(engine, Timing(60.0, 20.0)).needs is None


def test_a_cold_start_longer_than_the_warm_up_is_said_with_the_time_needed(engine):
    found = play(engine, Timing(30.0, 0.5)).needs
    assert found.timing.warmup_s > 0.5 and f"a rung of {found.timing.duration_s:.0f} s is needed" in found.sentence
    assert "a cold cache's" in found.sentence and "'http_longest_s'" in found.sentence
    unseen = play(engine, Timing(0.4, 0.1)).needs
    assert "longer than the rung" in unseen.sentence and unseen.timing.duration_s > 0.6


def test_a_window_shorter_than_a_turn_is_said(engine):
    requests = play(engine, Timing(60.0, 20.0)).requests
    found = needed(requests, 400, Timing(20.5, 20.0), 0.0)
    assert found is not None
    own = needed(requests, USERS, Timing(20.1, 20.0), 0.0)
    assert own is not None and "a user's turn (answer and think time) takes" in own.sentence


@pytest.mark.parametrize("longest_s, attempts", [(None, 1), (5.0, 1), (300.0, 2)])
def test_a_rung_is_played_again_only_where_the_profile_allows_it(engine, longest_s, attempts):
    asked: list[tuple[Timing, int]] = []
    said: list[str] = []

    def attempt(timing: Timing, number: int):
        asked.append((timing, number))
        return play(engine, timing, salt=number)

    record = long_enough(attempt, Timing(20.0, 0.5), longest_s, said.append)
    assert [number for _, number in asked] == list(range(attempts))
    assert (record.needs is None) == (attempts == 2) and len(said) == attempts - 1
