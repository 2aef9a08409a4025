"""Which of a rung's records count for an SLO, and as what.

Which samples count (docs/how-the-numbers-are-made.md)
- Latency belongs to the requests *sent* in the window; ITL to the gaps that *end* in it.
- A failed request counts as +inf; for ITL with the tokens that its user never received.
- A request cut off by the end of the rung (censored) is decided as far as it can be. Its first token came:
  its TTFT counts. It waited longer than the limit: +inf. It waited less: unknown, and leaving out only the
  unknown ones would flatter the tail, so then *every* request sent within one limit of the cut is left out,
  answered or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from spoc_lib.config import SHARES, Slo
from spoc_lib.core.errors import InputError
from spoc_lib.sweep.interval import Samples

Window = tuple[float, float]
EVERYBODY = "all"
#: Between the 0 of a good request and the +inf of a bad one.
SHARE_MARK = 1.0


@dataclass(frozen=True, slots=True)
class Records:
    """A rung's requests as arrays (requests,), times in seconds; NaN where the event never happened."""

    request: np.ndarray
    persona: np.ndarray
    user: np.ndarray
    send_s: np.ndarray
    first_s: np.ndarray
    end_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    intended_output_tokens: np.ndarray
    outcome: np.ndarray

    @classmethod
    def of(cls, requests: pd.DataFrame) -> Records:
        """From REQUESTS."""

        def numbers(column: str, fallback: str | None = None) -> np.ndarray:
            values = requests[column].to_numpy(float, na_value=np.nan)
            if fallback is not None:
                values = np.where(np.isnan(values), requests[fallback].to_numpy(float, na_value=np.nan), values)
            return values

        return cls(
            request=requests["request"].to_numpy(np.int64), persona=requests["persona"].to_numpy(str),
            user=requests["user"].to_numpy(np.int64), send_s=numbers("send_s", "intended_send_s"),
            first_s=numbers("first_token_s"), end_s=numbers("end_s"),
            prompt_tokens=numbers("prompt_tokens", "intended_prompt_tokens"),
            output_tokens=numbers("output_tokens"), intended_output_tokens=numbers("intended_output_tokens"),
            outcome=requests["outcome"].to_numpy(str),
        )

    @property
    def failed(self) -> np.ndarray:
        """Mask of the requests that failed."""
        return self.outcome == "failed"

    @property
    def censored(self) -> np.ndarray:
        """Mask of the requests that the rung's end cut."""
        return self.outcome == "censored"

    def cut_s(self, rung_end_s: float) -> np.ndarray:
        """When each request was last known to be alive: its end, or the end of the rung."""
        return np.where(np.isnan(self.end_s), rung_end_s, self.end_s)


class RungSamples:
    """The samples of a rung for any SLO; whose each chunk is, and the gaps, are worked out once,
    on first use.

    requests, chunks: REQUESTS and CHUNKS of the whole rung; window: (start_s, end_s) of its steady part;
    end_s: when the rung was cut off (default: the last event known).
    """

    def __init__(self, requests: pd.DataFrame, chunks: pd.DataFrame, window: Window,
                 end_s: float | None = None) -> None:
        self.records = Records.of(requests)
        self.window = window
        known = [self.records.send_s, self.records.first_s, self.records.end_s]
        last = max((float(np.nanmax(one)) for one in known if np.isfinite(one).any()), default=window[1])
        self.end_s = max(window[1], last) if end_s is None else end_s
        self._chunks = chunks
        self._gaps: tuple[Samples, np.ndarray] | None = None

    def of(self, slo: Slo, slos: Sequence[Slo] = ()) -> Samples:
        """The samples that decide `slo`; `slos`: all of the rung's, whose limits on latency a goodput asks for."""
        if slo.metric == "error_rate":
            return self.failures(slo.persona)
        if slo.metric == "goodput":
            return self.shortfalls(slos, slo.persona)
        return self.samples(slo.metric, slo.persona, slo.limit_s)

    def failures(self, persona: str = EVERYBODY) -> Samples:
        """One sample a request sent in the window: +inf where it failed, else 0. One that was cut off by the end of
        the rung has not failed."""
        return self._requests(self._inside() & self._persona(persona), self.records.failed)

    def shortfalls(self, slos: Sequence[Slo], persona: str = EVERYBODY) -> Samples:
        """One sample a request sent in the window: +inf where it failed or was beyond a limit on latency that applies
        to it (its ITL being its mean gap, that is its TPOT), else 0. Where a wait was cut off before it could be
        decided, the rule of `samples` says who is left out."""
        counted, short = self._inside() & self._persona(persona), self.records.failed.copy()
        for slo in slos:
            if slo.metric in SHARES:
                continue
            metric = "tpot" if slo.metric == "itl" else slo.metric
            values, owner = self._per_request(metric, slo.limit_s)
            applies = self._persona(slo.persona)
            over = owner[values.value_s > slo.limit_s]
            short[over[applies[over]]] = True
            if metric != "tpot":  # a request of a single token has none
                decided = np.zeros(len(short), dtype=bool)
                decided[owner] = True
                counted &= decided | ~applies
        return self._requests(counted, short)

    def _inside(self) -> np.ndarray:
        return (self.records.send_s >= self.window[0]) & (self.records.send_s < self.window[1])

    def _persona(self, persona: str) -> np.ndarray:
        return np.ones(len(self.records.request), dtype=bool) if persona == EVERYBODY else \
            self.records.persona == persona

    def _requests(self, chosen: np.ndarray, bad: np.ndarray) -> Samples:
        owner = np.flatnonzero(chosen)
        return Samples(np.where(bad[owner], np.inf, 0.0), np.ones(len(owner)), self.records.user[owner],
                       self.records.send_s[owner])

    def samples(self, metric: str, persona: str = EVERYBODY, limit_s: float | None = None) -> Samples:
        """Samples of `metric` over one persona's requests (or everybody's), censored ones decided at
        `limit_s` (without a limit an undecided one counts with the time that it waited: a lower bound)."""
        if metric == "itl":
            gaps, owner = self.gaps()
            open_gaps, open_owner = self._open_gaps(limit_s)
            samples = Samples.concatenate([gaps, open_gaps])
            owner = np.concatenate([owner, open_owner])
        else:
            samples, owner = self._per_request(metric, limit_s)
        if persona == EVERYBODY:
            return samples
        return samples.where((self.records.persona == persona)[owner])

    def _per_request(self, metric: str, limit_s: float | None) -> tuple[Samples, np.ndarray]:
        records = self.records
        cut = records.cut_s(self.end_s)
        waited = cut - records.send_s
        if metric in ("ttft", "ttft_per_prompt_token"):
            value = records.first_s - records.send_s
            unknown = np.isnan(value) & ~records.failed
        elif metric == "e2e":
            value = waited.copy()
            unknown = records.censored
        elif metric == "tpot":  # a censored request counts with the tokens that it did receive
            received = self._received
            value = np.where(received > 1, (cut - records.first_s) / np.maximum(received - 1, 1), np.nan)
            unknown = np.zeros(len(value), dtype=bool)
        else:
            raise InputError("unknown-metric", f"slos: unknown metric '{metric}': use ttft, ttft_per_prompt_token, "
                             f"itl, tpot or e2e")
        kept = self._inside()
        value = np.where(records.failed, np.inf, value)
        per = np.maximum(records.prompt_tokens, 1) if metric == "ttft_per_prompt_token" else np.ones(len(value))
        if unknown.any():
            if limit_s is None:
                value = np.where(unknown, waited, value)
            else:
                value = np.where(unknown, np.where(waited > limit_s * per, np.inf, np.nan), value)
                if np.isnan(value[kept & unknown]).any():
                    kept &= records.send_s < float(cut[unknown].max()) - limit_s * per
        value = value / per
        kept &= ~np.isnan(value)
        owner = np.flatnonzero(kept)
        return Samples(value[owner], np.ones(len(owner)), records.user[owner], records.send_s[owner]), owner

    @cached_property
    def _received(self) -> np.ndarray:
        """Output tokens a request: the server's usage, else the sum of its chunks."""
        streamed = np.bincount(self._owner, weights=self._chunks["tokens"].to_numpy(float),
                               minlength=len(self.records.request)) if len(self._chunks) else \
            np.zeros(len(self.records.request))
        return np.where(np.isnan(self.records.output_tokens), streamed, self.records.output_tokens)

    @cached_property
    def _owner(self) -> np.ndarray:
        """Index of the request of each chunk."""
        order = np.argsort(self.records.request, kind="stable")
        ids = self._chunks["request"].to_numpy(np.int64)
        place = np.searchsorted(self.records.request[order], ids).clip(max=max(len(order) - 1, 0))
        owner = order[place]
        if len(ids) and (self.records.request[owner] != ids).any():
            raise InputError("bad-table", "the chunks name a request that the requests table does not have")
        return owner

    def gaps(self) -> tuple[Samples, np.ndarray]:
        """ITL samples that end in the window and the index of their request: gaps between consecutive chunks
        divided over the tokens of the later one, weighted by those tokens; and failed requests' missing
        tokens as +inf."""
        if self._gaps is None:
            records, (start_s, stop_s) = self.records, self.window
            parts, owners = [], []
            if len(self._chunks):
                owner, time_s = self._owner, self._chunks["time_s"].to_numpy(float)
                tokens = self._chunks["tokens"].to_numpy(float)
                order = np.argsort(owner, kind="stable")
                if (np.diff(time_s[order]) < 0)[np.diff(owner[order]) == 0].any():
                    order = np.lexsort((time_s, owner))
                owner, time_s, tokens = owner[order], time_s[order], tokens[order]
                later = np.flatnonzero((owner[1:] == owner[:-1]) & (time_s[1:] >= start_s) & (time_s[1:] < stop_s)
                                       & (tokens[1:] > 0)) + 1
                gap = time_s[later] - time_s[later - 1]
                parts.append(Samples(gap / tokens[later], tokens[later], records.user[owner[later]], time_s[later]))
                owners.append(owner[later])
                self._last = np.full(len(records.request), np.nan)
                self._last[owner] = time_s  # ascending within a request: the last one stays
            else:
                self._last = np.full(len(records.request), np.nan)
            end = records.cut_s(self.end_s)
            lost = np.flatnonzero(records.failed & (end >= start_s) & (end < stop_s))
            if lost.size:
                missing = np.fmax(records.intended_output_tokens[lost] - self._received[lost], 1.0)
                parts.append(Samples(np.full(lost.size, np.inf), missing, records.user[lost], end[lost]))
                owners.append(lost)
            if not parts:
                empty = np.zeros(0)
                parts, owners = [Samples(empty, empty, empty.astype(np.int64), empty)], [empty.astype(np.int64)]
            self._gaps = Samples.concatenate(parts), np.concatenate(owners)
        return self._gaps

    def _open_gaps(self, limit_s: float | None) -> tuple[Samples, np.ndarray]:
        """A stream that has been silent for longer than the limit when the rung is cut off: one missed
        token."""
        self.gaps()
        records = self.records
        silent = records.cut_s(self.end_s) - self._last
        mask = records.censored & (silent > (math.inf if limit_s is None else limit_s)) & \
            (self._last < self.window[1])
        owner = np.flatnonzero(mask)
        return Samples(silent[owner], np.ones(owner.size), records.user[owner], self._last[owner]), owner
