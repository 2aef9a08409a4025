"""Rungs over real HTTP with Locust: beside their twin, and against an engine that is there already."""

from __future__ import annotations

import shutil

import pytest

from spoc_lib.config import Engine, LadderSpec, Profile, Slo, load_cluster
from spoc_lib.core.schemas import CHUNKS, METRICS, REQUESTS
from spoc_lib.core.tables import read_table
from spoc_lib.servers import launch
from spoc_lib.sweep import run_sweep
from spoc_lib.workload import build_script

pytestmark = [pytest.mark.slow, pytest.mark.alone]
SLOS = [Slo(metric="ttft", percentile=90, limit_s=2.0), Slo(metric="itl", percentile=90, limit_s=0.2)]


def profile(**changed) -> Profile:
    return Profile(**{**dict(
        name="test", title="seconds", audit_users=4, audit_turns=2, search_trials=1, search_population=2,
        search_finalists=1, screen_s=20, rung_s=30, warmup_s=8, http_rung_s=6, http_users=6, probes=2, trace_s=1,
        gap_cap_s=3), **changed})


def cluster(**changed):
    return load_cluster("sim-2xh200").model_copy(update={
        "slos": SLOS, "ladder": LadderSpec(users=[3, 6]), "personas": "tiny", **changed})


def factory(salt: int):
    return build_script("tiny", 5, salt=salt, gap_cap_s=3, context_limit=4096)


def test_one_rung_over_http_stands_beside_its_twin(tmp_path):
    result = run_sweep(cluster(), profile(), {}, tmp_path, factory)
    http = result.rungs[result.rungs["driver"] == "locust"]
    if "behind real time" in http["reason"].iloc[0]:
        assert http["verdict"].iloc[0] == "invalid" and not result.capacity["twin_vs_http"]["comparable"]
        pytest.skip("this machine is too busy for real time: the engine's clock fell behind")
    assert http["users"].tolist() == [6] and http["verdict"].iloc[0] != "invalid", http["reason"].iloc[0]
    assert http["planned"].iloc[0] == http[["completed", "failed", "censored"]].iloc[0].sum()
    assert http["failed"].iloc[0] == 0 and http["little_error_ratio"].iloc[0] < 0.03
    table = result.twin_vs_http.set_index("figure")
    assert list(table.index) == ["ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s", "output_tokens_per_s"]
    assert 0.7 < table.loc["output_tokens_per_s", "ratio"] < 1.3
    assert result.capacity["twin_vs_http"]["users"] == 6
    agreed = result.reconciliation.set_index("figure")
    assert agreed.loc[["output tokens", "prompt tokens"], "agrees"].all()
    folder = tmp_path / "rungs" / f"{http['rung'].iloc[0]:02d}"
    sources = set(read_table(folder / "metrics.parquet", METRICS)["source"])
    assert {"vllm", "dcgm"} <= sources
    assert len(read_table(folder / "chunks.parquet", CHUNKS)) and len(read_table(folder / "requests.parquet", REQUESTS))
    again = run_sweep(cluster(), profile(), {}, tmp_path, factory)
    assert again.rungs.equals(result.rungs)  # nothing is run a second time


def test_an_engine_that_is_there_is_swept_over_http_altogether(tmp_path):
    with launch(cluster(), {}, tmp_path / "engine") as server:
        remote = cluster(engine=Engine(kind="remote", base_url=server.base_url))
        result = run_sweep(remote, profile(), {}, tmp_path / "sweep", factory)
    assert (result.rungs["driver"] == "locust").all() and len(result.rungs) == 2
    assert result.twin_vs_http.empty and len(result.reconciliation)
    assert result.capacity["verdict"] == "unresolved" or result.capacity["interval"][1] is not None
    assert any("no DCGM page" in text for text in result.problems)
    assert result.capacity["saturated"]["evidence"]
    shutil.rmtree(tmp_path / "engine")
