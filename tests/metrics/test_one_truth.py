"""One script through every public way: equal figures to the last digit."""

from __future__ import annotations

import copy
import math

import numpy as np
import pandas as pd
import pytest

from spoc_lib.config import Slo, load_cluster
from spoc_lib.engine import simulate
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.virtual import play
from spoc_lib.load import LoadPlan
from spoc_lib.load import summary as load_summary
from spoc_lib.load.window import Window
from spoc_lib.metrics import METRICS, Measured
from spoc_lib.report import llmd, tables
from spoc_lib.search.evaluate import measurement
from spoc_lib.search.space import build_space
from spoc_lib.search.twin import TwinEvaluator
from spoc_lib.sweep.quick import percentiles
from spoc_lib.sweep.record import RungRecord
from spoc_lib.sweep.rung import summarise
from spoc_lib.sweep.slo import goodput
from spoc_lib.telemetry import story
from spoc_lib.telemetry.reconcile import reconcile
from spoc_lib.workload import build_script

USERS, SECONDS, WARMUP_S = 40, 40.0, 10.0
SLOS = [Slo(metric="ttft", limit_s=0.5), Slo(metric="itl", percentile=99, limit_s=0.05),
        Slo(metric="e2e", percentile=50, limit_s=5.0)]
RATES = ("output_tokens_per_s", "prompt_tokens_per_s", "request_rate_per_s", "cached_ratio")


def script(cluster, engine):
    return build_script("tiny", 0, context_limit=engine.max_model_len)


@pytest.fixture(scope="module")
def played():
    """(cluster, run): more users than the engine takes at a time, so that some wait when the run ends; chunks of
    several tokens; one request in fifty failed after its first token."""
    cluster = load_cluster("sim-4xh100").model_copy(update={
        "flags": {"max_num_seqs": 4, "max_num_batched_tokens": 512, "stream_interval": 3}, "slos": SLOS})
    engine = EmbeddedEngine.from_cluster(cluster, {})
    return cluster, play(script(cluster, engine), USERS, engine=engine, duration_s=SECONDS, warmup_s=WARMUP_S)


@pytest.fixture(scope="module")
def broken(played):
    run = copy.copy(played[1])
    requests = run.requests.copy()
    bad = (requests["request"] % 50 == 7) & requests["first_token_s"].notna()
    requests.loc[bad, ["outcome", "error_class"]] = ["failed", "http_503"]
    object.__setattr__(run, "_tables", {**run._tables, "requests": requests})
    return run


@pytest.fixture(scope="module")
def rung(broken):
    return summarise(broken.requests, broken.chunks, broken.metrics, broken.window, SLOS, USERS, "virtual",
                     end_s=SECONDS, start_s=0.0)


def test_the_run_has_what_tells_rules_apart(broken):
    seen = Measured(broken.requests, broken.chunks, broken.window)
    ttft = seen.samples("ttft")
    assert ttft.cut.sum() > 3 and np.isinf(ttft.value_s).sum() > 3
    answered = broken.requests["first_token_s"].between(*broken.window) & (broken.requests["send_s"] < WARMUP_S)
    assert answered.sum() > 3  # sent before the window, answered in it
    assert seen.gaps.tokens.max() == 3 and math.isfinite(ttft.percentile(95))


def test_simulation_load_and_sweep_say_the_same(broken, rung):
    simulated, (row, slos) = simulate.figures(broken), rung
    start_s, end_s = broken.window
    plan = LoadPlan(base_url="http://h", model="m", users=USERS, duration_s=SECONDS, gap_cap_s=60.0)
    facts = {"planned": len(broken.requests), "start_s": 0.0, "stop_s": SECONDS, "error_samples": {}, "retry_after": 0,
             "interrupted": False, "lost_clients": 0, "lost_why": [], "stamps": "kernel", "notes": []}
    loaded = load_summary.summarise(plan, broken.requests, broken.chunks, broken.metrics,
                                    Window(start_s, end_s, "steady", ""), facts, None)
    for name in ("ttft", "itl", "tpot", "e2e"):
        assert simulated[f"{name}_s"] == loaded[f"{name}_s"]
    for name in ("ttft", "itl"):
        assert simulated[f"{name}_s"] == {f"p{q}": row[f"{name}_p{q}_s"] for q in (50, 95, 99)}
    assert simulated["tpot_s"]["p95"] == row["tpot_p95_s"]
    for name in RATES:
        assert simulated[name] == loaded[name] == row[name] != 0, name
    for name in ("live_users", "thinking_users", "in_flight_users", "little_error_ratio"):
        assert loaded[name] == row[name], name
    shown = [simulated["ttft_s"]["p95"], simulated["itl_s"]["p99"], simulated["e2e_s"]["p50"]]
    assert [one["value_s"] for one in slos] == shown
    record = RungRecord("virtual", broken.requests, broken.chunks, broken.metrics, broken.window, 0.0, SECONDS, 0)
    assert list(percentiles(record, SLOS).values()) == shown
    for persona, own in loaded["per_persona"].items():
        seen = Measured(broken.requests, broken.chunks, broken.window, SECONDS)
        assert own["ttft_s"] == seen.percentiles("ttft", persona)


def test_the_search_measures_what_a_simulation_says(played, tmp_path):
    cluster, run = played
    twin = TwinEvaluator(cluster, build_space(cluster), lambda salt: script(cluster, run.engine), USERS, SECONDS,
                         WARMUP_S, evidence=False)
    found, simulated = twin.evaluate(dict(twin.space.defaults), tmp_path), simulate.figures(run)
    engine = twin.engine(dict(twin.space.defaults))
    if engine.flags != run.engine.flags:  # the space searches some of the flags
        simulated = simulate.figures(play(script(cluster, engine), USERS, engine=engine, duration_s=SECONDS,
                                          warmup_s=WARMUP_S))
    assert found.output_tokens_per_s == simulated["output_tokens_per_s"]
    assert (found.ttft_p95_s, found.itl_p95_s) == (simulated["ttft_s"]["p95"], simulated["itl_s"]["p95"])


def test_the_search_keeps_a_rungs_own_figures(broken, rung):
    row, slos = rung
    seen = Measured(broken.requests, broken.chunks, broken.window, SECONDS)
    good = goodput(seen, SLOS)
    found = measurement({**row, "verdict": "met", "reason": ""}, slos, users=USERS, driver="virtual", duration_s=1.0,
                        samples=seen, goodput_per_s=good["good_per_s"])
    assert found.figures == {"output_tokens_per_s": row["output_tokens_per_s"], "goodput_per_s": good["good_per_s"],
                             "ttft_p95_s": row["ttft_p95_s"], "itl_p95_s": row["itl_p95_s"]}
    assert found.note == ""  # nothing had to be bounded


def test_the_clients_side_of_a_reconciliation_is_over_what_the_server_counts(played):
    """All requests whose first token came, all tokens that came: there both sides measure one thing."""
    run = played[1]
    table = reconcile(run.requests, run.chunks, run.metrics, 0.0, SECONDS).set_index("figure")
    whole = Measured(run.requests, run.chunks, (-math.inf, math.inf), SECONDS)
    ttft = whole.samples("ttft")
    assert table.loc["p95 TTFT", "client"] == ttft.where(~ttft.cut).percentile(95)
    assert table.loc["mean TTFT", "client"] == pytest.approx(table.loc["mean TTFT", "server"], rel=1e-12)
    assert table.loc["mean ITL", "client"] == pytest.approx(table.loc["mean ITL", "server"], rel=0.05)
    assert table.loc["cached share of prompt tokens", "client"] == whole.numbers("cached_ratio")["cached_ratio"]
    assert -3 * 4 <= table.loc["output tokens", "difference"] <= 0  # three of each running stream wait for a chunk


def test_the_story_shows_the_percentiles_of_who_was_sent_in_each_of_its_bins(broken):
    told = story.build(broken.requests, broken.metrics, broken.window)
    line = told.series[(told.series["panel"] == "TTFT (s)") & (told.series["series"] == "p50")]
    for row in line.to_dict("records"):
        middle = row["time_s"] + broken.requests["send_s"].min()
        window = (middle - story.BIN_S / 2, middle + story.BIN_S / 2)
        assert row["value"] == Measured(broken.requests, None, window, SECONDS).samples("ttft").percentile(50)


def test_tables_and_exports_show_a_rungs_figures(broken, rung):
    row = rung[0]
    seen = Measured(broken.requests, None, broken.window, SECONDS)
    told = llmd._aggregate(row, broken.requests[seen.sent], seen)
    assert told["throughput"]["request_rate"]["mean"] == row["request_rate_per_s"]
    assert told["latency"]["inter_token_latency"]["p95"] == row["itl_p95_s"]
    answered = seen.samples("ttft").where((broken.requests["outcome"] == "completed")[seen.sent].to_numpy())
    assert told["latency"]["time_to_first_token"]["p95"] == answered.percentile(95)  # theirs: of answered requests
    assert tables.cell("itl_p95_s", row["itl_p95_s"]) == f"{1e3 * row['itl_p95_s']:.1f}"
    for name, one in METRICS.items():
        shown = tables.column(name if one.kind in ("number", "users") else f"{name}_p95_s")
        assert shown.label.removesuffix(" p95") == one.title and (shown.unit, shown.better) == (one.shown, one.better)


def test_a_table_that_names_nobody_is_refused():
    from spoc_lib.core.errors import InputError
    from spoc_lib.core.schemas import REQUESTS

    none = REQUESTS.empty_table().to_pandas()
    chunks = pd.DataFrame({"request": [3], "time_s": [1.0], "tokens": [1.0]})
    with pytest.raises(InputError, match="does not have"):
        Measured(none, chunks, (0.0, 2.0)).samples("itl")
    assert math.isnan(Measured(none, None, (0.0, 2.0)).samples("itl").percentile(95))
