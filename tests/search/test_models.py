"""Noise, recalibration, the choice of the next launch, crash avoidance, simplification: known answers."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from spoc_lib.config import Engine, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.search import acquire, avoid, helptext, noise, pareto, recalibrate, simplify
from spoc_lib.search.real import twice_if_invalid
from spoc_lib.search.recalibrate import Correction
from spoc_lib.search.repeats import Repeats
from spoc_lib.search.screened import Screened, ScreenedPlan, measured, noise_findings
from spoc_lib.search.space import build_space, flags_key
from spoc_lib.sweep.record import AGAIN_SALT

spec = importlib.util.spec_from_file_location("analytic_models", Path(__file__).parent / "analytic.py")
analytic = importlib.util.module_from_spec(spec)
sys.modules["analytic_models"] = analytic
spec.loader.exec_module(analytic)
REFERENCE = pareto.Reference(analytic.TTFT_LIMIT_S, analytic.ITL_LIMIT_S, "test")
NO_LIMITS = np.full(3, np.inf)


def test_noise_is_pooled_over_repeats():
    random = np.random.default_rng(0)
    repeats = [np.exp(random.normal([5, 0, -4], [0.01, 0.05, 0.1], size=(40, 3))) for _ in range(5)]
    assert noise.relative_sd(repeats) == pytest.approx([0.01, 0.05, 0.1], rel=0.15)
    assert noise.relative_sd([np.ones((1, 3))]) == pytest.approx([noise.UNKNOWN_SD] * 3)
    assert (noise.relative_sd([np.ones((2, 3))]) > 0.04).all()  # one pair that agrees proves no exactness


def test_two_samples_of_users_make_no_membership_certain():
    near, far = np.array([1000, 1.0, 0.02]), np.array([990, 1.01, 0.0202])
    shift = np.array([[1, 1, 1], [0.9, 1.2, 1.1]])  # what another sample of users does to all alike
    own = np.array([[1, 1, 1], [1.01, 0.99, 1.01]])
    values = {0: near * shift, 1: far * shift * own, 2: near * shift * np.array([0.5, 5, 5])}
    yes, part = np.array([True, True]), np.array([True, False])
    found = Repeats(values, {0: yes, 1: yes, 2: part}, pareto.OBJECTIVES).probabilities([0, 1, 2], 1)
    assert 0.5 < found[0] < 1 and 0.02 < found[1] < 0.7 and found[2] < 0.05


def test_front_membership_is_sure_beyond_the_noise_and_open_within_it():
    points = [np.array([[1000, 1.0, 0.02]]), np.array([[500, 2.0, 0.04]]), np.array([[1000, 1.0, 0.0201]])]
    chance = noise.membership(points, np.full(3, 0.02), NO_LIMITS)
    assert chance[1] < 0.02 and 0.3 < chance[0] < 1 and 0.3 < chance[2] < 1


def test_a_point_near_its_limit_is_on_the_front_half_of_the_time():
    chance = noise.membership([np.array([[1000, 5.0, 0.02]])], np.full(3, 0.05), np.array([np.inf, 5.0, 0.05]))
    assert chance[0] == pytest.approx(0.5, abs=0.06)


def test_drift_is_told_from_noise():
    first, sd = np.array([1000, 1.0, 0.02]), np.full(3, 0.02)
    assert not noise.drift(first, first * 1.03, sd).drifted
    moved = noise.drift(first, first * np.array([0.8, 1.0, 1.0]), sd)
    assert moved.drifted and "-20.0% in output_tokens_per_s" in moved.sentence


def test_a_constant_error_of_the_twin_is_learned_from_few_launches():
    ranks = np.random.default_rng(1).random((30, 3))
    ratio = np.tile(np.log([0.8, 1.4, 1.1]), (4, 1))
    found = recalibrate.fit(ranks[:4], ratio, ranks, noise_sd=0.03)
    assert np.abs(found.mean - ratio[0]).max() < 0.1
    assert found.sd.max() < 0.4 < recalibrate.fit(ranks[:0], ratio[:0], ranks, 0.03).sd.min()


def test_a_rung_that_says_nothing_is_played_again_on_the_same_launch():
    played, drained = [], []

    def play(verdicts: list[str]):
        def one(salt: int):
            played.append(salt)
            return {"verdict": verdicts[len(played) - 1]}, [], None

        played.clear()
        return twice_if_invalid(one, lambda: drained.append(1) or True)[0]["verdict"]

    assert play(["met"]) == "met" and played == [0] and not drained
    assert play(["invalid", "missed"]) == "missed" and played == [0, AGAIN_SALT] and drained
    assert play(["invalid", "invalid"]) == "invalid" and len(played) == 2


def test_misled_twins_are_told():
    twin = np.array([[100, 1, 0.01], [200, 2, 0.02], [300, 3, 0.03], [400, 4, 0.04]], dtype=float)
    fair, opposite = recalibrate.misled(twin, twin * 1.3), recalibrate.misled(twin, twin[::-1])
    assert all("ranks these engines as the real server does" in s and "x1.30" in s for s in fair)
    assert all("the twin misled" in s for s in opposite)


def test_the_next_launch_is_the_one_that_adds_hypervolume():
    predicted = np.array([[1000, 1.0, 0.01], [1000, 1.0, 0.02], [2000, 9.0, 0.01]])
    room = predicted[:, 1:] / [REFERENCE.ttft_s, REFERENCE.itl_s]
    sure = Correction(np.zeros((3, 3)), np.full((3, 3), 1e-6))
    gain = acquire.expected_gain(predicted, room, sure, np.array([[900, 2.0, 0.02]]), REFERENCE,
                                 np.random.default_rng(0))
    assert np.argmax(gain) == 0 and gain[1] > 0 and gain[2] == 0  # the last one misses its limit


def twin_pool(space, evaluator, folder) -> list[Screened]:
    pool = []
    for flags in list(space.grid())[::37]:
        try:
            m = evaluator.evaluate(flags, folder)
        except Exception as error:
            assert error.code == "out-of-memory"
            continue
        pool.append(Screened(flags, m.values, (m.ttft_p95_s / REFERENCE.ttft_s, m.itl_p95_s / REFERENCE.itl_s)))
    return pool


@pytest.mark.slow
def test_the_screened_search_beats_plain_nsga2_at_equal_launches(tmp_path):
    twin, launches = analytic.FormulaEvaluator(slowdown=0.7), 10
    study = analytic.study(tmp_path / "real", evaluator=analytic.FormulaEvaluator(version="real"))
    plan = ScreenedPlan(study.space, twin_pool(study.space, twin, tmp_path), REFERENCE, launches, seed=0)
    study.propose = plan
    study.run(launches, launches=launches)
    plain = analytic.study(tmp_path / "plain", evaluator=analytic.FormulaEvaluator())
    plain.run(4 * launches, launches=launches)
    mine, theirs = (REFERENCE.hypervolume(np.array([r["values"] for r in measured(s) if r["violation"] <= 0]))
                    for s in (study, plain))
    assert mine > theirs and study.paid() == launches
    last = study.trials()[-1]
    assert last.user_attrs["repeat"] and flags_key(last.user_attrs["record"]["flags"]) == flags_key(
        study.space.defaults)
    chance, sentences = noise_findings(study, load_cluster("sim-4xh100"), seed=0)
    assert set(chance) <= {t.number for t in study.trials()} and any("within the noise" in s for s in sentences)
    index, ratio = plan.log_ratios(study)
    assert len(index) >= 5 and np.allclose(ratio[:, 1:], np.log(1 / 0.7))


@pytest.mark.slow
def test_the_screened_search_resumes_to_the_same_launches(tmp_path):
    def run(name: str, stops: list[int]):
        study = analytic.study(tmp_path / name, evaluator=analytic.FormulaEvaluator(version="real"))
        twin = analytic.FormulaEvaluator(slowdown=0.7)
        for stop in stops:
            study = analytic.study(tmp_path / name, evaluator=analytic.FormulaEvaluator(version="real"))
            study.propose = ScreenedPlan(study.space, twin_pool(study.space, twin, tmp_path), REFERENCE, 8, seed=0)
            study.run(stop)
        return analytic.sequence(study)

    assert run("whole", [8]) == run("parts", [3, 4, 8])


def test_crashes_are_learned_and_avoided(tmp_path):
    study = analytic.study(tmp_path)
    defaults = study.space.defaults

    def flags(budget: int, utilisation: float, slots: int = 1024) -> dict:
        return {**defaults, "max_num_batched_tokens": budget, "gpu_memory_utilization": utilisation,
                "max_num_seqs": slots}

    crash = [flags(budget, 0.95, slots) for budget in (24576, 32768) for slots in (64, 128, 1024)]
    fine = [flags(budget, utilisation) for budget in (1024, 4096, 12288, 32768) for utilisation in (0.80, 0.89)]
    guard = avoid.CrashAvoidance()
    study.initial = [defaults, *fine, *crash[:2]]
    study.run(len(study.initial))
    assert guard.probability(study, [crash[3]]) == (None, 2)  # two failures teach nothing
    study.initial = [defaults, *fine, *crash]
    study.run(len(study.initial))
    chances, failures = guard.probability(study, [flags(32768, 0.95, 32), flags(1024, 0.83), defaults])
    assert failures == len(crash) and chances[0] > 0.8 and chances[1] < 0.1 and chances[2] < 0.5
    assert guard(study, flags(1024, 0.83)) is None and guard(study, defaults) is None
    study.avoid, study.initial = lambda s, f: "it would crash", [*study.initial, flags(24576, 0.95, 32)]
    paid = len(study.evaluator.evaluated)
    study.run(len(study.initial))
    record = study.trials()[-1].user_attrs["record"]
    assert (record["state"], record["failure_class"], record["reason"]) == ("invalid", "avoided", "it would crash")
    assert len(study.evaluator.evaluated) == paid


def test_crash_avoidance_can_be_switched_off(monkeypatch):
    assert avoid.switched_on()
    monkeypatch.setenv(avoid.SWITCH, "off")
    assert not avoid.switched_on()


def test_changes_that_change_nothing_are_taken_back(tmp_path):
    space, evaluator = build_space(load_cluster("sim-4xh100")), analytic.FormulaEvaluator()
    chosen = {**space.defaults, "gpu_memory_utilization": 0.83, "max_num_batched_tokens": 4096}
    values = evaluator.evaluate(chosen, tmp_path).values
    found = simplify.simplify(space, chosen, values, evaluator, tmp_path)
    assert found.restored == ["gpu_memory_utilization"]
    assert found.flags == {**space.defaults, "max_num_batched_tokens": 4096}
    paid = len(evaluator.evaluated)
    assert simplify.simplify(space, chosen, values, evaluator, tmp_path) == found
    assert len(evaluator.evaluated) == paid  # a resumed search reads the attempts


SERVER = """
import argparse
parser = argparse.ArgumentParser()
for name in {names!r}:
    parser.add_argument("--" + name)
parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
parser.parse_args()
"""


def test_the_engines_own_help_decides(tmp_path, monkeypatch):
    names = ["max-num-seqs", "max-model-len", *(f"other-{n}" for n in range(30))]
    program = tmp_path / "server.py"
    program.write_text(SERVER.format(names=names))
    base = load_cluster("vllm-cpu")
    engine = base.engine.model_copy(update={"command": [sys.executable, str(program)]})
    cluster = base.model_copy(update={"engine": engine})
    with pytest.raises(InputError, match="--max-num-batched-tokens"):
        helptext.check_flags(cluster, build_space(cluster), tmp_path)
    program.write_text(SERVER.format(names=[*names, "max-num-batched-tokens"]))
    (tmp_path / "help.txt").unlink()
    assert helptext.check_flags(cluster, build_space(cluster), tmp_path) is None
    container = base.model_copy(update={"engine": Engine(kind="container", image="vllm/vllm-openai:v0.32")})
    docker = tmp_path / "docker"  # prints what the image's vLLM would
    docker.write_text(f'#!/bin/sh\nfor last; do :; done\necho "$@" > {tmp_path}/asked\n'
                      f'exec {sys.executable} {program} "$last"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program.write_text(SERVER.format(names=names))
    (tmp_path / "help.txt").unlink()
    with pytest.raises(InputError, match="--max-num-batched-tokens"):
        helptext.check_flags(container, build_space(container), tmp_path)
    assert (tmp_path / "asked").read_text() == "run --rm vllm/vllm-openai:v0.32 --help\n"
    program.write_text("print('usage: none')")
    (tmp_path / "help.txt").unlink()
    assert "not checked" in helptext.check_flags(cluster, build_space(cluster), tmp_path)
