"""The gaps between the chunks of a request: found here once, for whoever asks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.metrics.samples import Samples


@dataclass(frozen=True, slots=True)
class Gaps:
    """One entry a gap between two neighbouring chunks of one request: of the later chunk its request, time and tokens,
    and the seconds since the one before it. All arrays (n,), by request and time."""

    request: np.ndarray
    time_s: np.ndarray
    tokens: np.ndarray
    gap_s: np.ndarray

    def between(self, start_s: float, end_s: float) -> Gaps:
        """Those that end in [start_s, end_s)."""
        inside = (self.time_s >= start_s) & (self.time_s < end_s)
        return Gaps(self.request[inside], self.time_s[inside], self.tokens[inside], self.gap_s[inside])

    @property
    def itl(self) -> Samples:
        """Inter-token latency: each gap divided over the tokens of its chunk, weighing as much (user: the request)."""
        return Samples(self.gap_s / self.tokens, self.tokens, self.request, self.time_s)


@dataclass(frozen=True, slots=True)
class Streams:
    """Chunks in order of request and time, arrays (chunks,); first (requests,): where each request's begin."""

    request: np.ndarray
    time_s: np.ndarray
    tokens: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, request: np.ndarray, time_s: np.ndarray, tokens: np.ndarray) -> Streams:
        """From columns of CHUNKS in any order."""
        step = np.diff(request)
        if (step < 0).any():
            key = request - request.min()
            order = np.argsort(key.astype(np.uint16) if key.max() < 2**16 else key, kind="stable")  # by its digits
            request, time_s, tokens = request[order], time_s[order], tokens[order]
            step = np.diff(request)
        if ((np.diff(time_s) < 0) & (step == 0)).any():
            order = np.lexsort((time_s, request))
            time_s, tokens = time_s[order], tokens[order]
        return cls(request, time_s, tokens, np.flatnonzero(np.append(True, step != 0)[:len(request)]))

    @property
    def gaps(self) -> Gaps:
        """All gaps. A chunk without a token ends none."""
        later = self.tokens > 0
        later[self.first] = False
        at = np.flatnonzero(later)
        return Gaps(self.request[at], self.time_s[at], self.tokens[at], self.time_s[at] - self.time_s[at - 1])

    @property
    def last(self) -> np.ndarray:
        """(requests,): where each request's chunks end."""
        return np.append(self.first[1:], len(self.request))[:len(self.first)] - 1

    def named(self, request: np.ndarray) -> Streams:
        """The same under other numbers, one of each request (requests,)."""
        return Streams(np.repeat(request, self.last - self.first + 1), self.time_s, self.tokens, self.first)


def streams(chunks: pd.DataFrame) -> Streams:
    """The streams of CHUNKS."""
    return Streams.of(chunks["request"].to_numpy(np.int64), chunks["time_s"].to_numpy(float),
                      chunks["tokens"].to_numpy(float))
