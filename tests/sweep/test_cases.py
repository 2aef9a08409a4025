"""What is asked beside a sweep: settings, what-ifs, and the trade-offs, each on a load of seconds."""

from __future__ import annotations

import pytest

from spoc_lib.config import load_cluster, load_profile
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.sweep import sensitivity
from spoc_lib.sweep.cases import Case, Paced, answers
from spoc_lib.sweep.sensitivity import settings, table
from spoc_lib.sweep.tradeoffs import best_budgets, long_prompt_arrival, throttle_effect, throttled, with_budget
from spoc_lib.sweep.whatif import on_hardware, questions, with_share
from spoc_lib.workload.personas import load_personas

CASE = Case.of(load_cluster("sim-2xh200"), load_profile("quick"), measured_s=40.0, warmup_s=10.0, near=20)


def test_settings_change_one_thing_at_a_time():
    asked = settings(CASE)
    assert asked[0][2] == CASE
    names = {name for name, _, _ in asked}
    assert names == {"as asked", "start", "gap cap", "percentile", "rung length"}
    for name, _, case in asked[1:]:
        back = {"start": {"start": CASE.start}, "gap cap": {"gap_cap_s": CASE.gap_cap_s},
                "percentile": {"cluster": CASE.cluster}, "rung length": {"measured_s": CASE.measured_s}}[name]
        assert case != CASE and case.changed(**back) == CASE
    p99 = next(case for name, value, case in asked if value == "p99")
    assert {slo.percentile for slo in p99.cluster.slos} == {99.0}
    assert [slo.limit_s for slo in p99.cluster.slos] == [slo.limit_s for slo in CASE.cluster.slos]


def test_what_ifs_cover_a_planners_questions():
    asked = questions(CASE)
    assert {name for name, _, _ in asked} == {
        "as it is", "GPU count", "GPU", "KV dtype", "context limit", "think time", "mix", "monorepo sharing"}
    eight = on_hardware(CASE.cluster, count=8)
    assert CASE.changed(cluster=eight).engine().gpu_count == 8
    assert CASE.changed(flags={"max_model_len": 32_768}).engine().max_model_len == 32_768


def test_shares_sum_to_one_and_a_share_of_nothing_leaves_a_persona_out():
    personas = load_personas("spoc")
    assert [p.name for p in with_share(personas, "P2", 0.0).personas] == ["P0", "P1"]
    for share in (0.0, 0.2, 0.9):
        assert sum(p.share for p in with_share(personas, "P2", share).personas) == pytest.approx(1)


def test_an_impossible_case_is_a_sentence_beside_the_answers():
    found = answers([CASE.changed(cluster=on_hardware(CASE.cluster, "h100-sxm", 1))], workers=1)
    assert isinstance(found[0], str) and "h100" in found[0]
    rows = table([("as it is", "1", CASE)], found)
    assert rows["users"].isna().all() and rows["reason"].iloc[0] == found[0]


def test_paced_users_think_longer_and_ask_the_same():
    script = CASE.script(CASE.engine())
    plain, slow = script.user(3), Paced(script, 2.0).user(3)
    for _ in range(5):
        one, two = plain.next(1000), slow.next(1000)
        assert two.think_time_s == 2 * one.think_time_s
        assert (one.prompt_tokens, one.append) == (two.prompt_tokens, two.append)


def test_a_smaller_budget_spares_the_others_and_delays_the_huge_prompt():
    found = long_prompt_arrival(CASE, 30, (512, 8192), prompt_tokens=60_000, at_s=120.0)
    small, large = found.iloc[0], found.iloc[1]
    assert small["ttft_s"] > large["ttft_s"] > 0
    assert small["itl_p95_s"] < large["itl_p95_s"] and small["itl_max_s"] < large["itl_max_s"]
    with pytest.raises(InputError, match="does not fit"):
        long_prompt_arrival(CASE, 8, (2048,), prompt_tokens=140_000)


def test_one_slow_gpu_slows_every_persona():
    found = throttle_effect(CASE, 30, 0.7)
    assert set(found["persona"]) == {"all", "P0", "P1", "P2"}
    assert (found["ratio"] > 1.15).all()
    with pytest.raises(InputError):
        throttled(CASE.engine(), 0.0)


def test_a_throttled_step_stretches_kernels_but_neither_collectives_nor_the_host():
    engine = CASE.engine()
    slow = throttled(engine, 0.5).step_time
    batch = Batch(600, 100, 3e6, 12800, 1, 500, 2e5, 6e4, 900, 101)
    one, two = engine.step_time.components(batch), slow.components(batch)
    for name, seconds in one.items():
        stretch = 1 if name in ("comm", "idle") else 2
        assert two[name] == pytest.approx(stretch * seconds, rel=1e-9), name
    assert slow.compiled(1024).seconds(batch) == pytest.approx(slow.seconds(batch), rel=1e-9)


@pytest.mark.slow
def test_budgets_are_asked_at_each_gap_and_the_best_is_among_them():
    found = best_budgets(CASE.changed(near=40, measured_s=20.0), (2048, 8192), ())
    assert len(found) == 2 and found["calibrated"].all()
    assert found.loc[found["users"].idxmax(), "best"]
    assert with_budget(CASE, 512).engine().flags.max_num_seqs == 512


def test_a_parameter_of_the_step_time_takes_the_calibrations_place():
    chunk = Batch(2048, 0, 0, 0, 1, 2048, 2e6, 2.6e5, 0, 1)
    short, long = (CASE.changed(parameters={"gap_prefill_us": gap}).engine().step_time.seconds(chunk)
                   for gap in (300.0, 6000.0))
    assert long - short == pytest.approx(5.7e-3, rel=1e-6)


def test_the_grid_moves_itl_limits_and_percentiles_and_leaves_other_limits(monkeypatch):
    asked = []
    monkeypatch.setattr(sensitivity, "answers", lambda cases: asked.extend(cases) or ["not asked"] * len(cases))
    found = sensitivity.grid(CASE)
    assert len(found) == len(asked) == 12 and found["users"].isna().all()
    for row, case in zip(found.to_dict("records"), asked, strict=True):
        limits = {slo.metric: slo.limit_s for slo in case.cluster.slos}
        assert limits == {"ttft": 5.0, "itl": row["itl_limit_s"]} and case.start == row["start"]
        assert {slo.percentile for slo in case.cluster.slos} == {row["percentile"]}
