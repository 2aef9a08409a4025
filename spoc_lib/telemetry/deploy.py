"""What a user deploys beside a real server: Prometheus and dcgm-exporter with the workbench's own counters at 1 s.

dcgm-exporter's own defaults would not do: it reads every 30 s, and SM activity, violations and clock events are off.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import write_text
from spoc_lib.telemetry import dcgm

PROMETHEUS_IMAGE = "docker.io/prom/prometheus:v2.53.4"
DCGM_IMAGE = "nvcr.io/nvidia/k8s/dcgm-exporter:4.2.3-4.1.3-ubuntu22.04"
DCGM_PORT, PROMETHEUS_PORT = 9400, 9090
COUNTERS_FILE = "dcgm-counters.csv"
NAMESPACE = "spoc-telemetry"


def write_deployment(folder: str | Path, vllm_urls: Sequence[str], dcgm_urls: Sequence[str] = (),
                     interval_s: float = 1.0) -> list[Path]:
    """Write the files of a telemetry deployment into `folder`; returns their paths.

    vllm_urls: metrics pages (or base addresses) of the engines; dcgm_urls: of dcgm-exporters that are there already
    (none: the one of the compose file, port 9400 beside Prometheus); interval_s: scrape and collect interval.
    prometheus.yml, dcgm-counters.csv, compose.yaml, kubernetes.yaml. InputError for an address that is none.
    """
    if not vllm_urls:
        raise InputError("no-target", "--vllm-url: at least one engine must be scraped, for example "
                         "http://127.0.0.1:8000/metrics")
    if not 0.1 <= interval_s <= 60:
        raise InputError("bad-interval", f"--interval: {interval_s:g} s must be between 0.1 and 60 s")
    folder = Path(folder)
    return [
        write_text(folder / "prometheus.yml", _yaml(prometheus_config(
            vllm_urls, dcgm_urls or [f"http://127.0.0.1:{DCGM_PORT}/metrics"], interval_s))),
        write_text(folder / COUNTERS_FILE, dcgm.counters_csv()),
        write_text(folder / "compose.yaml", _yaml(_compose(interval_s))),
        write_text(folder / "kubernetes.yaml", "---\n".join(_yaml(one) for one in _kubernetes(vllm_urls, interval_s))),
    ]


def prometheus_config(vllm_urls: Sequence[str], dcgm_urls: Sequence[str], interval_s: float) -> dict:
    """Contents of prometheus.yml. `honor_labels` keeps the pages' own labels, so that both ways of reading give one
    table; the timeout never exceeds the interval (Prometheus refuses that)."""
    interval = _duration(interval_s)
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "15s"},
        "scrape_configs": [_job("vllm", vllm_urls), _job("dcgm", dcgm_urls)],
    }


def _job(name: str, urls: Sequence[str]) -> dict:
    groups: dict[tuple[str, str], list[str]] = {}
    for url in urls:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("bad-url", f"'{url}' is no metrics address: it must look like http://host:port/metrics")
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        groups.setdefault((parts.scheme, path), []).append(parts.netloc)
    if len(groups) != 1:
        raise InputError("mixed-targets", f"the {name} addresses must share scheme and path; given: "
                         f"{', '.join(urls)}")
    (scheme, path), targets = next(iter(groups.items()))
    return {"job_name": name, "honor_labels": True, "scheme": scheme, "metrics_path": path,
            "static_configs": [{"targets": targets}]}


def _duration(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{seconds * 1000:.0f}ms"


def _exporter_arguments(interval_s: float) -> list[str]:
    return ["-f", f"/etc/spoc/{COUNTERS_FILE}", "-c", f"{interval_s * 1000:.0f}"]


def _compose(interval_s: float) -> dict:
    """Prometheus shares the host's network, so it reaches an engine that listens on 127.0.0.1 only, as itself does;
    SYS_ADMIN is what profiling fields (SM_ACTIVE, DRAM_ACTIVE, …) need."""
    return {
        "services": {
            "dcgm-exporter": {
                "image": DCGM_IMAGE, "command": _exporter_arguments(interval_s), "cap_add": ["SYS_ADMIN"],
                "volumes": [f"./{COUNTERS_FILE}:/etc/spoc/{COUNTERS_FILE}:ro"],
                "ports": [f"127.0.0.1:{DCGM_PORT}:{DCGM_PORT}"], "restart": "unless-stopped",
                "deploy": {"resources": {"reservations": {"devices": [
                    {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]}}},
            },
            "prometheus": {
                "image": PROMETHEUS_IMAGE, "network_mode": "host",
                "command": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus",
                            "--storage.tsdb.retention.time=15d",
                            f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}"],
                "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro", "prometheus:/prometheus"],
                "restart": "unless-stopped",
            },
        },
        "volumes": {"prometheus": {}},
    }


def _kubernetes(vllm_urls: Sequence[str], interval_s: float) -> list[dict]:
    """A namespace with dcgm-exporter on every GPU node and one Prometheus that finds its pods by DNS."""
    labels = {"app.kubernetes.io/part-of": NAMESPACE}

    def meta(name: str) -> dict:
        return {"name": name, "namespace": NAMESPACE, "labels": {**labels, "app": name}}

    def pod(name: str, spec: dict) -> dict:
        return {"selector": {"matchLabels": {"app": name}},
                "template": {"metadata": {"labels": {**labels, "app": name}}, "spec": spec}}

    config = prometheus_config(vllm_urls, [f"dcgm-exporter:{DCGM_PORT}"], interval_s)
    config["scrape_configs"][1] = {
        "job_name": "dcgm", "honor_labels": True,
        "dns_sd_configs": [{"names": [f"dcgm-exporter.{NAMESPACE}.svc.cluster.local"], "type": "A", "port": DCGM_PORT}]}
    exporter = {
        "containers": [{
            "name": "dcgm-exporter", "image": DCGM_IMAGE, "args": _exporter_arguments(interval_s),
            "ports": [{"name": "metrics", "containerPort": DCGM_PORT}],
            "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}},
            "volumeMounts": [{"name": "counters", "mountPath": "/etc/spoc", "readOnly": True}]}],
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": [{"name": "counters", "configMap": {"name": "dcgm-counters"}}]}
    server = {
        "containers": [{
            "name": "prometheus", "image": PROMETHEUS_IMAGE,
            "args": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"],
            "ports": [{"name": "http", "containerPort": PROMETHEUS_PORT}],
            "volumeMounts": [{"name": "config", "mountPath": "/etc/prometheus", "readOnly": True},
                             {"name": "data", "mountPath": "/prometheus"}]}],
        "securityContext": {"fsGroup": 65534},
        "volumes": [{"name": "config", "configMap": {"name": "prometheus"}}, {"name": "data", "emptyDir": {}}]}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("dcgm-counters"),
         "data": {COUNTERS_FILE: dcgm.counters_csv()}},
        {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta("dcgm-exporter"),
         "spec": pod("dcgm-exporter", exporter)},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta("dcgm-exporter"),
         "spec": {"clusterIP": "None", "selector": {"app": "dcgm-exporter"},
                  "ports": [{"name": "metrics", "port": DCGM_PORT}]}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("prometheus"),
         "data": {"prometheus.yml": _yaml(config)}},
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta("prometheus"),
         "spec": {"replicas": 1, **pod("prometheus", server)}},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta("prometheus"),
         "spec": {"selector": {"app": "prometheus"}, "ports": [{"name": "http", "port": PROMETHEUS_PORT}]}},
    ]


class _Dumper(yaml.SafeDumper):
    """Multi-line texts as blocks, and no anchors: the files are read by people."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None))


def _yaml(value: dict) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120)
