"""The requests and chunks of a load and the window that counts: whose values belong to it, and as what.

`definitions` says what each metric is; the rules for failures and for the end of the load stand here, once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.config import SHARES, Slo
from spoc_lib.core.errors import InputError
from spoc_lib.core.schemas import CHUNKS
from spoc_lib.metrics.gaps import Gaps, Streams, streams
from spoc_lib.metrics.registry import METRICS
from spoc_lib.metrics.samples import Samples

Span = tuple[float, float]
EVERYBODY = "all"
#: Between the 0 of a good request and the +inf of a bad one.
SHARE_MARK = 1.0


class Records:
    """REQUESTS as arrays (requests,), times in seconds; NaN where the event never happened. What the server's usage
    does not tell of a prompt is as intended."""

    def __init__(self, requests: pd.DataFrame) -> None:
        def numbers(column: str, fallback: str = "") -> np.ndarray:
            values = requests[column].to_numpy(float, na_value=np.nan)
            return np.where(np.isnan(values), numbers(fallback), values) if fallback else values

        self.request, self.user = (requests[name].to_numpy(np.int64) for name in ("request", "user"))
        self.persona, outcome = (requests[name].to_numpy(str) for name in ("persona", "outcome"))
        self.completed, self.failed, self.censored = (outcome == one for one in ("completed", "failed", "censored"))
        self.intended_send_s, self.send_s = numbers("intended_send_s"), numbers("send_s", "intended_send_s")
        self.first_s, self.end_s = numbers("first_token_s"), numbers("end_s")
        self.ttft_s = self.first_s - self.send_s
        self.prompt_tokens = numbers("prompt_tokens", "intended_prompt_tokens")
        self.cached_tokens = np.where(np.isnan(numbers("prompt_tokens")), np.nan, numbers("cached_tokens"))
        self.output_tokens = numbers("output_tokens")
        self.intended_output_tokens = numbers("intended_output_tokens")


@dataclass(frozen=True, slots=True)
class Waits:
    """A latency of all requests, arrays (requests,): +inf where it failed, NaN where there is none. cut: at least so
    long, for nobody saw its end; per: what a wait in seconds was divided by (1, or the prompt's tokens)."""

    value_s: np.ndarray
    cut: np.ndarray
    per: np.ndarray


class Measured:
    """What belongs to a window of a load, for any metric; the gaps are worked out once, on first use.

    requests, chunks: REQUESTS and CHUNKS of the whole load (chunks None: no gaps and no rates are asked for); window:
    (start_s, end_s), half open; end_s: when the load was cut off (default: the last event known).
    """

    def __init__(self, requests: pd.DataFrame, chunks: pd.DataFrame | None, window: Span,
                 end_s: float | None = None) -> None:
        self.records = Records(requests)
        self.window = window
        known = [self.records.send_s, self.records.first_s, self.records.end_s]
        last = max((float(np.nanmax(one)) for one in known if np.isfinite(one).any()), default=window[1])
        self.end_s = max(window[1], last) if end_s is None else end_s
        self.chunks = CHUNKS.empty_table().to_pandas() if chunks is None else chunks
        self._found: dict[str, Any] = {}

    @property
    def span_s(self) -> float:
        """Length of the window; NaN for one that is empty, so that no rate comes of it."""
        return self.window[1] - self.window[0] or math.nan

    def inside(self, time_s: np.ndarray) -> np.ndarray:
        """Which moments lie in the window."""
        return (time_s >= self.window[0]) & (time_s < self.window[1])

    @cached_property
    def sent(self) -> np.ndarray:
        """Mask of the requests that were sent in the window: whose latency counts."""
        return self.inside(self.records.send_s)

    @cached_property
    def cut_s(self) -> np.ndarray:
        """When each request was last known to be alive: its end, or the end of the load."""
        return np.where(np.isnan(self.records.end_s), self.end_s, self.records.end_s)

    def numbers(self, *names: str) -> dict[str, Any]:
        """Metrics that are one number a window, by name; None where nobody told it."""
        return {name: METRICS[name].of(self) for name in names}

    def percentiles(self, name: str, persona: str = EVERYBODY) -> dict[str, float]:
        """{'p50': …, 'p95': …, 'p99': …} of a latency, as it is shown everywhere."""
        return self.samples(name, persona).percentiles()

    def of(self, slo: Slo, slos: Sequence[Slo] = ()) -> Samples:
        """The samples that decide `slo`; `slos`: all of the load's, whose limits on latency a goodput asks for."""
        if slo.metric == "error_rate":
            return self.failures(slo.persona)
        if slo.metric == "goodput":
            return self.shortfalls(slos, slo.persona)
        return self.samples(slo.metric, slo.persona, slo.limit_s)

    def failures(self, persona: str = EVERYBODY) -> Samples:
        """One sample a request sent in the window: +inf where it failed, else 0. One that was cut off by the end of
        the load has not failed."""
        return self._requests(np.where(self.records.failed, np.inf, 0.0), self.sent & self._persona(persona))

    def shortfalls(self, slos: Sequence[Slo], persona: str = EVERYBODY) -> Samples:
        """One sample a request sent in the window: +inf where it failed or was beyond a limit on latency that applies
        to it (its ITL being its mean gap, that is its TPOT), else 0. Where a wait was cut off before it could be
        decided, the rule of `samples` says who is left out."""
        counted, short = self.sent & self._persona(persona), self.records.failed.copy()
        for slo in slos:
            if slo.metric in SHARES:
                continue
            metric = "tpot" if slo.metric == "itl" else slo.metric
            values, owner = self._decided(self._of(metric), slo.limit_s)
            applies = self._persona(slo.persona)
            over = owner[values.value_s > slo.limit_s]
            short[over[applies[over]]] = True
            if metric != "tpot":  # a request of a single token has none
                decided = np.zeros(len(short), dtype=bool)
                decided[owner] = True
                counted &= decided | ~applies
        return self._requests(np.where(short, np.inf, 0.0), counted)

    def samples(self, name: str, persona: str = EVERYBODY, limit_s: float | None = None) -> Samples:
        """Samples of a latency over one persona's requests (or everybody's).

        Without a limit, as figures are shown, a wait that was cut off counts as at least so long (`Samples.cut`).
        Against a limit it is decided as far as it can be: it waited longer: +inf. It waited less: unknown, and leaving
        out only the unknown ones would flatter the tail, so then *every* request sent within one limit of the cut is
        left out, answered or not.
        """
        one = METRICS.get(name)
        if one is None or one.kind not in ("waits", "samples"):
            known = ", ".join(name for name, one in METRICS.items() if one.kind in ("waits", "samples"))
            raise InputError("unknown-metric", f"slos: unknown metric '{name}': use one of {known}")
        found = self._of(name)
        if one.kind == "waits":
            samples, owner = self._decided(found, limit_s)
        else:
            samples, owner = found
            if limit_s is not None and samples.cut is not None:
                over = ~samples.cut | (samples.value_s > limit_s)
                samples, owner = samples.at_least.where(over), owner[over]
        return samples if persona == EVERYBODY else samples.where(self._persona(persona)[owner])

    def _of(self, name: str) -> Any:
        """What the metric's code makes of it, once."""
        if name not in self._found:
            self._found[name] = METRICS[name].of(self)
        return self._found[name]

    def _persona(self, persona: str) -> np.ndarray:
        return np.ones(len(self.records.request), dtype=bool) if persona == EVERYBODY else \
            self.records.persona == persona

    def _requests(self, value_s: np.ndarray, kept: np.ndarray, cut: np.ndarray | None = None) -> Samples:
        return Samples(value_s, np.ones(len(kept)), self.records.user, self.records.send_s, cut).where(kept)

    def _decided(self, waits: Waits, limit_s: float | None) -> tuple[Samples, np.ndarray]:
        """Samples of the requests sent in the window, and the index of each in the records."""
        value_s, kept = waits.value_s, self.sent & ~np.isnan(waits.value_s)
        if limit_s is None:
            return self._requests(value_s, kept, waits.cut), np.flatnonzero(kept)
        over = waits.cut & (value_s > limit_s)
        unknown = waits.cut & ~over
        if (kept & unknown).any():
            kept &= ~unknown & (self.records.send_s < float(self.cut_s[waits.cut].max()) - limit_s * waits.per)
        return self._requests(np.where(over, np.inf, value_s), kept), np.flatnonzero(kept)

    @cached_property
    def streams(self) -> Streams:
        """The chunks, stream by stream, each named by its request's place in the records. InputError where one is not
        there."""
        found, order = streams(self.chunks), np.argsort(self.records.request, kind="stable")
        named, ids = self.records.request[order], found.request[found.first]
        place = np.searchsorted(named, ids)
        if (np.append(named, -1)[place] != ids).any():
            raise InputError("bad-table", "the chunks name a request that the requests table does not have")
        return found.named(order[place])

    @cached_property
    def received(self) -> np.ndarray:
        """Output tokens a request: the server's usage, else the sum of its chunks."""
        streamed = np.bincount(self.streams.request, self.streams.tokens, len(self.records.request))
        return np.where(np.isnan(self.records.output_tokens), streamed, self.records.output_tokens)

    @cached_property
    def last_s(self) -> np.ndarray:
        """When the last chunk of each request came; NaN where none did."""
        found = np.full(len(self.records.request), np.nan)
        found[self.streams.request[self.streams.last]] = self.streams.time_s[self.streams.last]
        return found

    @cached_property
    def gaps(self) -> Gaps:
        """The gaps that end in the window; `request` is the place in the records."""
        return self.streams.gaps.between(*self.window)
