"""The sentences under the search's figures: right where it climbs, is flat, was cut off, or found nothing."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from spoc_lib.core.schemas import TRIALS
from spoc_lib.core.tables import as_table
from spoc_lib.report import search_figures as figures
from spoc_lib.report import search_findings as findings


def trial(number: int, tokens: float, ttft: float, itl: float, *, state: str = "complete", front: bool = False,
          volume: float = 0.0, flags: dict | None = None, **more) -> dict:
    return {**dict.fromkeys(TRIALS.names), "trial": number, "state": state, "driver": "virtual",
            "flags": json.dumps(flags or {"budget": 8192, "seqs": 256}), "output_tokens_per_s": tokens,
            "ttft_p95_s": ttft, "itl_p95_s": itl, "hypervolume": volume, "on_front": front, **more}


def table(*rows: dict) -> pd.DataFrame:
    return as_table(list(rows), TRIALS).to_pandas()


FRONT = table(trial(0, 1000, 1.5, 0.02, front=True), trial(1, 900, 0.5, 0.04, front=True),
              trial(2, 500, 9.0, 0.5, state="infeasible", violation=0.8),
              trial(3, math.nan, math.nan, math.nan, state="failed", failure_class="interrupted", flags={"no": 1}))
NOTHING = table(trial(0, math.nan, math.nan, math.nan, state="failed", failure_class="out_of_memory"))
MISSED = table(trial(0, 800, 7.0, 0.06, state="infeasible", violation=0.6),
               trial(1, 700, 6.0, 0.05, state="infeasible", violation=0.2))


def test_the_points_are_counted_and_the_knee_is_named():
    counts, knee = findings.pareto_3d(FRONT, 1)
    assert counts == ("Measured: 3 of 4 trials; within the SLOs: 2; on the front: 2. Cut off by an interruption: "
                      "1 trial.")
    assert knee == "The knee is trial 1: 900 tokens/s, TTFT p95 500 ms, ITL p95 40 ms."


def test_without_a_front_the_nearest_trial_is_named_and_nothing_is_traded():
    assert "Trial 1 comes nearest (700 tokens/s, TTFT p95 6 s, ITL p95 50 ms): it misses the SLOs by 20%" in \
        findings.pareto_3d(MISSED, None)[1]
    assert "nothing can be traded" in findings.pareto_pairs(MISSED)[0]
    assert findings.hypervolume(MISSED) == [
        "No measured trial is within the SLOs, so the front dominates nothing yet."]


def test_a_study_without_a_measurement_says_so_in_every_figure():
    assert findings.pareto_3d(NOTHING, None) == ["None of 1 trial was measured, so there is no point to draw."]
    for said, figure in ((findings.pareto_pairs(NOTHING), figures.pareto_pairs(NOTHING, None)),
                         (findings.hypervolume(NOTHING), figures.hypervolume(NOTHING)),
                         (findings.slices(NOTHING), figures.slices(NOTHING)),
                         (findings.slices(NOTHING[:0]), figures.slices(NOTHING[:0])),
                         (findings.pareto_3d(NOTHING[:0], None), figures.pareto_3d(NOTHING[:0], None)),
                         (findings.hypervolume(NOTHING[:0]), figures.hypervolume(NOTHING[:0]))):
        assert all(said) and figure.to_json(), said


def test_the_ends_of_the_front_and_the_scatter_of_its_repeats():
    spreads = pd.DataFrame({"trial": [0, 0], "objective": ["output_tokens_per_s", "ttft_p95_s"], "low": [990.0, 1.0],
                            "high": [1010.0, 1.5]})
    ends, scatter = findings.pareto_pairs(FRONT, spreads=spreads)
    assert ends == ("Most output and lowest ITL p95: trial 0 (1,000 tokens/s, TTFT p95 1.5 s, ITL p95 20 ms); lowest "
                    "TTFT p95: trial 1 (900 tokens/s, TTFT p95 500 ms, ITL p95 40 ms).")
    assert "output by up to 2.0% and TTFT p95 by up to 40.0%" in scatter
    assert "not known" in findings.pareto_pairs(FRONT)[1]
    assert "Trial 0 is the whole front" in findings.pareto_pairs(FRONT[:1])[0]


@pytest.mark.parametrize("volumes, said", [
    ([100, 100, 100, 103], "Still climbing: the last quarter of the trials added 3.0% (the last growth at trial 3 of"),
    ([100, 100, 100, 100.5], "Levelling off: the last quarter of the trials added 0.5%"),
    ([100, 100, 100, 100.01], "Levelling off: the last quarter of the trials added less than 0.1%"),
    ([50, 120, 120, 120, 120, 120, 120, 120], "Flat since trial 1 of 7, at 120 tokens/s: the last 2 trials added"),
    ([0, 0, 0, 0, 0, 0, 0, 9], "Still climbing: the first trial within the SLOs is among the last 2"),
    ([10, 10, 10], "3 trials cannot show whether the search converged."),
    ([0, 0, 0, 0, 0], "No measured trial is within the SLOs"),
])
def test_a_search_that_climbs_is_told_from_one_that_is_flat(volumes, said):
    rows = table(*(trial(n, 1, 1, 1, volume=v) for n, v in enumerate(volumes)))
    assert findings.hypervolume(rows)[0].startswith(said)


def test_the_flag_that_matters_most_for_each_objective_and_those_that_matter_for_none():
    rows = [(f, o, i) for o in ("ttft_p95_s", "itl_p95_s") for f, i in (("budget", 0.9), ("seqs", 0.08), ("b", 0.02))]
    known = pd.DataFrame(rows, columns=["flag", "objective", "importance"])
    assert findings.importances(known) == [
        "What sets the best quarter of the trials apart is budget for TTFT p95 (90%) and ITL p95 (90%).",
        "b stays below 5% for every objective: leave it at its default."]
    assert "Too few trials" in findings.importances(known[:0])[0]
    assert "Too few trials" in findings.importances(known.assign(importance=0.0))[0]


def budgets(*values: tuple[int, float, float]) -> pd.DataFrame:
    return table(trial(0, 1, values[0][1], values[0][2], flags={"budget": values[0][0], "seqs": 256}),
                 *(trial(n, 1, ttft, itl, flags={"budget": budget, "seqs": 256})
                   for n, (budget, ttft, itl) in enumerate(values[1:], 1)),
                 trial(9, 1, 0.1, 0.001, flags={"budget": 64, "seqs": 8}))


@pytest.mark.parametrize("values, said", [
    ([(2048, 0.2, 0.06), (1024, 0.3, 0.05), (512, 1.4, 0.02)],
     "From budget = 2048 to 512, all else at its default, TTFT p95 rises from 200 ms to 1.4 s and ITL p95 falls from "
     "60 ms to 20 ms: a smaller value buys ITL with TTFT."),
    ([(2048, 0.2, 0.06), (512, 0.201, 0.0601)], "it moves neither."),
    ([(2048, 0.129, 0.0462), (512, 0.117, 0.0472)], "ITL p95 stays at 46.2 ms: no trade between the two is seen here."),
    ([(2048, 0.2, 0.06), (512, 0.1, 0.03)], "no trade between the two is seen here."),
    ([(2048, 0.2, 0.06), (512, math.inf, 0.03)], "rises from 200 ms to infinite (failures)"),
    ([(2048, math.inf, 0.06), (512, 0.2, 0.06)], "falls from infinite (failures) to 200 ms"),
    ([(2048, 0.2, 0.06)], "No two measured trials differ in budget alone"),
])
def test_a_trade_is_said_only_of_trials_that_differ_in_one_flag(values, said):
    assert said in findings.slices(budgets(*values), "budget")[0]


def test_a_flag_that_no_trial_sets_and_an_interrupted_first_trial():
    rows = budgets((2048, 0.2, 0.06), (512, 1.4, 0.02))
    assert findings.slices(rows, "unsearched")[0].startswith("No measured trial sets unsearched")
    assert figures.slices(rows, "unsearched").layout.annotations[0].text == "no measured trial sets unsearched"
    cut = table(trial(0, math.nan, math.nan, math.nan, state="failed", failure_class="interrupted", flags={"no": 1}))
    assert "buys ITL with TTFT" in findings.slices(pd.concat([cut, rows.assign(trial=rows["trial"] + 1)]), "budget")[0]
