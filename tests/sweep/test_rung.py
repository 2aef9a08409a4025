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
from spoc_lib.core.yamlfile import parse
from spoc_lib.metrics import Measured
from spoc_lib.sweep.fit import cross, margins
from spoc_lib.sweep.rung import summarise
from spoc_lib.sweep.slo import check_slos, goodput

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
    samples = Measured(requests, chunks, (10.0, 60.0)).samples("itl")
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
    good = goodput(Measured(requests, chunks, (10.0, 60.0)), [TTFT, ITL])
    assert good["error_ratio"] == pytest.approx(0.1, abs=0.03)
    assert good["good_ratio"] == pytest.approx(1 - good["error_ratio"])


def test_requests_cut_off_are_decided_as_far_as_they_can_be():
    requests, chunks = paced(users=4, duration_s=30.0, ttft_s=12.0)
    samples = Measured(requests, chunks, (5.0, 30.0), 30.0)
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
        check_slos([Slo(persona="P9", metric="ttft", limit_s=1.0)], ["P0", "P1"])


FAILING, GOOD = Slo(metric="error_rate", limit_ratio=0.05), Slo(metric="goodput", limit_ratio=0.9)


def with_failures(every: int, **paced_as):
    requests, chunks = paced(users=20, **paced_as)
    broken = requests["request"] % every == 1
    requests.loc[broken, ["outcome", "error_class"]] = ["failed", "http-503"]
    return requests, chunks, broken


@pytest.mark.parametrize("every, verdict", [(4, "missed"), (20, "undecided"), (10_000, "met")])
def test_an_error_rate_is_met_missed_or_undecided_with_its_interval(every, verdict):
    requests, chunks, broken = with_failures(every)
    row, (slo,) = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [FAILING], 20, "virtual")
    inside = requests["send_s"].between(10.0, 60.0, inclusive="left")
    assert slo["verdict"] == row["verdict"] == verdict
    assert slo["beyond_ratio"] == pytest.approx(broken[inside].mean())
    assert slo["beyond_low_ratio"] <= slo["beyond_ratio"] <= slo["beyond_high_ratio"]
    assert math.isnan(slo["value_s"]) and slo["percentile"] == pytest.approx(95)
    assert row["binding"] == FAILING.name == "all error_rate <= 5 %"
    as_table([slo], SLO_VERDICTS)


def test_goodput_counts_who_is_late_and_who_failed_and_nobody_else():
    requests, chunks, broken = with_failures(4)
    _, slos = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [TTFT, ITL, GOOD], 20, "virtual")
    assert slos[2]["beyond_ratio"] == pytest.approx(0.25, abs=0.02) and slos[2]["verdict"] == "missed"
    late = Slo(persona="P1", metric="ttft", limit_s=0.4)  # all of P1 are later than that, none of P0 is asked
    requests, chunks = paced(users=20)
    own = GOOD.model_copy(update={"persona": "P0"})
    row, slos = summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [late, GOOD, own], 20, "virtual")
    assert slos[1]["beyond_ratio"] == pytest.approx(0.5, abs=0.02) and slos[2]["beyond_ratio"] == 0
    assert slos[2]["verdict"] == "met" and row["verdict"] == "missed" and "goodput" in row["reason"]


def test_ttft_per_prompt_token_is_decided_per_token_also_where_it_was_cut_off():
    requests, chunks = paced(users=4, duration_s=30.0, ttft_s=12.0)
    slo = Slo(metric="ttft_per_prompt_token", limit_s=0.005)  # of 1000 tokens: 5 s
    samples = Measured(requests, chunks, (5.0, 30.0), 30.0)
    tight, plain = samples.of(slo), samples.samples("ttft", limit_s=5.0)
    assert len(tight) == len(plain) and (tight.value_s > slo.limit_s).all()
    assert Measured(*paced(), (10.0, 60.0)).of(slo).value_s == pytest.approx(0.0005)


@pytest.mark.parametrize("given, said", [
    (dict(metric="error_rate", limit_s=0.1), "'limit_ratio' between 0 and 1, for example 0.01"),
    (dict(metric="goodput", limit_ratio=0.9, percentile=99), "neither 'limit_s' nor 'percentile'"),
    (dict(metric="ttft"), "takes 'limit_s' in seconds"),
    (dict(metric="ttft", limit_s=1, limit_ratio=0.9), "not 'limit_ratio'")])
def test_an_slo_takes_one_limit_and_says_which(given, said):
    with pytest.raises(InputError, match=said):
        parse(Slo, given, "slos")


def test_a_goodput_without_any_limit_on_latency_is_refused():
    with pytest.raises(InputError, match="add an SLO on ttft"):
        check_slos([GOOD, FAILING], ["P0"])


def test_rungs_with_more_and_more_failures_cross_where_the_rate_is_allowed():
    rows = []
    for number, (users, every) in enumerate(((10, 10_000), (20, 100), (40, 8), (80, 3))):
        requests, chunks, _ = with_failures(every)
        rows += summarise(requests, chunks, NO_METRICS, (10.0, 60.0), [TTFT, FAILING], users, "virtual",
                          rung=number)[1]
    rows = [row for row in rows if row["metric"] == "error_rate"]
    found = cross(margins(as_table(rows, SLO_VERDICTS).to_pandas(), 0.9))
    assert 20 <= found.users < 40 and found.binding == FAILING.name


@pytest.mark.parametrize("resets, lag_s, said", [
    (2, 0.001, "restarted its clock 2 times"), (0, 0.2, "100 ms late or more"), (0, 0.004, None)])
def test_an_embedded_engine_behind_real_time_makes_its_rung_invalid(resets, lag_s, said):
    rows = [dict(source="engine", metric="spoc:clock_resets_total", labels="{}", time_s=at, value=value)
            for at, value in ((9.0, 0.0), (61.0, float(resets)))]
    for bound in ("0.005", "0.1", "0.5", "+Inf"):
        rows += [dict(source="engine", metric="spoc:step_lag_seconds_bucket", labels=f'{{"le":"{bound}"}}', time_s=at,
                      value=steps * (lag_s <= float(bound))) for at, steps in ((9.0, 0.0), (61.0, 500.0))]
    requests, chunks = paced()
    row, _ = summarise(requests, chunks, as_table(rows, METRICS).to_pandas(), (10.0, 60.0), [TTFT, ITL], 10, "locust")
    assert row["verdict"] == ("invalid" if said else "met")
    assert said is None or (said in row["reason"] and "'http_users'" in row["reason"])
