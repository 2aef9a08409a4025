"""What is deployed hangs together: every name that one object uses, another defines. (Prometheus's own check of its
configuration is in `test_prometheus`.)"""

from __future__ import annotations

import csv

import pytest
import yaml

from spoc_lib.core.errors import InputError
from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.deploy import write_deployment


@pytest.fixture
def folder(tmp_path):
    write_deployment(tmp_path, ["http://10.0.0.1:8000/metrics"], interval_s=0.5)
    return tmp_path


def test_the_counters_file_has_three_columns_a_field_and_asks_for_what_is_off_by_default(folder):
    lines = [line for line in (folder / "dcgm-counters.csv").read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.reader(lines, skipinitialspace=True))
    assert all(len(row) == 3 for row in rows) and len({row[0] for row in rows}) == len(rows) == len(dcgm.COUNTERS)
    assert {kind for _, kind, _ in rows} <= {"gauge", "counter", "histogram", "label"}
    fields = {field for field, *_ in rows}
    assert {"DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_THERMAL_VIOLATION", "DCGM_FI_DEV_POWER_VIOLATION",
            "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"} <= fields


def test_kubernetes_objects_find_one_another(folder):
    objects = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))
    named = {(one["kind"], one["metadata"]["name"]) for one in objects}
    (namespace,) = [one["metadata"]["name"] for one in objects if one["kind"] == "Namespace"]
    workloads = [one for one in objects if one["kind"] in ("DaemonSet", "Deployment")]
    assert len(named) == len(objects) and len(workloads) == 2
    for one in workloads:
        spec = one["spec"]["template"]["spec"]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            assert "configMap" not in volume or ("ConfigMap", volume["configMap"]["name"]) in named
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in workloads]
    for service in (one for one in objects if one["kind"] == "Service"):
        assert any(service["spec"]["selector"].items() <= labels.items() for labels in pods)
    assert {one["metadata"].get("namespace", namespace) for one in objects} == {namespace}
    config = next(one for one in objects if one["metadata"]["name"] == "prometheus" and one["kind"] == "ConfigMap")
    jobs = {job["job_name"]: job for job in yaml.safe_load(config["data"]["prometheus.yml"])["scrape_configs"]}
    host = jobs["dcgm"]["dns_sd_configs"][0]["names"][0].split(".")
    assert ("Service", host[0]) in named and host[1] == namespace


def test_compose_mounts_what_was_written_and_reads_as_often_as_asked(folder):
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    for service in services.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert not source.startswith("./") or (folder / source).is_file()
    assert services["dcgm-exporter"]["command"][-2:] == ["-c", "500"]
    scrape = yaml.safe_load((folder / "prometheus.yml").read_text())["global"]
    assert scrape["scrape_interval"] == scrape["scrape_timeout"] == "500ms"


@pytest.mark.parametrize("urls, interval_s, said", [
    ([], 1.0, "at least one engine"), (["10.0.0.1:8000"], 0.0, "between 0.1 and 60 s"),
    (["ftp://host/metrics"], 1.0, "must look like http://host:port/metrics"),
    (["http://a:1/metrics", "http://b:2/other"], 1.0, "must share scheme and path")])
def test_a_deployment_that_cannot_work_is_refused(tmp_path, urls, interval_s, said):
    with pytest.raises(InputError, match=said):
        write_deployment(tmp_path, urls, interval_s=interval_s)
