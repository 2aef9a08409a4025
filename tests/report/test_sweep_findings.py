"""The sentences under the sweep's figures, on a run with a known truth and on tables that leave things open."""

from __future__ import annotations

import json
import math

import numpy as np
import pandas as pd
import pytest

from spoc_lib.config import Slo
from spoc_lib.core import schemas
from spoc_lib.core.tables import read_table
from spoc_lib.report import sweep_figures as figures
from spoc_lib.report import sweep_findings as findings
from spoc_lib.report.findings import crossed
from spoc_lib.telemetry.story import Story, build

SLOS = [Slo(metric="ttft", limit_s=5.0), Slo(metric="itl", limit_s=0.05)]


@pytest.fixture(scope="module")
def swept(made_run, tmp_path_factory):
    """(RUNGS, SLO_VERDICTS, capacity.json) of a sweep whose ITL passes its limit near 120 users."""
    folder = made_run(tmp_path_factory.mktemp("run"), 120.0, seed=3) / "sweep"
    return (read_table(folder / "rungs.parquet", schemas.RUNGS),
            read_table(folder / "slo_verdicts.parquet", schemas.SLO_VERDICTS),
            json.loads((folder / "capacity.json").read_text()))


def test_the_ladder_says_between_which_rungs_a_limit_is_passed_and_the_interval(swept):
    rungs, slo, capacity = swept
    ttft, itl, answer = findings.ladder(rungs, slo, SLOS, capacity)
    assert ttft == "TTFT p95 of all personas stays within 5 s up to 160 users, the most that were run."
    above = slo[(slo["metric"] == "itl") & (slo["value_s"] > 0.05)]["users"].min()
    assert itl.startswith("ITL p95 of all personas passes 50 ms between") and itl.endswith(f"and {above} users.")
    low, high = capacity["interval"]
    assert answer == f"So the capacity is {capacity['max_users']} users, between {low} and {high} at 90% (shaded)."


def test_an_invalid_rung_decides_nothing_and_an_open_answer_stays_open(swept):
    rungs, slo, capacity = swept
    cut = rungs.assign(verdict=rungs["verdict"].mask(rungs["users"] > 110, "invalid"), reason="the client was late")
    said = findings.ladder(cut, slo, SLOS, capacity | {"verdict": "unresolved", "reason": "nothing was missed"})
    assert said[1] == "ITL p95 of all personas stays within 50 ms up to 110 users, the most that were run."
    assert said[2] == "So the capacity is not resolved: nothing was missed."
    assert said[3] == "6 rungs invalid, with no say in it: the client was late."
    one = findings.ladder(rungs[-1:], slo, SLOS, capacity | {"rungs": capacity["rungs"][-1:]})
    assert "is beyond 50 ms at 160 users already, the fewest of its rungs." in one[1]
    open_ended = figures.ladder(rungs, SLOS, capacity | {"interval": [110, None]})
    assert {shape.x1 for shape in open_ended.layout.shapes if shape.type == "rect"} == {160}


def test_the_matrix_names_who_misses_first(swept):
    rungs, slo, _ = swept
    each = pd.concat([slo.assign(persona=name, verdict="met") for name in ("P0", "P1")])
    late = each["persona"].eq("P1") & each["users"].eq(115) & each["metric"].eq("ttft")
    each = each.assign(verdict=each["verdict"].mask(late, "missed"), value_s=each["value_s"].mask(late, 7.5))
    said = findings.slo_matrix(slo, each, rungs)
    first = slo[slo["verdict"] == "missed"]["users"].min()
    assert said[0].startswith(f"First missed, at {first} users: ITL p95 (") and "against 50 ms" in said[0]
    assert said[1] == "Persona by persona the first misses come at 115 users: TTFT p95 of P1 (7.5 s against 5 s)."
    met = findings.slo_matrix(slo.assign(verdict="met"), each[:0], rungs)
    assert met == ["No SLO is missed up to 160 users, the most that were run."]
    assert findings.slo_matrix(slo.assign(verdict="undecided"), each[:0], rungs)[1].startswith("20 of 20 verdicts")
    assert findings.slo_matrix(slo, each, rungs.assign(verdict="invalid")) == ["No valid rung judges any SLO."]
    share = slo[:1].assign(metric="error_rate", percentile=99.0, verdict="missed", beyond_ratio=0.04)
    assert findings.slo_matrix(share, each[:0], rungs)[0].endswith(
        "failed requests (4.0% of the requests beyond, 1.0% allowed).")


def test_where_users_are_and_whether_littles_law_holds(swept):
    rungs, _, _ = swept
    where, law = findings.users(rungs, 5)
    assert where == ("Of 60 users 12.0 are in flight, one in 5.0; of 120 users (the limit) 24.0 are in flight, one "
                     "in 5.0; of 160 users 32.0 are in flight, one in 5.0.")
    assert law == "Little's law could not be checked."
    assert findings.users(rungs.assign(little_error_ratio=0.004), 5)[1].endswith("within 0.4%.")
    off = rungs.assign(little_error_ratio=np.where(rungs["users"] == 140, 0.2, 0.0))
    assert findings.users(off, None)[1].startswith("Little's law misses by 20.0% at 140 users")
    assert findings.users(rungs[:1], None)[0] == "Of 60 users 12.0 are in flight, one in 5.0."
    assert findings.users(rungs.assign(verdict="invalid"), None) == ["No valid rung says where its users are."]


def test_throughput_names_its_peak_and_what_was_not_recorded(swept):
    rungs, _, _ = swept
    grown, hits, blocks = findings.throughput(rungs.assign(kv_usage_ratio=math.nan))
    assert grown == "From 60 to 160 users (2.7 times) output rises from 600 tokens/s to 1,600 tokens/s."
    assert hits == "Prefix hits: 90.0% at 60 users and 90.0% at 160 users." and blocks == "KV in use: not recorded."
    fallen = rungs.assign(output_tokens_per_s=np.where(rungs["users"] == 160, 500.0, rungs["output_tokens_per_s"]))
    assert findings.throughput(fallen)[0].endswith("to 500 tokens/s; the most is 1,400 tokens/s at 140 users.")
    assert findings.throughput(rungs[:1])[0].startswith("Fewer than two valid rungs")


def series(panel: str, name: str, *values: float) -> pd.DataFrame:
    return pd.DataFrame({"panel": panel, "series": name, "time_s": np.arange(len(values)) * 5.0, "value": values})


def told(*parts: pd.DataFrame, events: list | None = None, known: bool = True, error_s: float = 0.0) -> Story:
    phases = pd.DataFrame([("measured", 5.0, 20.0)], columns=["phase", "start_s", "end_s"])
    return Story(pd.concat(parts), phases, pd.DataFrame(events or [], columns=["gpu", "start_s", "end_s", "what"]),
                 error_s, known)


def test_the_story_tells_the_measured_part_and_who_was_slowed():
    parts = [series("TTFT (s)", "p95", 90.0, 0.2, 0.4, 3.0), series("requests", "waiting", 50.0, 0.0, 4.0, 2.0),
             series("SM active (%)", "GPU-0", 0.0, 70.0, 80.0, 90.0)]
    late, engine, gpus, clocks = findings.story(told(*parts, error_s=0.004))
    assert late == ("Measured from 5 s to 20 s of the rung. The client's TTFT p95, 5 s at a time, is 400 ms in the "
                    "middle and 3 s at worst."), "the warm-up's 90 s are no part of it"
    assert engine == "Requests running: not recorded; waiting: 2.0, at most 4; KV blocks in use: not recorded."
    assert gpus == "The SMs of 1 GPU are active 80% of the time; no clock event slowed a GPU."
    assert clocks == "Stamps of client and server agree to 4 ms."
    hot = findings.story(told(*parts, events=[("GPU-5", 8.0, 19.0, "thermal")]))
    assert hot[2].endswith("; slowed down: GPU-5 from 8 s to 19 s (thermal).")
    assert hot[3] == "All stamps are of one clock."


def test_a_story_without_telemetry_claims_nothing():
    empty = build(schemas.REQUESTS.empty_table().to_pandas(), schemas.METRICS.empty_table().to_pandas(), (0.0, 1.0))
    assert findings.story(empty) == ["No telemetry was recorded for this rung, so nothing is seen of it."]
    no_gpu = findings.story(told(series("TTFT (s)", "p95", 1.0, 1.0), known=False))
    assert no_gpu[1] == "The engine's gauges were not recorded."
    assert no_gpu[2] == "No GPU's SM activity was recorded; whether a GPU was slowed down was not recorded."


@pytest.mark.parametrize(("users", "values_ms", "said"), [
    ([80, 110, 112, 120], [15, 32, 60, 529], "passes 50 ms between 110 and 112 users."),
    ([80, 110, 112, 112, 115, 115, 120], [15, 32, 40, 60, 540, 45, 529],
     "passes 50 ms between 110 and 120 users; rungs of 112 to 115 users lie on both sides of it."),
    ([80, 110, 112, 112], [15, 32, 40, 60],
     "is within 50 ms up to 110 users; rungs of 112 users lie on both sides of it."),
])
def test_a_limit_is_passed_where_all_its_rungs_agree(users, values_ms, said):
    rows = pd.DataFrame({"users": users, "value_s": np.array(values_ms) / 1e3, "metric": "itl", "persona": "all",
                         "percentile": 95.0})
    assert crossed(rows, [Slo(metric="itl", percentile=95, limit_s=0.05)]) == [f"ITL p95 of all personas {said}"]
