"""Quick capacities: the bisection against known edges, and answers that move the way the question must move them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spoc_lib.config import Slo, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.sweep.drivers import virtual_rung
from spoc_lib.sweep.quick import MOST_USERS, bracket, quick_capacity
from spoc_lib.sweep.record import Timing
from spoc_lib.workload import build_script

pytestmark = pytest.mark.slow

SLOS = [Slo(metric="ttft", percentile=95, limit_s=2.0), Slo(metric="itl", percentile=95, limit_s=0.04)]


@given(st.integers(0, 5000), st.integers(1, 500))
def test_the_bracket_holds_the_edge(edge, near):
    low, high = bracket(lambda users: users <= edge, near)
    if edge >= MOST_USERS:
        assert (low, high) == (MOST_USERS, None)
    else:
        assert low <= edge < high and high - low <= max(1, 0.04 * high)


def test_a_looser_limit_holds_no_fewer_users_and_the_passport_comes_along():
    engine = EmbeddedEngine.from_cluster(load_cluster("sim-2xh200"))
    script = build_script("spoc", 3, salt=1, gap_cap_s=10, context_limit=131_072)

    def play(users):
        return virtual_rung(engine, script, users, Timing(50, 10), 0)

    tight = quick_capacity(engine, play, SLOS, near=12, tolerance=0.2)
    loose = quick_capacity(engine, play, [slo.model_copy(update={"limit_s": 10 * slo.limit_s}) for slo in SLOS],
                           near=12, tolerance=0.2)
    assert 0 < tight.users <= loose.users
    assert tight.missed is not None and tight.binding in {slo.name for slo in SLOS}
    assert tight.passport["simulated"] and tight.passport["outside"]
    with pytest.raises(InputError):
        quick_capacity(engine, play, [])
