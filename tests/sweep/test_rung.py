"""A rung's row from records whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from spoc_lib.config import Slo
from spoc_lib.core.errors import InputError
from spoc_lib.core.schemas import CHUNKS, METRICS, REQUESTS, RUNGS, SLO_VERDICTS
from spoc_lib.core.tables import as_table
from spoc_lib.sweep.rung import summarise
from spoc_lib.sweep.slo import RungSamples, check_personas, goodput

TTFT = Slo(metric="ttft", percentile=95, limit_s=5.0)
ITL = Slo(metric="itl", percentile=95, limit_s=0.05)
NO_METRICS = METRICS.empty_table().to_pandas()


def paced(users: int = 10, duration_s: float = 60.0, *, ttft_s=0.5, itl_s=0.02, tokens=51, think_s=1.0,
          tokens_per_chunk=1):
    """Users who each do: wait ttft, stream `tokens` at an even pace, think; cut off at `duration_s`."""
    rows, chunks = [], []
    for user in range(users):
        clock, turn = think_s * user / users, 0
        while clock < duration_s:
            first = clock + ttft_s
            arrivals = first + itl_s * np.arange(tokens)
            end = arrivals[-1]
            censored = end > duration_s
            number = len(rows)
            seen = arrivals[arrivals <= duration_s]
            for index in range(0, len(seen), tokens_per_chunk):
                part = seen[index:index + tokens_per_chunk]
                chunks.append((number, part[-1] if index else part[0], float(len(part))))
            rows.append(dict(
                request=number, persona=f"P{user % 2}", user=user, conversation=0, turn=turn, kind="agent",
                intended_send_s=clock, send_s=clock, first_token_s=first if first <= duration_s else math.nan,
                end_s=duration_s if censored else end, ttft_s=ttft_s if first <= duration_s else math.nan,
                intended_prompt_tokens=1000, intended_output_tokens=tokens, prompt_tokens=1000,
                output_tokens=None if censored else tokens, cached_tokens=400, tokens_source="usage",
                chunks=len(seen), outcome="censored" if censored else "completed", error_class=None,
                http_status=200, finish_reason=None if censored else "length"))
            clock, turn = end + think_s, turn + 1
    requests = as_table(rows, REQUESTS).to_pandas()
    frame = pd.DataFrame(chunks, columns=["request", "time_s", "tokens"])
    return requests, as_table(frame, CHUNKS).to_pandas()


def test_a_paced_rung_has_its_known_figures():
    requests, chunks = paced()
    row, slos = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [TTFT, ITL], 10, "virtual")
    assert row["ttft_p95_s"] == pytest.approx(0.5)
    assert row["itl_p50_s"] == pytest.approx(0.02) and row["tpot_p95_s"] == pytest.approx(0.02)
    cycle = 0.5 + 1.0 + 1.0  # ttft, 50 gaps of 20 ms, think
    assert row["output_tokens_per_s"] == pytest.approx(10 * 51 / cycle, rel=0.02)
    assert row["request_rate_per_s"] == pytest.approx(10 / cycle, rel=0.05)
    assert row["in_flight_users"] == pytest.approx(10 * 1.5 / cycle, rel=0.01)
    assert row["little_error_ratio"] < 1e-6 and row["cached_ratio"] == pytest.approx(0.4)
    assert row["verdict"] == "met" and {one["verdict"] for one in slos} == {"met"}
    as_table([row], RUNGS), as_table(slos, SLO_VERDICTS)


def test_a_limit_below_the_latency_is_missed_and_names_what_binds():
    requests, chunks = paced(itl_s=0.06)
    row, _ = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [TTFT, ITL], 10, "virtual")
    assert row["verdict"] == "missed" and row["binding"] == ITL.name


def test_itl_is_divided_over_the_tokens_of_a_chunk():
    requests, chunks = paced(tokens=61, tokens_per_chunk=5)
    samples = RungSamples(requests, chunks, (10.0, 60.0)).samples("itl")
    row, _ = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [ITL], 10, "virtual")
    assert samples.weight.max() == 5
    assert row["itl_p50_s"] == pytest.approx(0.02) and row["output_tokens_per_s"] > 0


def test_failures_are_infinitely_late_and_never_vanish():
    requests, chunks = paced()
    broken = requests["request"] % 10 == 3
    requests.loc[broken, ["outcome", "error_class"]] = ["failed", "http-503"]
    row, slos = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [TTFT], 10, "virtual")
    assert row["failed"] == int(broken.sum()) and math.isinf(row["ttft_p95_s"])
    assert slos[0]["verdict"] == "missed"
    good = goodput(RungSamples(requests, chunks, (10.0, 60.0)), [TTFT, ITL])
    assert good["error_ratio"] == pytest.approx(0.1, abs=0.03)
    assert good["good_ratio"] == pytest.approx(1 - good["error_ratio"])


def test_requests_cut_off_are_decided_as_far_as_they_can_be():
    requests, chunks = paced(users=4, duration_s=30.0, ttft_s=12.0)
    samples = RungSamples(requests, chunks, (5.0, 30.0), 30.0)
    tight = samples.samples("ttft", limit_s=5.0)
    late = requests[(requests["outcome"] == "censored") & requests["first_token_s"].isna()]
    assert len(late) and tight.time_s.max() < 25.0  # nothing sent within one limit of the cut
    assert (tight.value_s > 5.0).all()
    waited_longer = late[30.0 - late["send_s"] > 5.0]
    assert np.isinf(tight.value_s).sum() == len(waited_longer[waited_longer["send_s"] >= 5.0])


def test_planned_requests_that_are_nowhere_make_the_rung_invalid():
    requests, chunks = paced()
    row, _ = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [TTFT], 10, "locust",
                       planned=len(requests) + 3)
    assert row["verdict"] == "invalid" and "accounted for" in row["reason"]


@pytest.mark.parametrize("users, word", [(12, "Little"), (9, "different users")])
def test_the_wrong_number_of_users_is_noticed(users, word):
    requests, chunks = paced(duration_s=90.0)
    row, _ = summarise(requests, chunks, NO_METRICS, (10.0, 90.0), [TTFT], users, "locust", gap_cap_s=10.0)
    assert row["verdict"] == "invalid" and word in row["reason"]


def test_a_user_that_dies_is_noticed():
    requests, chunks = paced(duration_s=120.0)
    alive = ~((requests["user"] == 4) & (requests["send_s"] > 20.0))
    chunks = chunks[chunks["request"].isin(requests[alive]["request"])]
    row, _ = summarise(requests[alive], chunks, NO_METRICS, (20.0, 120.0), [TTFT], 10, "locust", gap_cap_s=5.0)
    assert "Little" in row["reason"]


def test_a_short_rung_with_long_thoughts_is_valid():
    """Twelve users over HTTP for 20 s who think for up to 30 s: few requests a user, and the law still
    holds."""
    requests, chunks = paced(users=12, duration_s=25.0, think_s=30.0)
    row, _ = summarise(requests, chunks, NO_METRICS, (5.0, 25.0), [TTFT], 12, "locust", start_s=0.0, end_s=25.0)
    assert row["little_error_ratio"] < 0.03, row["reason"]


def test_personas_are_judged_apart_and_unknown_ones_refused():
    requests, chunks = paced()
    slow = requests["persona"] == "P1"
    requests.loc[slow, "first_token_s"] += 0.2
    limits = [Slo(persona="P0", metric="ttft", limit_s=0.6), Slo(persona="P1", metric="ttft", limit_s=0.6)]
    _, slos = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), limits, 10, "virtual")
    assert [one["verdict"] for one in slos] == ["met", "missed"]
    with pytest.raises(InputError, match="P9"):
        check_personas([Slo(persona="P9", metric="ttft", limit_s=1.0)], ["P0", "P1"])
