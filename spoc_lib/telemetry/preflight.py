"""Before a sweep: which telemetry is there, what is missing, and what each lack costs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from spoc_lib.config.access import Access
from spoc_lib.servers.metricnames import EXPECTED, canonical, engine_of
from spoc_lib.telemetry import dcgm, prometheus
from spoc_lib.telemetry.page import PageReader, ScrapeError
from spoc_lib.telemetry.parse import BadPage, parse

TIMEOUT_S = 3.0
#: The counters must be fresh at least this often for a straggler to be found within 10 s.
FRESH_S = 2.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. required: a sweep without it has no server side; cost: of its lack ('' when it is there)."""

    what: str
    present: bool
    required: bool
    detail: str
    cost: str = ""


def preflight(vllm_url: str | None, dcgm_url: str | None, prometheus_url: str | None,
              access: Access | None = None, headers: Mapping[str, str] | None = None) -> list[Finding]:
    """Look at the engine's page (reached as `access` says), dcgm-exporter's page and Prometheus (asked with `headers`);
    InputError for an address that is none."""
    found = _engine(vllm_url, access)
    found += _gpu(dcgm_url)
    return found + _prometheus(prometheus_url, headers)


def _page(url: str, access: Access | None = None) -> tuple[dict[str, list[tuple[str, float]]], str]:
    """({metric: [(labels, value)]}, '') or ({}, reason)."""
    reader = PageReader(url, TIMEOUT_S, access)
    try:
        page = reader.read()
        samples: dict[str, list[tuple[str, float]]] = {}
        for sample in parse(page.text):
            samples.setdefault(sample.metric, []).append((sample.labels, sample.value))
        return samples, ""
    except (ScrapeError, BadPage) as error:
        return {}, str(error)
    finally:
        reader.close()


def _engine(url: str | None, access: Access | None) -> list[Finding]:
    cost = "queue, KV usage, cache hits and preemptions are unknown: what saturates cannot be told"
    if not url:
        return [Finding("engine metrics page", False, True, "no address given", cost)]
    samples, reason = _page(url, access)
    if not samples:
        return [Finding("engine metrics page", False, True, f"{url}: {reason or 'the page is empty'}", cost)]
    there = {canonical(metric) for metric in samples}
    lacking = [metric for metric in EXPECTED if metric not in there]
    other = engine_of(set(samples))
    whose = f"a page of {other}'s, {len(EXPECTED) - len(lacking)} of whose metrics are read as vLLM's" if other else \
        f"{len(samples)} metrics"
    return [Finding("engine metrics page", True, True, f"{url}: {whose}"),
            Finding("engine metrics complete", not lacking, True, ", ".join(lacking) or "all that a sweep reads",
                    "what depends on them is left out" if lacking else "")]


def _gpu(url: str | None) -> list[Finding]:
    cost = "how busy, hot and fast each GPU is stays unknown, and a throttled GPU hidden"
    if not url:
        return [Finding("DCGM page", False, False, "no address given", cost)]
    samples, reason = _page(url)
    if not samples:
        return [Finding("DCGM page", False, False, f"{url}: {reason}", cost)]
    boards = {dcgm.gpu_of(orjson.loads(labels))
              for labels, _ in samples.get("DCGM_FI_DEV_SM_CLOCK", samples.get("DCGM_FI_DEV_GPU_TEMP", []))}
    found = [Finding("DCGM page", True, False, f"{url}: {len(boards)} GPUs")]
    for counter in dcgm.COUNTERS:
        values = [value for name in dcgm.aliases(counter.field) for _, value in samples.get(name, [])]
        supported = [value for value in values if not dcgm.unsupported(value)]
        detail = f"{len(supported)} of {len(values)} GPUs" if values else \
            "not exported" + ("" if counter.default_on else ": off by default, use the workbench's counters file")
        if values and not supported:
            detail = "exported as 'not supported' (profiling fields need SYS_ADMIN)"
        found.append(Finding(counter.field, bool(supported), False, detail, "" if supported else counter.cost))
    return [*found, _freshness(url)]


def _freshness(url: str) -> Finding:
    """Does the exporter read its counters about once a second? Its energy counter moves even when a GPU idles."""
    began, first = time.monotonic(), None
    while time.monotonic() - began < FRESH_S:
        samples, _ = _page(url)
        energy = samples.get("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")
        if not energy:
            return Finding("DCGM interval", False, False, "unknown: no energy counter to tell by",
                           "counters may be 30 s old, the exporter's default")
        if first is not None and energy != first:
            return Finding("DCGM interval", True, False, f"values change within {FRESH_S:g} s")
        first = first or energy
        time.sleep(0.25)
    return Finding("DCGM interval", False, False, f"values did not change for {FRESH_S:g} s: start it with -c 1000",
                   "short events, such as a throttled GPU, are seen late or not at all")


def _prometheus(url: str | None, headers: Mapping[str, str] | None) -> list[Finding]:
    cost = "telemetry is recorded by a direct scrape and ends with the run"
    if not url:
        return [Finding("Prometheus", False, False, "no address given", cost)]
    client = prometheus.connect(url, TIMEOUT_S, headers)
    try:
        skew_s = prometheus.clock_skew(client, TIMEOUT_S)
    except prometheus.PrometheusUnavailable as error:
        return [Finding("Prometheus", False, False, error.message, cost)]
    targets = prometheus.targets(client, TIMEOUT_S)
    told = "it lists no targets" if targets is None else f"{len(targets)} targets"
    skewed = abs(skew_s) > prometheus.SKEW_S
    found = [Finding("Prometheus", True, False, f"{url}: {told}"),
             Finding("clock of Prometheus", not skewed, False, f"{skew_s:+.2f} s from this host",
                     "samples are shifted by it before use; run NTP on both hosts" if skewed else "")]
    for target in targets or ():
        interval = prometheus.seconds(str(target.get("scrapeInterval") or "")) or None
        labels = target.get("labels") or {}
        up, coarse = target.get("health") == "up", interval is not None and interval > 2
        detail = f"{target.get('health', 'unknown')}" + (f", every {interval:g} s" if interval else "") + \
            (f": {target['lastError']}" if target.get("lastError") else "")
        found.append(Finding(
            f"target {labels.get('job', '?')} {labels.get('instance', '?')}", up and not coarse,
            False, detail, "its series are missing" if not up else
            "events shorter than the interval are not seen: scrape every second" if coarse else ""))
    return found
