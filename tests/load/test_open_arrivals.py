"""An open loop over HTTP: conversations come when their arrivals say, once each, whatever the server does."""

from __future__ import annotations

import json

import pytest

from spoc_lib.core.errors import SpocError
from spoc_lib.load import LoadPlan, run
from spoc_lib.load.plan import Arrivals
from spoc_lib.load.script import arriving
from spoc_lib.workload.arrivals import arrival_times

#: A quiet machine sends within milliseconds; this one may be busy.
LATE_S = 0.25


async def answer(request):
    await request.answer(["a"], usage={"prompt_tokens": 50, "completion_tokens": 1})


def firsts(result):
    """When each user's first request was meant to be sent and was sent, in seconds from the first of all."""
    first = result.requests.sort_values("intended_send_s").groupby("user").first()
    return first.intended_send_s - first.intended_send_s.min(), first.send_s - first.intended_send_s


@pytest.mark.alone
@pytest.mark.parametrize("cv", [1.0, 2.0])
def test_open_arrivals_over_http(server, tmp_path, cv):
    users = arriving("tiny", 3.0, cv, 4.0, 5)
    times = arrival_times(3.0, 4.0, 5, kind="poisson" if cv == 1 else "gamma", cv=cv)
    assert users == len(times) > 3
    with server(answer) as url:
        result = run(LoadPlan(base_url=url, model="m", users=users, duration_s=4.0, personas="tiny",
                              seed=5, gap_cap_s=0.3, arrivals=Arrivals(rate_per_s=3.0, cv=cv)), tmp_path / "rung")
    planned, late = firsts(result)
    assert list(planned.index) == list(range(users))
    assert planned.to_numpy() == pytest.approx(times - times[0], abs=1e-6)
    assert late.max() < LATE_S
    assert (result.requests.groupby("user").conversation.nunique() == 1).all()
    assert result.summary["valid"], result.summary
    law = result.summary["little_error_ratio"]
    assert abs(law) < 0.15, law  # some dozen requests: one more or less at an edge is a tenth
    assert result.summary["live_users"] < users and result.summary["arrivals"]["cv"] == cv


@pytest.mark.alone
def test_recorded_times_over_http(server, tmp_path):
    rows = [{"timestamp": 1.7e12 + 400 * k, "input_length": 40, "output_length": 1, "hash_ids": [k]} for k in range(5)]
    trace = tmp_path / "m.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert arriving(f"traces:{trace}", None, 1.0, 3.0, 0) == 5
    with server(answer) as url:
        result = run(LoadPlan(base_url=url, model="m", users=5, duration_s=3.0, personas=f"traces:{trace}",
                              arrivals=Arrivals(rate_per_s=None)), tmp_path / "rung")
    planned, late = firsts(result)
    assert planned.to_numpy() == pytest.approx([0, 0.4, 0.8, 1.2, 1.6], abs=1e-6) and late.max() < LATE_S
    assert len(result.requests) == 5 == result.summary["finished_users"]


@pytest.mark.parametrize(("change", "said"), [
    ({"users": 1}, "users must be at least"), ({"arrivals": Arrivals(rate_per_s=None)}, "personas have no recorded"),
])
def test_arrivals_that_cannot_be(server, tmp_path, change, said):
    with server(answer) as url, pytest.raises(SpocError, match=said):
        run(LoadPlan(**{"base_url": url, "model": "m", "users": 9, "duration_s": 3.0, "personas": "tiny",
                        "arrivals": Arrivals(rate_per_s=2.0), **change}), tmp_path / "rung")
