"""The virtual clock: closed loop, tables, metrics, the command line."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest

from spoc_lib.config import load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.simulate import figures
from spoc_lib.engine.virtual import play
from spoc_lib.metrics import streams
from spoc_lib.workload import build_script

USERS, DURATION_S, WARMUP_S = 12, 120.0, 20.0


@pytest.fixture(scope="module")
def engine() -> EmbeddedEngine:
    return EmbeddedEngine.from_cluster(load_cluster("sim-4xh100"), {"max-num-batched-tokens": 4096})


@pytest.fixture(scope="module")
def run(engine):
    script = build_script("spoc", 3, context_limit=engine.max_model_len)
    return play(script, USERS, engine=engine, duration_s=DURATION_S, warmup_s=WARMUP_S)


def test_each_user_has_one_request_at_a_time_and_thinks_in_between(run):
    requests = run.requests.sort_values(["user", "send_s"])
    for user, rows in requests.groupby("user"):
        ends, sends = rows["end_s"].to_numpy(), rows["send_s"].to_numpy()
        turns = run.log.turns
        for row in range(1, len(rows)):
            think = turns[rows.index[row]].think_time_s
            assert sends[row] == pytest.approx(ends[row - 1] + think, abs=1e-9), user
    assert set(requests["outcome"]) <= {"completed", "censored"}
    censored = requests[requests["outcome"] == "censored"]
    assert censored["end_s"].isna().all() and censored["prompt_tokens"].isna().all()
    assert (requests.groupby("user")["outcome"].apply(lambda one: (one == "censored").sum()) <= 1).all()


def test_little_s_law(run):
    """Time in flight, added over requests, is the integral of requests in flight."""
    requests = run.requests
    ends = requests["end_s"].fillna(DURATION_S)
    in_flight = (ends - requests["send_s"]).sum()
    edges = np.concatenate([requests["send_s"], ends])
    change = np.concatenate([np.ones(len(requests)), -np.ones(len(requests))])
    order = np.argsort(edges)
    integral = (np.cumsum(change[order])[:-1] * np.diff(edges[order])).sum()
    assert in_flight == pytest.approx(integral)


def test_prompts_are_what_the_script_intended(run):
    done = run.requests[run.requests["outcome"] == "completed"]
    assert len(done) > 20
    np.testing.assert_array_equal(done["prompt_tokens"], done["intended_prompt_tokens"])
    np.testing.assert_array_equal(done["output_tokens"], done["intended_output_tokens"])
    continuing = done[(done["turn"] > 0) & (done["kind"] != "start")].groupby("user").tail(-1)
    assert (continuing["cached_tokens"] > 0.5 * continuing["prompt_tokens"]).mean() > 0.8


def test_steps_do_not_overlap_and_last_what_the_model_says(run, engine):
    steps = run.steps
    assert (steps["time_s"].to_numpy()[1:] >= steps["end_s"].to_numpy()[:-1] - 1e-12).all()
    for row in steps.sample(50, random_state=0).itertuples():
        batch = Batch(*(getattr(row, name) for name in Batch._fields))
        assert row.duration_s == pytest.approx(engine.step_time.seconds(batch), rel=1e-9, abs=1e-12)
    assert (steps["tokens"] <= 4096).all()


def test_metrics_agree_with_the_tables(run):
    metrics = run.metrics
    assert metrics.groupby(["metric", "labels"]).size().eq(DURATION_S + 1).all()

    def last(name: str) -> float:
        rows = metrics[(metrics["metric"] == name)]
        return float(rows[rows["time_s"] == DURATION_S]["value"].sum())

    requests = run.requests
    assert last("vllm:generation_tokens_total") == run.chunks["tokens"].sum()
    answered = requests["first_token_s"].notna()
    assert last("vllm:prompt_tokens_total") == requests[answered]["intended_prompt_tokens"].sum()
    assert last("vllm:time_to_first_token_seconds_count") == answered.sum()
    assert last("vllm:time_to_first_token_seconds_sum") == pytest.approx(requests["ttft_s"].sum())
    assert last("vllm:request_success_total") == (requests["outcome"] == "completed").sum()
    assert last("vllm:inter_token_latency_seconds_count") == streams(run.chunks).gaps.tokens.sum()
    counters = metrics[metrics["metric"].str.endswith("_total")]
    assert counters.groupby(["metric", "labels"])["value"].apply(lambda one: one.is_monotonic_increasing).all()
    active = metrics[metrics["metric"] == "DCGM_FI_PROF_SM_ACTIVE"]
    assert active["value"].between(0, 1).all() and active["value"].max() > 0.3
    assert active["labels"].nunique() == 4


def test_figures_of_the_window(run):
    result = figures(run)
    assert result["completed"] + result["failed"] + result["censored"] == result["requests"]
    assert 0 < result["ttft_s"]["p50"] <= result["ttft_s"]["p95"]
    assert 0.001 < result["itl_s"]["p50"] < 0.1
    assert result["speed"] > 1 and result["simulated"] and result["passport"]["simulated"]


def test_salt_changes_identities_not_sizes(engine):
    one, two = (play(build_script("spoc", 3, salt=salt, context_limit=engine.max_model_len), 4, engine=engine,
                     duration_s=40) for salt in (0, 1))
    assert one.requests["intended_prompt_tokens"].tolist() == two.requests["intended_prompt_tokens"].tolist()
    assert one.requests["send_s"].tolist() == two.requests["send_s"].tolist()


def test_a_window_that_is_empty_is_refused(engine):
    script = build_script("tiny", 0, context_limit=4096)
    with pytest.raises(InputError, match="warm-up"):
        play(script, 1, engine=engine, duration_s=10, warmup_s=10)


def test_flags_of_a_cluster_are_overridden_and_checked():
    cluster = load_cluster("sim-2xh200")
    engine = EmbeddedEngine.from_cluster(cluster, {"max_num_seqs": 64, "--watermark": 0.02})
    assert (engine.flags.max_num_seqs, engine.flags.watermark, engine.gpu_count) == (64, 0.02, 2)
    assert engine.describe()["flags"]["max_num_seqs"] == 64
    for overrides, wanted in (({"max_num_sequences": 1}, "did you mean max_num_seqs"),
                              ({"tensor_parallel_size": 4}, "4 GPUs"),
                              ({"gpu_memory_utilization": 0.2}, "raise it"), ({"max_model_len": 10**6}, "exceeds")):
        with pytest.raises(InputError, match=wanted):
            EmbeddedEngine.from_cluster(cluster, overrides)


def test_simulate_on_the_command_line(here):
    cli = partial(here, "engine", "simulate")
    done = cli("sim-4xh100", "--users", "3", "--duration", "30", "--warmup", "5", "--personas", "tiny",
               "--set", "max-num-seqs=8", "--json", "-")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {"users", "simulated_s", "wall_s", "speed", "passport", "ttft_s", "itl_s"} <= set(result)
    assert result["engine"]["flags"]["max_num_seqs"] == 8 and result["completed"] > 10
    done = cli("sim-4xh100", "--users", "3", "--set", "max_seqs=8")
    assert done.returncode == 2 and "max_seqs" in done.stderr and done.stderr.count("\n") == 1
