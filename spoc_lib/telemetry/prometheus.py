"""Telemetry from a Prometheus server, into the same METRICS table as the recorder's.

Range queries through prometheus-api-client (`custom_query_range`), whose traps are handled here: it has no default
timeout, retries for long, rounds times to whole seconds, and the server refuses more than 11 000 points a series.
A range query evaluates the series at whole steps and looks back for the last sample, so a value may be as old as
the scrape interval: `alignment_error_s` is that interval plus the second that the rounding may cost.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pandas as pd
import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.util.retry import Retry

from spoc_lib.core.clock import Anchor
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import as_table
from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.parse import labels_json
from spoc_lib.telemetry.recorder import restarts, source_of

#: The server's limit is 11 000 points a series; a query stays below it.
MOST_POINTS = 10_000
TIMEOUT_S = 10.0
#: Clocks of two hosts closer than this are taken as one (the question itself takes a few milliseconds).
SKEW_S = 0.5
#: Labels that Prometheus adds on its own account: without them the series are those of the page itself.
ADDED_LABELS = ("__name__", "job", "instance", "monitor")
#: What a rung needs: all of vLLM's families, the embedded engine's own on its clock, and all of DCGM's.
RUN_QUERIES = ('{__name__=~"vllm:.+|spoc:(clock_resets|step_lag).+",__name__!~".+_created"}', '{__name__=~"DCGM_.+"}')
#: Present on every page of an engine, from its first scrape on: by it the times of the scrapes are told.
SCRAPED = "vllm:num_requests_running"


class PrometheusUnavailable(SpocError):
    """Prometheus did not answer, or refused the query."""


@dataclass(frozen=True)
class Fetched:
    """`metrics`: METRICS; `problems`: sentences (empty queries, gaps, restarts, unsupported counters);
    `alignment_error_s`: how far a value may lie from its time stamp; `holes`: times that Prometheus was away for."""

    metrics: pd.DataFrame
    problems: list[str] = field(default_factory=list)
    alignment_error_s: float = 0.0
    holes: int = 0


def connect(url: str, timeout_s: float = TIMEOUT_S) -> PrometheusConnect:
    """A client that gives up: one retry of a refused connection, `timeout_s` a query."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError("bad-url", f"prometheus_url: '{url}' is no address: it must look like http://host:9090")
    retry = Retry(total=1, connect=1, read=0, backoff_factor=0.2)
    return PrometheusConnect(url=url.rstrip("/"), timeout=timeout_s, retry=retry)


def fetch(prometheus_url: str, queries: Sequence[str], start_wall_s: float, end_wall_s: float, step_s: float,
          anchor: Anchor, *, drop_labels: Sequence[str] = ADDED_LABELS, timeout_s: float = TIMEOUT_S) -> pd.DataFrame:
    """METRICS of PromQL `queries` between two Unix times, at `step_s`, on the monotonic clock of `anchor`.

    A result's name is its `__name__`, or the query where a function has taken it away. Values that DCGM means as
    "unsupported" and NaN are left out. Raises PrometheusUnavailable when the server does not answer in time or
    refuses; InputError for a bad address or step.
    """
    return fetch_run(prometheus_url, start_wall_s, end_wall_s, anchor=anchor, queries=queries, step_s=step_s,
                     drop_labels=drop_labels, timeout_s=timeout_s).metrics


def fetch_run(prometheus_url: str, start_wall_s: float, end_wall_s: float, *, anchor: Anchor,
              queries: Sequence[str] = RUN_QUERIES, step_s: float = 1.0, drop_labels: Sequence[str] = ADDED_LABELS,
              timeout_s: float = TIMEOUT_S) -> Fetched:
    """`fetch` with what there is to say about it. By default: every vLLM and DCGM series."""
    if not step_s > 0 or end_wall_s < start_wall_s:
        raise InputError("bad-range", f"step_s must be above 0 and the range forward, not {step_s:g} s from "
                         f"{start_wall_s:.0f} to {end_wall_s:.0f}")
    client = connect(prometheus_url, timeout_s)
    skew_s = clock_skew(client, timeout_s)
    skew_s = skew_s if abs(skew_s) > SKEW_S else 0.0
    problems = [f"the clock of Prometheus at {prometheus_url} is {skew_s:+.1f} s from this host's: its samples are "
                f"shifted by that"] if skew_s else []
    theirs = Anchor(anchor.monotonic_s, anchor.wall_s + skew_s)
    rows: list[dict] = []
    unsupported: set[str] = set()
    for query in queries:
        found = 0
        for begin, end in _spans(start_wall_s + skew_s, end_wall_s + skew_s, step_s):
            for result in _query(client, query, begin, end, step_s, timeout_s):
                found += 1
                rows += _samples(result, query, theirs, drop_labels, unsupported)
        if not found:
            problems.append(f"Prometheus at {prometheus_url} has nothing for {query} in this time: is the target "
                            f"scraped, and under this name?")
    problems += [f"{metric} is reported as 'not supported'; left out, not plotted" for metric in sorted(unsupported)]
    metrics = as_table(rows, METRICS).to_pandas()
    interval_s = scrape_interval(client, timeout_s)
    holes = _holes(client, list(_spans(start_wall_s + skew_s, end_wall_s + skew_s, step_s)), step_s,
                   max(step_s, interval_s), timeout_s)
    for before, after in holes:
        inside = metrics["time_s"].between(theirs.to_monotonic(before) + step_s, theirs.to_monotonic(after),
                                           inclusive="neither")
        metrics = metrics[~inside].reset_index(drop=True)
    origin_s = anchor.to_monotonic(start_wall_s)
    problems += restarts(metrics, origin_s) + gaps(metrics, origin_s, step_s)
    return Fetched(metrics, problems, interval_s + 1.0, len(holes))


def _holes(client: PrometheusConnect, spans: Sequence[tuple[int, int]], step_s: float, interval_s: float,
           timeout_s: float) -> list[tuple[float, float]]:
    """(begin, end), Unix times between which Prometheus itself scraped nothing: a range query would repeat its last
    samples there for five minutes as if they were new."""
    scraped = sorted({float(text) for first, last in spans
                      for result in _query(client, f"timestamp({SCRAPED})", first, last, step_s, timeout_s)
                      for _, text in result["values"]})
    return [(before, after) for before, after in itertools.pairwise(scraped) if after - before > 2.5 * interval_s]


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
    except requests.exceptions.Timeout as error:
        raise PrometheusUnavailable("prometheus-timeout", f"Prometheus at {client.url} did not answer within "
                                    f"{timeout_s:g} s") from error
    except requests.exceptions.RequestException as error:
        raise PrometheusUnavailable("prometheus-down", f"Prometheus at {client.url} cannot be reached") from error
    except PrometheusApiClientException as error:
        raise PrometheusUnavailable("prometheus-refused", f"Prometheus at {client.url} refused the query {query}: "
                                    f"{str(error):.200}") from error
    except (ValueError, KeyError) as error:
        raise PrometheusUnavailable("prometheus-garbled", f"{client.url} does not answer as Prometheus does") from error


def _samples(result: Mapping, query: str, anchor: Anchor, drop_labels: Sequence[str],
             unsupported: set[str]) -> Iterator[dict]:
    metric = result["metric"].get("__name__", query)
    labels = labels_json({key: value for key, value in result["metric"].items() if key not in drop_labels})
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
    """Prometheus's clock minus this host's, in seconds, good to half the time that the question takes."""
    asked = time.time()
    try:
        answer = requests.get(f"{client.url}/api/v1/query", params={"query": "time()"}, timeout=timeout_s).json()
        theirs = float(answer["data"]["result"][1])
    except requests.exceptions.Timeout as error:
        raise PrometheusUnavailable("prometheus-timeout", f"Prometheus at {client.url} did not answer within "
                                    f"{timeout_s:g} s") from error
    except requests.exceptions.RequestException as error:
        raise PrometheusUnavailable("prometheus-down", f"Prometheus at {client.url} cannot be reached") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PrometheusUnavailable("prometheus-garbled", f"{client.url} does not answer as Prometheus does") from error
    return theirs - (asked + time.time()) / 2


def scrape_interval(client: PrometheusConnect, timeout_s: float = TIMEOUT_S) -> float:
    """The longest scrape interval of the server's targets in seconds; 0 when it does not say (older servers)."""
    try:
        answer = requests.get(f"{client.url}/api/v1/targets?state=active", timeout=timeout_s).json()
        return max((seconds(target.get("scrapeInterval", "")) for target in answer["data"]["activeTargets"]),
                   default=0.0)
    except (requests.exceptions.RequestException, ValueError, KeyError):
        return 0.0


def seconds(text: str) -> float:
    """`500ms`, `1s`, `1m30s` in seconds."""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"([0-9.]+)(ms|s|m|h)", text))
