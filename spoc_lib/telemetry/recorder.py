"""A recorder for those who run no Prometheus: scrapes the server's and dcgm-exporter's pages into METRICS."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import orjson
import pandas as pd

from spoc_lib.config.access import Access
from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import TableAppender, read_table
from spoc_lib.servers.metricnames import EXPECTED, canonical
from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.page import PageReader, ScrapeError
from spoc_lib.telemetry.parse import BadPage, Sample, parse
from spoc_lib.telemetry.series import select

#: Families that are kept, by the names of today's vLLM: the server's, DCGM's, and what the embedded engine says of its
#: own clock; everything else on the pages (Python's garbage collector, HTTP framework) is dropped.
PREFIXES = ("vllm:", "DCGM_", "spoc:clock_resets", "spoc:step_lag")
FLUSH_S = 10.0


def kept(samples: Iterable[Sample]) -> list[Sample]:
    """The samples that the workbench records (`PREFIXES`), without the creation stamps of counters; of two names of one
    quantity on a page, the newer's."""
    chosen = [(sample.metric, sample._replace(metric=canonical(sample.metric))) for sample in samples
              if not sample.metric.endswith("_created")]
    newer = {new.metric for old, new in chosen if old == new.metric}
    return [new for old, new in chosen
            if new.metric.startswith(PREFIXES) and (old == new.metric or new.metric not in newer)]


def source_of(metric: str) -> str:
    """The column `source` of METRICS for a metric."""
    return "dcgm" if dcgm.is_dcgm(metric) else "engine" if metric.startswith("spoc:") else "vllm"


@dataclass
class _Target:
    """One page and what happened to it."""

    what: str
    reader: PageReader
    scrapes: int = 0
    alignment_error_s: float = 0.0
    seconds: float = 0.0
    failures: list[tuple[float, float, str, int]] = field(default_factory=list)  # first, last, reason, count
    seen: set[str] = field(default_factory=set)
    unsupported: set[tuple[str, str]] = field(default_factory=set)


class Recorder:
    """`with Recorder(vllm_url, dcgm_url, path) as recorder: …` records both pages while the block runs.

    vllm_url, dcgm_url: addresses of the pages (`http://host:port/metrics`), None for one that does not exist;
    path: the Parquet file (METRICS; times monotonic seconds of this host); interval_s between scrapes of a
    page;
    timeout_s: a scrape that takes longer is given up, and said. Each page has its own thread, so one that
    hangs holds up nobody else. access: key, headers and certificate of the server of the first page.
    A page is read at entry, then on a fixed grid, and at exit, so a window inside the block always has samples on
    both sides.

    After the block: `metrics` (the table), `problems` (sentences: failed scrapes with their times, counters
    that are missing or unsupported and what that costs, restarts of the server), `alignment_error_s`,
    `overhead()`.
    Nothing a page does raises: a sweep does not die of its telemetry.
    """

    def __init__(self, vllm_url: str | None, dcgm_url: str | None, path: str | Path, interval_s: float = 1.0,
                 timeout_s: float | None = None, access: Access | None = None) -> None:
        timeout_s = max(2.0, interval_s) if timeout_s is None else timeout_s
        self.path, self.interval_s = Path(path), interval_s
        self._targets = [_Target(what, PageReader(url, timeout_s, reached))
                         for what, url, reached in (("vLLM", vllm_url, access), ("DCGM", dcgm_url, None)) if url]
        self._without_dcgm = dcgm_url is None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._threads: list[threading.Thread] = []
        self.metrics: pd.DataFrame = METRICS.empty_table().to_pandas()
        self.problems: list[str] = []
        self.started_s = self.ended_s = 0.0

    def __enter__(self) -> Recorder:
        self._appender = TableAppender(self.path, METRICS)
        self.started_s = self._flushed_s = time.monotonic()
        for target in self._targets:
            thread = threading.Thread(target=self._loop, args=(target,), name=f"scrape {target.what}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Read the pages once more, close the file, work out the problems."""
        if self._stop.is_set():
            return
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.ended_s = time.monotonic()
        self._appender.close()
        self.metrics = read_table(self.path, METRICS)
        self.problems = [sentence for target in self._targets for sentence in self._sentences(target)]
        if self._without_dcgm:
            self.problems.append("no DCGM page was given: how busy, hot and fast the GPUs were is unknown")

    @property
    def models(self) -> set[str]:
        """The names under which the server's own page says that it serves, where that is one."""
        names = {orjson.loads(labels).get("model_name") for labels in
                 self.metrics.loc[self.metrics["metric"] == "vllm:num_requests_running", "labels"].unique()} - {None}
        return names if len(names) == 1 else set()

    @property
    def alignment_error_s(self) -> float:
        """The largest distance between a sample's time stamp and the moment the server took it, in
        seconds."""
        return max((target.alignment_error_s for target in self._targets), default=0.0)

    def overhead(self) -> dict[str, float]:
        """Share of the time that the server spent on answering scrapes, a page (an upper bound: wall
        time)."""
        spent = max(self.ended_s or time.monotonic(), self.started_s + 1e-9) - self.started_s
        return {target.what: target.seconds / spent for target in self._targets}

    def _loop(self, target: _Target) -> None:
        due = time.monotonic()
        while True:
            last = self._stop.is_set()
            self._scrape(target)
            if last:
                target.reader.close()
                return
            now = time.monotonic()
            due += self.interval_s * max(1, int(np.ceil((now - due) / self.interval_s)))
            self._stop.wait(max(0.0, due - now))

    def _scrape(self, target: _Target) -> None:
        asked = time.monotonic()
        try:
            page = target.reader.read()
            samples = kept(parse(page.text))
        except (ScrapeError, BadPage) as error:
            self._failed(target, asked, str(error))
            return
        target.scrapes += 1
        target.alignment_error_s = max(target.alignment_error_s, page.error_s)
        target.seconds += page.seconds
        rows = []
        for metric, labels, value in samples:
            target.seen.add(metric)
            if dcgm.is_dcgm(metric) and dcgm.unsupported(value):
                target.unsupported.add((metric, labels))
                continue
            rows.append({"source": source_of(metric), "metric": metric, "labels": labels, "time_s": page.time_s,
                         "value": value})
        with self._lock:
            self._appender.extend(rows)
            if time.monotonic() - self._flushed_s > FLUSH_S:
                self._appender.flush()
                self._flushed_s = time.monotonic()

    @staticmethod
    def _failed(target: _Target, at_s: float, reason: str) -> None:
        if target.failures and target.failures[-1][2] == reason and at_s - target.failures[-1][1] < 30:
            first, _, _, count = target.failures[-1]
            target.failures[-1] = (first, at_s, reason, count + 1)
        else:
            target.failures.append((at_s, at_s, reason, 1))

    def _sentences(self, target: _Target) -> list[str]:
        said = []
        for first, last, reason, count in target.failures:
            span = f"{first - self.started_s:.1f} s" + (
                f" to {last - self.started_s:.1f} s" if count > 1 else "")
            said.append(f"{target.what} metrics at {target.reader.url}: {count} scrape{'s' * (count > 1)} failed at "
                        f"{span} after the start: {reason}")
        if not target.scrapes:
            return said
        said += _missing(target)
        said += restarts(self.metrics, self.started_s) if target.what == "vLLM" else []
        return said


def _missing(target: _Target) -> list[str]:
    if target.what == "vLLM":
        lacking = [metric for metric in EXPECTED if metric not in target.seen]
        return [f"the server exports no {', '.join(lacking)}: what depends on it is left out"] if lacking else []
    said = [f"{counter.field} is not exported: {counter.cost}" for counter in dcgm.COUNTERS
            if not counter.default_on and not dcgm.aliases(counter.field) & target.seen]
    by_metric: dict[str, int] = {}
    for metric, _ in target.unsupported:
        by_metric[metric] = by_metric.get(metric, 0) + 1
    return said + [f"{metric}: {count} GPU{'s' * (count > 1)} report 'not supported'; left out, not plotted"
                   for metric, count in sorted(by_metric.items())]


def restarts(metrics: pd.DataFrame, origin_s: float) -> list[str]:
    """A sentence for each time that the server's token counter fell back: it restarted, its counters began
    anew."""
    fell: list[float] = []
    for series in select(metrics, "vllm:prompt_tokens_total"):
        fell += (series.time_s[1:][np.diff(series.value) < 0] - origin_s).tolist()
    at = [one for index, one in enumerate(sorted(fell)) if not index or one - sorted(fell)[index - 1] > 0.5]
    return [f"the server restarted {len(at)} time{'s' * (len(at) > 1)} (counters began anew at "
            f"{', '.join(f'{one:.0f} s' for one in at)}): increases are added across it"] if at else []
