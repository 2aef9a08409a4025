"""Up an overload and down again: who is there when, and a server that forgets beside one that does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spoc_lib.config import Slo, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.engine import virtual
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.sweep import lessons
from spoc_lib.sweep.updown import Staircase, differences, up_and_down
from spoc_lib.workload import build_script

SLOS = [Slo(metric="ttft", limit_s=1.0), Slo(metric="error_rate", limit_ratio=0.01)]


def engine(**flags) -> EmbeddedEngine:
    return EmbeddedEngine.from_cluster(load_cluster("sim-2xh200"), {"max_num_seqs": 32, **flags})


def script():
    return build_script("tiny", 5, salt=1, gap_cap_s=2, context_limit=4096)


def test_users_join_at_the_foot_of_a_step_and_leave_at_its_end():
    joins = [0.0] * 10 + [30.0] * 10
    run = virtual.play(Staircase(script(), joins, {12: 3, 15: 0}), 20, engine=engine(), duration_s=60.0)
    sent = run.requests.groupby("user")["send_s"].agg(["min", "count"])
    assert sent.loc[:9, "min"].max() < 10 and sent.loc[10:, "min"].min() >= 30
    assert sent.loc[12, "count"] == 3 and 15 not in sent.index and sent.loc[16, "count"] > 3


def test_a_server_that_drains_within_the_settling_time_shows_no_hysteresis():
    table = up_and_down(engine(max_num_seqs=16), script(), [20, 30, 150], SLOS, settle_s=10.0, measured_s=10.0)
    steps = table[table["metric"] == "ttft"]
    assert steps["users"].tolist() == [20, 30, 150, 30, 20]
    assert steps["leg"].tolist() == ["up", "up", "top", "down", "down"]
    assert steps["verdict"].tolist() == ["met", "met", "missed", "met", "met"]
    assert (steps["start_s"].diff().dropna() == 20.0).all()
    left = differences(table)
    assert len(left) == 2 and (left["top_users"] == 150).all() and "worse" not in set(left["moved"])
    assert lessons.overload_leaves_no_trace(left, 10.0).holds is True


def test_a_backlog_that_is_still_there_is_hysteresis():
    """The queue of the overload takes longer to empty than the first seconds after it."""
    slow = engine()
    slow = replace(slow, step_time=slow.step_time.throttled(0.2))
    table = up_and_down(slow, script(), [20, 600], SLOS, settle_s=1.0, measured_s=12.0)
    left = differences(table)
    found = lessons.overload_leaves_no_trace(left, 1.0)
    assert left["moved"].tolist() == ["worse"] and found.holds is False
    assert found.sentence.startswith("Hysteresis, 1 s after an overload of 600 users: all ttft p95 at 20 users")


@pytest.mark.parametrize("levels", [[40], [40, 20], [20, 20]])
def test_levels_must_ascend(levels):
    with pytest.raises(InputError, match="two numbers of users or more, ascending"):
        up_and_down(engine(), script(), levels, SLOS, settle_s=1.0, measured_s=1.0)
