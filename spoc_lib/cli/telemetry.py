"""`spoc telemetry`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from spoc_lib.cli.output import JsonOption, emit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="What server and GPUs report: deploy Prometheus, record without it, see what is missing.")

Cluster = Annotated[str | None, typer.Argument(metavar="[CLUSTER]", help="cluster whose endpoints are meant")]
VllmUrl = Annotated[str | None, typer.Option("--vllm-url", help="the engine's metrics page")]
DcgmUrl = Annotated[str | None, typer.Option("--dcgm-url", help="dcgm-exporter's metrics page")]


@app.command("up")
def up(
    vllm_url: Annotated[list[str], typer.Option("--vllm-url", help="an engine's metrics page; may be repeated")],
    dcgm_url: Annotated[list[str] | None, typer.Option(
        "--dcgm-url", help="a dcgm-exporter that is there already; default: the one of the compose file")] = None,
    interval: Annotated[float, typer.Option(help="seconds between scrapes")] = 1.0,
    out: Annotated[Path, typer.Option(help="folder for the files")] = Path("telemetry"),
    json: JsonOption = None,
) -> None:
    """Write what is deployed beside a real server: prometheus.yml, counters for dcgm-exporter, compose, Kubernetes.

    Example: spoc telemetry up --vllm-url http://127.0.0.1:8000/metrics --out telemetry
    """
    from spoc_lib.telemetry.deploy import write_deployment

    paths = write_deployment(out, vllm_url, dcgm_url or (), interval)
    emit({"files": paths}, json, "\n".join([
        *(f"wrote {path}" for path in paths),
        f"start it with: docker compose -f {out / 'compose.yaml'} up -d   (or: kubectl apply -f "
        f"{out / 'kubernetes.yaml'})",
        "then: spoc telemetry preflight --prometheus-url http://127.0.0.1:9090 --dcgm-url "
        "http://127.0.0.1:9400/metrics"]))


@app.command("record")
def record(
    vllm_url: VllmUrl = None,
    dcgm_url: DcgmUrl = None,
    duration: Annotated[float, typer.Option(min=0.1, help="seconds to record; Ctrl-C ends it earlier")] = 60.0,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between scrapes")] = 1.0,
    out: Annotated[Path, typer.Option(help="Parquet file for the samples")] = Path("metrics.parquet"),
    json: JsonOption = None,
) -> None:
    """Record the metrics pages of a server and its GPUs directly, without a Prometheus. Exit 1 when nothing came.

    Example: spoc telemetry record --vllm-url http://127.0.0.1:8000/metrics --duration 30 --out metrics.parquet
    """
    from spoc_lib.core.errors import InputError
    from spoc_lib.telemetry.recorder import Recorder
    from spoc_lib.telemetry.timeline import window_summary

    if not vllm_url and not dcgm_url:
        raise InputError("no-target", "nothing to record: give --vllm-url, --dcgm-url or both")
    try:
        with Recorder(vllm_url, dcgm_url, out, interval) as recorder:
            time.sleep(duration)
    except KeyboardInterrupt:
        print("spoc: interrupted; what was recorded so far is kept", file=sys.stderr)
    aligned_s = recorder.alignment_error_s
    found: dict[str, Any] = {
        "file": out, "samples": len(recorder.metrics), "alignment_error_s": aligned_s,
        "overhead_ratio": recorder.overhead(), "problems": recorder.problems,
        "window": window_summary(recorder.metrics, recorder.started_s, recorder.ended_s)}
    emit(found, json, "\n".join([
        f"{found['samples']} samples in {out}; time stamps good to {1e3 * aligned_s:.1f} ms",
        *recorder.problems]))
    if not len(recorder.metrics):
        raise typer.Exit(1)


@app.command("preflight")
def preflight(
    cluster: Cluster = None,
    vllm_url: VllmUrl = None,
    dcgm_url: DcgmUrl = None,
    prometheus_url: Annotated[str | None, typer.Option("--prometheus-url", help="a Prometheus server")] = None,
    json: JsonOption = None,
) -> None:
    """Say which telemetry is there, what is missing, and what each lack costs. Exit 1 when the engine's page lacks.

    Example: spoc telemetry preflight --vllm-url http://127.0.0.1:8000/metrics --dcgm-url http://127.0.0.1:9400/metrics
    """
    from spoc_lib.core.errors import InputError
    from spoc_lib.telemetry.preflight import preflight as look

    access, headers = None, None
    if cluster:
        from spoc_lib.config import load_cluster
        from spoc_lib.config.cluster import metrics_page

        spec = load_cluster(cluster)
        dcgm_url = dcgm_url or spec.telemetry.dcgm_url
        prometheus_url, headers = prometheus_url or spec.telemetry.prometheus_url, spec.telemetry.credential()
        if vllm_url is None and spec.engine.base_url:
            vllm_url, access = metrics_page(spec, spec.engine.base_url)
    if not (vllm_url or dcgm_url or prometheus_url):
        raise InputError("no-target", "nothing to look at: no address is known; give --vllm-url, --dcgm-url or "
                         "--prometheus-url")
    found = look(vllm_url, dcgm_url, prometheus_url, access, headers)
    ready = all(finding.present for finding in found if finding.required)
    lines = [f"{'ok     ' if one.present else 'MISSING'} {one.what}: {one.detail}"
             + (f" -> {one.cost}" if one.cost else "") for one in found]
    emit({"ready": ready, "findings": found}, json, "\n".join(lines))
    if not ready:
        raise typer.Exit(1)
