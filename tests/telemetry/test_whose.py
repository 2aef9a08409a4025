"""Whose series: replicas, other teams, jobs that scrape twice, GPUs of others, MIG, time-slicing."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import as_table
from spoc_lib.telemetry.straggler import find_stragglers
from spoc_lib.telemetry.timeline import grid, window_summary
from spoc_lib.telemetry.whose import Ours, same_address

TIMES = np.arange(0.0, 31.0)


def table(*series: tuple[str, dict, object]) -> pd.DataFrame:
    """(metric, labels, a value or values at `TIMES`)… as METRICS."""
    return as_table([dict(source="dcgm" if metric.startswith("DCGM_") else "vllm", metric=metric,
                          labels=json.dumps(labels, sort_keys=True), time_s=float(at), value=float(value))
                     for metric, labels, values in series
                     for at, value in zip(TIMES, np.broadcast_to(values, TIMES.shape), strict=True)],
                    METRICS).to_pandas()


def server(instance: str, model: str = "m", running: float = 10.0, rate: float = 100.0, since: float = 5000.0, **more):
    labels = {"instance": instance, "job": "vllm", "model_name": model, "engine": "0", **more}
    return [("vllm:generation_tokens_total", labels, since + rate * TIMES),
            ("vllm:num_requests_running", labels, running), ("vllm:kv_cache_usage_perc", labels, 0.4)]


def gpu(host: str, index: int, *, active: float | None = 0.9, memory: float | None = None, clock: float = 1755.0,
        **more):
    labels = {"gpu": str(index), "UUID": f"GPU-{host}-{index}", "hostname": host, **more}
    found = [("DCGM_FI_DEV_SM_CLOCK", labels, clock), ("DCGM_FI_DEV_POWER_USAGE", labels, 100.0 + 500 * (active or 0))]
    found += [] if active is None else [("DCGM_FI_PROF_SM_ACTIVE", labels, active)]
    return found + ([] if memory is None else [("DCGM_FI_DEV_FB_USED", labels, memory)])


def seen(ours: Ours, *series) -> tuple[dict, list[str]]:
    metrics, said = ours.kept(table(*series), "Prometheus")
    return window_summary(metrics, 0.0, 30.0), said


@pytest.mark.parametrize("more", [({}, {}), ({"pod": "a"}, {"pod": "b"}), ({"node": "x"}, {"node": "y"})])
def test_replicas_are_differenced_each_and_added(more):
    found, said = seen(Ours(), *server("10.0.0.1:8000", **more[0]),
                       *server("10.0.0.2:8000", since=90_000, **more[1]))
    assert found["generation_tokens"] == pytest.approx(6000) and found["running"] == 20 and found["resets"] == 0
    assert found["kv_usage_ratio"] == pytest.approx(0.4) and "replicas of one service" in said[0]


def test_servers_of_two_services_are_not_added_and_the_address_tells_which_is_meant():
    servers = [*server("10.0.0.1:8000", pod="p-0", namespace="n", service="prod"),
               *server("10.0.0.2:8000", pod="p-1", namespace="n", service="prod"),
               *server("10.0.0.3:8000", pod="t-0", namespace="n", service="test")]
    found, said = seen(Ours(models=["m"]), *servers)
    assert found["generation_tokens"] is None and "which are the engine's cannot be told" in said[0]
    for host, tokens in (("prod", 6000), ("test.n.svc.cluster.local", 3000)):
        assert seen(Ours(base_url=f"http://{host}:80", models=["m"]), *servers)[0]["generation_tokens"] == tokens
    assert seen(Ours(base_url="http://test.other:80", models=["m"]), *servers)[0]["generation_tokens"] is None


def test_a_router_that_is_asked_does_not_stand_for_the_engines_behind_it():
    router = [("vllm:num_requests_running", {"instance": "router:80", "server": f"http://10.0.0.{k}:8000"}, 10.0)
              for k in (1, 2)]
    found, _ = seen(Ours(base_url="http://router:80", models=["m"]), *router, *server("10.0.0.1:8000"),
                    *server("10.0.0.2:8000"))
    assert (found["running"], found["generation_tokens"]) == (20.0, 6000.0)
    found, _ = seen(Ours(base_url="http://router:80", models=["m"]), *router)
    assert found["running"] == 20.0 and "generation_tokens" in found["missing"]


def test_ranks_that_each_report_their_whole_engine_count_once():
    ranks = [("vllm:num_requests_running", {"model_name": "m", "tp_rank": str(tp), "dp_rank": str(dp)}, 10.0 + dp)
             for tp in range(4) for dp in range(2)]
    found, _ = seen(Ours(models=["m"]), *ranks, ("vllm:generation_tokens_total", {"model_name": "m"}, 100.0 * TIMES))
    assert (found["running"], found["generation_tokens"]) == (21.0, 3000.0)
    assert [row["running"] for row in found["by_engine"] if row.get("running")] == [10.0, 11.0]


@pytest.mark.parametrize("again", [{"job": "podmonitor"}, {"job": "a", "container": "c", "pod": "p"},
                                   {"prometheus_replica": "prom-1"}])
def test_a_server_that_is_scraped_twice_is_one(again):
    late = [(metric, labels, np.asarray(values) - 40.0 * metric.endswith("total"))
            for metric, labels, values in server("10.0.0.1:8000", **again)]
    found, said = seen(Ours(), *server("10.0.0.1:8000"), *late)
    assert found["generation_tokens"] == pytest.approx(3000) and found["running"] == 10 and not said


THEIRS = server("10.0.0.9:8000", "theirs", 200, 4000, namespace="them")


@pytest.mark.parametrize("ours", [Ours(match={"namespace": "us"}), Ours(match={"instance": r"10\.0\.0\.1:.*"}),
                                  Ours(base_url="http://10.0.0.1:8000/v1"), Ours(models=["ours"])])
def test_ours_is_found_by_labels_by_address_and_by_model(ours):
    found, said = seen(ours, *server("10.0.0.1:8000", "ours", namespace="us"), *THEIRS)
    assert found["running"] == 10 and found["generation_tokens"] == pytest.approx(3000) and not said


@pytest.mark.parametrize("ours, first", [
    (Ours(), server("10.0.0.1:8000", "ours")),  # nothing is known
    (Ours(models=["theirs"]), server("10.0.0.1:8000", "theirs", namespace="us")),  # two teams serve one model
    (Ours(models=["theirs"]), server("10.0.0.1:8000", "theirs", namespace="them", team="x")),
])
def test_of_servers_that_cannot_be_told_apart_nothing_is_concluded(ours, first):
    found, said = seen(ours, *first, *THEIRS)
    assert found["running"] is None and found["generation_tokens"] is None
    assert "telemetry.match" in said[0] and "nothing is concluded" in said[0]


def test_a_lone_server_with_another_model_at_another_address_is_not_ours():
    found, said = seen(Ours(base_url="http://127.0.0.1:8000", models=["ours"]), *THEIRS)
    assert found["running"] is None and "taken for others'" in said[0]
    found, said = seen(Ours(match={"job": "nobody"}), *THEIRS)
    assert found["running"] is None and "job=nobody" in said[0] and "theirs at 10.0.0.9:8000" in said[0]


def test_of_two_models_on_one_page_ours_is_chosen():
    page = [(metric, {key: labels[key] for key in ("model_name", "engine")}, values)
            for metric, labels, values in (*server("x", "ours"), *THEIRS)]
    assert seen(Ours(models=["ours"]), *page)[0]["running"] == 10
    found, said = seen(Ours(), *page)
    assert found["running"] is None and "several models on one page" in said[0]


def test_addresses_are_one_by_name_and_number():
    assert same_address("http://localhost:8000/v1", "127.0.0.1:8000") and same_address("https://[::1]", "::1") is False
    assert same_address("http://127.0.0.1:8000", "[::1]:8000")
    assert not same_address("http://localhost:8000", "localhost:8001")


@pytest.mark.parametrize("used", [2, 4, 6, 7])
@pytest.mark.parametrize("idle", [dict(active=0.0), dict(active=None), dict(active=0.0, memory=4.0),
                                  dict(active=0.0, memory=70_000.0)])
def test_gpus_that_do_nothing_are_in_no_mean_and_hold_nobody_back(used, idle):
    busy = {"active": None} if idle["active"] is None else {"memory": 70_000.0}
    series = [one for k in range(used) for one in gpu("n", k, **({**busy} if idle["active"] is not None else {}))] \
        if idle["active"] is not None else []
    if idle["active"] is None:  # power and clocks alone were recorded
        series = [(metric, labels, 650.0 if "POWER" in metric else value)
                  for k in range(used) for metric, labels, value in gpu("n", k, active=None)]
    series += [one for k in range(used, 8) for one in gpu("n", k, clock=345.0, **idle)]
    metrics = table(*series)
    found, report = window_summary(metrics, 0, 30), find_stragglers(metrics, 0, 30)
    assert report.gpus == used and not report.stragglers
    assert found["power_w"] == pytest.approx(550.0 if idle["active"] is not None else 650.0)
    assert found["sm_active_ratio"] in (None, pytest.approx(0.9))


def test_a_slow_gpu_among_those_at_work_is_still_found_beside_idle_ones():
    metrics = table(*(one for k in range(4) for one in gpu("n", k, clock=1300.0 if k == 2 else 1755.0)),
                    *(one for k in range(4, 8) for one in gpu("n", k, active=0.0, clock=345.0)))
    assert [one.gpu for one in find_stragglers(metrics, 0, 30).stragglers] == ["GPU-n-2"]


NODES = [*gpu("node1", 0, active=0.2), *gpu("node1", 1, active=0.2),
         *(one for k in range(6) for one in gpu("node9", k, active=0.95))]


@pytest.mark.parametrize("ours", [Ours(hosts=["node1"]), Ours(gpus=["GPU-node1-0", "node1-1"]),
                                  Ours(gpus=[0, 1], hosts=["node1"]), Ours(base_url="http://node1:8000", gpu_count=2)])
def test_our_gpus_are_found_by_host_uuid_index_and_address(ours):
    found, said = seen(ours, *NODES)
    assert found["gpus"] == 2 and found["sm_active_ratio"] == pytest.approx(0.2) and not said


def test_our_gpus_are_those_of_our_pod():
    pods = [(metric, {**labels, "exported_pod": "us-0" if labels["hostname"] == "node1" else "them"}, value)
            for metric, labels, value in NODES]
    found, _ = seen(Ours(models=["m"]), *server("10.0.0.1:8000", pod="us-0"), *pods)
    assert found["gpus"] == 2 and found["running"] == 10


@pytest.mark.parametrize("ours", [Ours(), Ours(gpu_count=4), Ours(gpus=[0])])
def test_of_gpus_that_cannot_be_told_apart_nothing_is_concluded(ours):
    found, said = seen(ours, *NODES)
    assert found["gpus"] == 0 and found["power_w"] is None
    assert "nothing is concluded" in said[0] and ("telemetry.gpus" in said[0] or "telemetry.hosts" in said[0])


def test_a_board_has_one_meter_for_its_pods_and_instances():
    board = {"gpu": "0", "UUID": "GPU-a", "hostname": "n"}
    sliced = [(metric, {**board, "pod": f"p{k}", "vgpu": str(k)}, value) for k in range(4) for metric, value in (
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 300_000 * TIMES), ("DCGM_FI_DEV_POWER_USAGE", 300.0),
        ("DCGM_FI_PROF_SM_ACTIVE", 0.5))]
    found = window_summary(table(*sliced), 0, 30)
    assert found["energy_mj"] == pytest.approx(9e6) and found["power_w"] == 300 and found["gpus"] == 1
    cut = [(metric, {**board, "GPU_I_ID": str(k), "GPU_I_PROFILE": "1g.10gb"}, active if "SM" in metric else value)
           for k, active in ((3, 0.9), (5, 0.4)) for metric, _, value in sliced[:3]]
    metrics = table(*cut)
    found = window_summary(metrics, 0, 30)
    assert found["energy_mj"] == pytest.approx(9e6) and found["gpus"] == 1
    assert list(grid(metrics, "DCGM_FI_PROF_SM_ACTIVE")) == ["GPU-a MIG 3", "GPU-a MIG 5"]
    found, said = seen(Ours(gpus=["GPU-a/3"]), *cut)
    assert found["sm_active_ratio"] == pytest.approx(0.9) and found["power_w"] == 300
    assert "whole board's" in said[0]


def test_a_meter_whose_pod_changes_goes_on():
    labels = {"UUID": "GPU-a", "hostname": "n", "pod": "one"}
    metrics = table(("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", labels, 1e3 * TIMES))
    later = metrics["time_s"] > 14
    metrics.loc[later, "labels"] = metrics.loc[later, "labels"].str.replace("one", "two")
    assert window_summary(metrics, 0, 30)["energy_mj"] == pytest.approx(30_000)


def test_engines_and_their_processes_stand_beside_the_sum():
    series = [("vllm:num_requests_running", {"engine": str(engine), "pid": str(pid)}, 30.0 + 30 * engine)
              for engine in (0, 1) for pid in (7, 8)]
    series += [("vllm:kv_cache_usage_perc", {"engine": str(engine), "pid": str(pid)}, usage)
               for engine, usage in ((0, 0.3), (1, 0.99)) for pid in (7, 8)]
    found = window_summary(table(*series), 0, 30)
    assert found["running"] == 180 and found["kv_usage_ratio"] == pytest.approx(0.645)
    assert [(one["engine"], one["running"], one["kv_usage_ratio"]) for one in found["by_engine"]] == \
        [("0", 60, pytest.approx(0.3)), ("1", 120, pytest.approx(0.99))]
