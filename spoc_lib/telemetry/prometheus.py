"""Telemetry from a Prometheus server, into the same METRICS table as the recorder's.

Range queries through prometheus-api-client (`custom_query_range`), whose traps are handled here: it has no default
timeout, retries for long, rounds times to whole seconds, and the server refuses more than 11 000 points a series.
A range query evaluates the series at whole steps and looks back for the last sample, so a value may be as old as
the scrape interval: `alignment_error_s` is that interval plus the second that the rounding may cost.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

import numpy as np
import pandas as pd
import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.util.retry import Retry

from spoc_lib.core.clock import Anchor
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import as_table
from spoc_lib.servers.metricnames import QUERY, canonical
from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.parse import labels_json
from spoc_lib.telemetry.recorder import restarts, source_of
from spoc_lib.telemetry.whose import Ours

#: The server's limit is 11 000 points a series; a query stays below it.
MOST_POINTS = 10_000
TIMEOUT_S = 10.0
#: Clocks of two hosts closer than this are taken as one (the question itself takes a few milliseconds).
SKEW_S = 0.5
#: What a rung needs: all of the server's families, and all of DCGM's; MATCH takes the labels of `Ours.match`.
MATCH = "<match>"
RUN_QUERIES = (f'{{__name__=~"{QUERY}",__name__!~".+_created"{MATCH}}}', '{__name__=~"DCGM_.+"}')
#: Present on every page of an engine, from its first scrape on: by it the times of the scrapes are told.
SCRAPED = "vllm:num_requests_running"
#: The same of each source, under any of its names.
STAMPS = {"vllm": f'timestamp({{__name__=~"(ray_)?vllm[:_]num_requests_running|sglang:num_running_reqs"{MATCH}}})',
          "dcgm": "timestamp(DCGM_FI_DEV_SM_CLOCK)"}


class PrometheusUnavailable(SpocError):
    """Prometheus did not answer, or refused the query."""


@dataclass(frozen=True)
class Fetched:
    """`metrics`: METRICS; `problems`: sentences (empty queries, gaps, restarts, unsupported counters, others' series);
    `alignment_error_s`: how far a value may lie from its time stamp; `holes`: times that Prometheus was away for;
    `interval_s`: seconds between its scrapes of the server and of the GPUs, by source, where known."""

    metrics: pd.DataFrame
    problems: list[str] = field(default_factory=list)
    alignment_error_s: float = 0.0
    holes: int = 0
    interval_s: dict[str, float] = field(default_factory=dict)


def connect(url: str, timeout_s: float = TIMEOUT_S, headers: Mapping[str, str] | None = None) -> PrometheusConnect:
    """A client that gives up: one retry of a refused connection, `timeout_s` a query; `headers` carry a credential.

    Loopback and private addresses are asked directly, as the load does; others through the proxy that the environment
    names for them (HTTP_PROXY, HTTPS_PROXY, NO_PROXY).
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError("bad-url", f"prometheus_url: '{url}' is no address: it must look like http://host:9090")
    retry = Retry(total=1, connect=1, read=0, backoff_factor=0.2)
    session = requests.Session()
    session.trust_env = False  # no netrc, no proxy on the way to this machine
    session.headers.update(headers or {})
    session.proxies = _proxies(url)
    session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or True
    return PrometheusConnect(url=url.rstrip("/"), timeout=timeout_s, retry=retry, session=session)


def _proxies(url: str) -> dict[str, str]:
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
        near = address.is_loopback or address.is_private or address.is_link_local
    except ValueError:
        near = "." not in host or host.endswith((".local", ".localhost", ".internal", ".svc", ".lan"))
    return {} if near else dict(requests.utils.get_environ_proxies(url))


def _through(client: PrometheusConnect) -> str:
    """How it was asked, where that may be why it does not answer."""
    proxy = client._session.proxies.get(urlsplit(client.url).scheme)
    return f" through the environment's proxy {urlsplit(proxy).hostname} (NO_PROXY leaves a host out)" if proxy else ""


def _get(client: PrometheusConnect, path: str, params: Mapping[str, str], timeout_s: float) -> dict:
    """`data` of an answer of its API. Raises PrometheusUnavailable."""
    try:
        answer = client._session.get(f"{client.url}/api/v1/{path}", params=params, timeout=timeout_s)
    except requests.exceptions.RequestException as error:
        raise _away(client, timeout_s, error) from error
    if answer.status_code in (401, 403):
        raise _refused(client, answer.status_code)
    try:
        return answer.json()["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise _garbled(client) from error


def _away(client: PrometheusConnect, timeout_s: float, error: Exception) -> PrometheusUnavailable:
    if isinstance(error, requests.exceptions.Timeout):
        return PrometheusUnavailable("prometheus-timeout", f"Prometheus at {client.url} did not answer within "
                                     f"{timeout_s:g} s{_through(client)}")
    why = " (its certificate is not trusted: SSL_CERT_FILE names an authority's file)" \
        if isinstance(error, requests.exceptions.SSLError) else ""
    return PrometheusUnavailable("prometheus-down", f"Prometheus at {client.url} cannot be reached{_through(client)}"
                                 f"{why}")


def _refused(client: PrometheusConnect, status: int) -> PrometheusUnavailable:
    return PrometheusUnavailable("prometheus-refused", f"Prometheus at {client.url} wants a credential (HTTP status "
                                 f"{status}): name its environment variable in telemetry.auth_env")


def _garbled(client: PrometheusConnect) -> PrometheusUnavailable:
    return PrometheusUnavailable("prometheus-garbled", f"{client.url} does not answer as Prometheus does")


def fetch(prometheus_url: str, queries: Sequence[str], start_wall_s: float, end_wall_s: float, step_s: float,
          anchor: Anchor, *, timeout_s: float = TIMEOUT_S) -> pd.DataFrame:
    """METRICS of PromQL `queries` between two Unix times, at `step_s`, on the monotonic clock of `anchor`.

    A result's name is its `__name__`, or the query where a function has taken it away. Values that DCGM means as
    "unsupported" and NaN are left out. Raises PrometheusUnavailable when the server does not answer in time or
    refuses; InputError for a bad address or step.
    """
    return fetch_run(prometheus_url, start_wall_s, end_wall_s, anchor=anchor, queries=queries, step_s=step_s,
                     timeout_s=timeout_s).metrics


def fetch_run(prometheus_url: str, start_wall_s: float, end_wall_s: float, *, anchor: Anchor,
              queries: Sequence[str] = RUN_QUERIES, step_s: float = 1.0, ours: Ours | None = None,
              headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Fetched:
    """`fetch` with what there is to say about it. By default: every series of the server (of `ours`, as far as it can
    be told) and of its GPUs."""
    if not step_s > 0 or end_wall_s < start_wall_s:
        raise InputError("bad-range", f"step_s must be above 0 and the range forward, not {step_s:g} s from "
                         f"{start_wall_s:.0f} to {end_wall_s:.0f}")
    ours = ours or Ours()
    client = connect(prometheus_url, timeout_s, headers)
    skew_s = clock_skew(client, timeout_s)
    skew_s = skew_s if abs(skew_s) > SKEW_S else 0.0
    problems = [f"the clock of Prometheus at {prometheus_url} is {skew_s:+.1f} s from this host's: its samples are "
                f"shifted by that"] if skew_s else []
    theirs = Anchor(anchor.monotonic_s, anchor.wall_s + skew_s)
    spans = list(_spans(start_wall_s + skew_s, end_wall_s + skew_s, step_s))
    matched = "".join(f",{name}=~{json.dumps(pattern)}" for name, pattern in ours.match.items())
    rows: list[dict] = []
    unsupported: set[str] = set()
    for asked in queries:
        query, found = asked.replace(MATCH, matched), 0
        for begin, end in spans:
            results = _query(client, query, begin, end, step_s, timeout_s)
            found += len(results)
            named = {_named(result["metric"], query) for result in results}
            for result in results:
                name, *server = _named(result["metric"], query)
                if canonical(name) == name or (canonical(name), *server) not in named:  # two names: the newer's samples
                    rows += _samples(result, query, theirs, unsupported)
        if not found:
            what = {RUN_QUERIES[0]: "a server's metrics", RUN_QUERIES[1]: "DCGM's metrics"}.get(asked, query)
            what += f" with {matched.lstrip(',')} (telemetry.match)" if matched in query and matched else ""
            problems.append(f"Prometheus at {prometheus_url} has nothing for {what} in this time: is the target "
                            f"scraped, and under this name?")
    metrics, said = ours.kept(as_table(rows, METRICS).to_pandas(), f"Prometheus at {prometheus_url}")
    problems += [f"{metric} is reported as 'not supported'; left out, not plotted" for metric in sorted(unsupported)]
    problems += said
    intervals, holes = {}, 0
    for source, query in STAMPS.items():
        stamps = [] if source not in set(metrics["source"]) else [
            times for begin, end in spans
            for result in _query(client, query.replace(MATCH, matched), begin, end, step_s, timeout_s)
            if (times := sorted({float(text) for _, text in result["values"]}))]
        steps = [float(np.median(np.diff(times))) for times in stamps if len(times) > 1]
        told = float(np.median(steps)) if steps else scrape_interval(client, timeout_s)
        if told:
            intervals[source] = told
        if source == "vllm":
            metrics, holes = _without_holes(metrics, sorted({one for times in stamps for one in times}), theirs, step_s,
                                            told)
    origin_s = anchor.to_monotonic(start_wall_s)
    problems += restarts(metrics, origin_s) + gaps(metrics, origin_s, step_s)
    return Fetched(metrics, problems, max(intervals.values(), default=0.0) + 1.0, holes, intervals)


def _without_holes(metrics: pd.DataFrame, scraped: Sequence[float], anchor: Anchor, step_s: float,
                   interval_s: float) -> tuple[pd.DataFrame, int]:
    """Without the times between which Prometheus itself scraped nothing: a range query repeats its last samples there
    for five minutes as if they were new. And how many such times there are."""
    holes = [(before, after) for before, after in itertools.pairwise(scraped)
             if after - before > 2.5 * max(step_s, interval_s)]
    for before, after in holes:
        inside = metrics["time_s"].between(anchor.to_monotonic(before) + step_s, anchor.to_monotonic(after),
                                           inclusive="neither")
        metrics = metrics[~inside].reset_index(drop=True)
    return metrics, len(holes)


def _spans(start_s: float, end_s: float, step_s: float) -> Iterator[tuple[int, int]]:
    """Whole-second spans of at most MOST_POINTS steps each; the next one starts one step after the last ended."""
    begin, last = int(start_s), int(end_s) + 1
    length = max(int((MOST_POINTS - 1) * step_s), 1)
    while begin <= last:
        end = min(begin + length, last)
        yield begin, end
        begin = end + max(1, int(round(step_s)))


def _query(client: PrometheusConnect, query: str, begin: int, end: int, step_s: float, timeout_s: float) -> list[dict]:
    try:
        return client.custom_query_range(
            query, datetime.fromtimestamp(begin, UTC), datetime.fromtimestamp(end, UTC), f"{step_s:g}",
            params={"timeout": f"{timeout_s:g}s"}, timeout=timeout_s)
    except requests.exceptions.RequestException as error:
        raise _away(client, timeout_s, error) from error
    except PrometheusApiClientException as error:
        if status := re.match(r"HTTP Status Code (401|403)", str(error)):
            raise _refused(client, int(status[1])) from error
        raise PrometheusUnavailable("prometheus-refused", f"Prometheus at {client.url} refused the query {query}: "
                                    f"{str(error):.200}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise _garbled(client) from error


def _named(labels: Mapping[str, str], query: str) -> tuple[str, ...]:
    return labels.get("__name__", query), labels.get("instance", ""), labels.get("pod", "")


def _samples(result: Mapping, query: str, anchor: Anchor, unsupported: set[str]) -> Iterator[dict]:
    metric = canonical(result["metric"].get("__name__", query))
    labels = labels_json({key: value for key, value in result["metric"].items() if key != "__name__"})
    for wall_s, text in result["values"]:
        value = float(text)
        if dcgm.is_dcgm(metric) and dcgm.unsupported(value):
            unsupported.add(metric)
        elif value == value:
            yield {"source": source_of(metric), "metric": metric, "labels": labels,
                   "time_s": anchor.to_monotonic(float(wall_s)), "value": value}


def gaps(metrics: pd.DataFrame, origin_s: float, step_s: float) -> list[str]:
    """A sentence for each hole in the server's series: it was down, or Prometheus was, or the scrapes failed."""
    said = []
    times = metrics.loc[metrics["metric"] == SCRAPED, "time_s"].drop_duplicates().sort_values()
    for begin, span in zip(times, times.diff().shift(-1), strict=True):
        if span > 2.5 * step_s:
            said.append(f"no samples from {begin - origin_s:.0f} to {begin + span - origin_s:.0f} s: the server or "
                        f"Prometheus did not answer")
    return said


def clock_skew(client: PrometheusConnect, timeout_s: float = TIMEOUT_S) -> float:
    """Prometheus's clock minus this host's, in seconds, good to half the time that the question takes. A scalar is
    [time, value]; other stores answer a vector of one."""
    asked = time.time()
    data = _get(client, "query", {"query": "time()"}, timeout_s)
    answered = time.time()
    try:
        found = data["result"]
        theirs = float((found[0]["value"] if data.get("resultType") == "vector" or isinstance(found[0], Mapping)
                        else found)[1])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _garbled(client) from error
    return theirs - (asked + answered) / 2


def targets(client: PrometheusConnect, timeout_s: float = TIMEOUT_S) -> list[dict] | None:
    """Its active targets; None where the store has no such list (VictoriaMetrics' cluster, Thanos, Mimir)."""
    try:
        data = _get(client, "targets", {"state": "active"}, timeout_s)
    except PrometheusUnavailable:
        return None
    found = data.get("activeTargets") if isinstance(data, Mapping) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else None


def scrape_interval(client: PrometheusConnect, timeout_s: float = TIMEOUT_S) -> float:
    """The longest scrape interval of its targets in seconds; 0 when it does not say."""
    return max((seconds(str(one.get("scrapeInterval") or "")) for one in targets(client, timeout_s) or ()), default=0.0)


def seconds(text: str) -> float:
    """`500ms`, `1s`, `1m30s` in seconds."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)(ms|s|m|h)", text))
