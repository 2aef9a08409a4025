"""Rungs that are too short say what they need, and are played again where that is allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spoc_lib.config import Engine, LadderSpec, Slo, load_cluster, load_profile
from spoc_lib.core.schemas import REQUESTS
from spoc_lib.core.tables import write_table
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.servers import launch
from spoc_lib.sweep import run_sweep
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


@pytest.mark.slow
def test_a_running_server_is_asked_once_more_after_its_overload(engine, tmp_path, monkeypatch):
    """The sweep of a server over HTTP, its rungs played by the twin: down again to what was met, without a restart."""
    timings, slots = [], EmbeddedEngine.from_cluster(load_cluster("sim-2xh200"), {"max_num_seqs": 8})

    def by_twin(cluster, server, script, users, timing, folder, say):
        timings.append(timing)
        record = replace(twin_rung(slots, script, users, timing, 0), driver="locust")
        write_table(folder / "requests.parquet", record.requests, REQUESTS)
        return record

    monkeypatch.setattr("spoc_lib.sweep.run.http_rung", by_twin)
    work = load_profile("quick").model_copy(update={"probes": 3, "http_rung_s": 40, "http_longest_s": None})
    with launch(load_cluster("sim-2xh200"), {}, tmp_path / "engine") as server:
        remote = load_cluster("sim-2xh200").model_copy(update={
            "engine": Engine(kind="remote", base_url=server.base_url), "personas": "tiny",
            "ladder": LadderSpec(users=[12, 150]), "slos": [Slo(metric="ttft", limit_s=2.0)]})
        said: list[str] = []
        result = run_sweep(remote, work, {}, tmp_path / "sweep", lambda salt: build_script(
            "tiny", 5, salt=salt, gap_cap_s=2, context_limit=4096), progress=said.append)
    users, verdicts = result.rungs["users"].tolist(), result.rungs["verdict"].tolist()
    assert verdicts[:2] == ["met", "missed"] and users[:2] == [12, 150] and len(users) == len(timings) == 4
    assert users[-1] < 150 and any("down again after the overload, on the same server" in text for text in said)
    assert "and one more on the way down, one launch" in said[0]
    lesson = result.capacity["lessons"][-1]
    assert lesson["name"] == "overload leaves no trace" and lesson["holds"] is not None
    assert set(result.up_down["users"]) >= {users[-1]}
