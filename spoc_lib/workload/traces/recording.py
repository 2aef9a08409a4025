"""Recorded sessions ready to be played: the gap before each request, what its context begins with, where users are met.

The history carries the server's own replies, so a turn appends what brings the prompt to its recorded length. Where a
source cut its history back (a rewrite, a compaction, a dropped reasoning), the context starts anew with the prefix that
the recording kept; the drivers send that prefix again under its old identity.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from spoc_lib.core.errors import InputError
from spoc_lib.workload.identity import mix, uniform
from spoc_lib.workload.model.plan import MIN_APPEND_TOKENS, MIN_SESSION_TOKENS
from spoc_lib.workload.script import Layer, Segment
from spoc_lib.workload.template import overhead_tokens
from spoc_lib.workload.traces.sessions import Owner, Request, Session

#: A prompt that keeps all but this much of the one before is taken to only append.
_APPEND_SLACK_TOKENS = 1024


class Recording:
    """Recorded sessions under the parameters of an `ImportedScript`."""

    def __init__(self, sessions: tuple[Session, ...], seed: int, salt: int, gap_cap_s: float,
                 context_limit: int | None, start: str = "stationary", timing: str = "closed") -> None:
        if timing not in ("closed", "timestamps"):
            raise InputError("bad-timing", f"timing must be 'closed' or 'timestamps', not '{timing}'")
        if start not in ("stationary", "cold"):
            raise InputError("bad-start", f"start must be 'stationary' or 'cold', not '{start}'")
        if not gap_cap_s > 0:
            raise InputError("bad-gap-cap", f"gap_cap_s must be above 0 seconds, not {gap_cap_s:g}")
        self.sessions, self.seed, self.salt = sessions, seed, salt
        self.gap_cap_s, self.context_limit, self.timing = gap_cap_s, context_limit, timing
        self.start, self.scale = ("cold" if timing == "timestamps" else start), 1.0
        self.main = [k for k, session in enumerate(sessions) if session.parent is None]
        starts = [sessions[k].requests[0].time_s for k in self.main]
        if timing == "timestamps" and None in starts:
            raise InputError("no-timestamps", "timing 'timestamps' needs a trace with times: this one has none")
        self._origin_s = min((time_s for time_s in starts if time_s is not None), default=0.0)
        self._openings: dict[tuple[Owner, int], tuple[Segment, ...]] = {}
        self._gaps = {human: [r.gap_s for k in self.main for r in sessions[k].requests
                              if r.gap_s is not None and r.human == human] for human in (True, False)}

    def start_s(self, session: int) -> float:
        """When a session's first request was sent, in seconds from the first of all."""
        return (self.sessions[session].requests[0].time_s or 0.0) - self._origin_s

    def gap_s(self, session: int, k: int) -> float:
        """Think time before a request, capped; a first request waits as before a human turn."""
        request = self.sessions[session].requests[k]
        gap = request.gap_s if k else None
        if gap is None:
            known = self._gaps[request.human or k == 0]
            gap = known[int(uniform(self.seed, 77, session, k) * len(known))] if known else 0.0
        return min(gap, self.gap_cap_s)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, list[tuple[int, np.ndarray]]]:
        """(cumulated think time by session, [(session, cumulated think time by request)]) of requests within the
        context limit: where a user may be found."""
        limit = self.context_limit or float("inf")
        spans = []
        for session in self.main:
            requests = self.sessions[session].requests
            gaps = [self.gap_s(session, k) if k and r.prompt_tokens + r.output_tokens <= limit else 0.0
                    for k, r in enumerate(requests)]
            spans.append((session, np.cumsum(gaps)))
        return np.cumsum([span[-1] for _, span in spans]), spans

    def found(self, user: int) -> tuple[int, int, float] | None:
        """(session, request, think time left) where a user is met at a random instant; None when there is no gap."""
        totals, spans = self._spans
        if not totals[-1] > 0:
            return None
        session, span = spans[int(np.searchsorted(totals, uniform(self.seed, 78, user) * totals[-1], "right"))]
        k = int(np.searchsorted(span, uniform(self.seed, 79, user) * span[-1], "right"))
        left_s = self.gap_s(session, k) * uniform(self.seed, 80, user)
        return session, k, round(left_s, 6)

    def choose(self, user: int, conversation: int) -> tuple[int, int]:
        """(session, copy) of a user's conversation; copy 0 is the first playing of a session."""
        count = len(self.main)
        if conversation == 0:
            return self.main[user % count], user // count
        return self.main[int(uniform(self.seed, 71, user, conversation) * count)], mix(user, conversation) >> 20

    def opening(self, owner: Owner, copy: int) -> tuple[Segment, ...]:
        """Segments that begin the context of a request: what it kept of an earlier prompt, then its own."""
        key = (owner, copy)
        if key not in self._openings:
            self._openings[key] = self._new_opening(owner, copy)
        return self._openings[key]

    def _new_opening(self, owner: Owner, copy: int) -> tuple[Segment, ...]:
        session, k = owner
        recorded = self.sessions[session]
        request = recorded.requests[k]
        if request.messages and k == 0:
            return tuple(text_segment(self, m.text, m.tokens, m.layer) for m in request.messages)
        content = max(MIN_SESSION_TOKENS, request.prompt_tokens - overhead_tokens(1))
        kept: tuple[Segment, ...] = ()
        if request.kept_from is not None and request.kept_from != owner:
            foreign = request.kept_from[0] != session
            base = self.context_of(request.kept_from)
            kept = cut(self.opening(base, 0 if foreign else copy), min(request.kept_tokens, content - 1))
        elif k == 0 and recorded.root_tokens:
            kept = cut(self._root(recorded.root_tokens), content - 1)
        own = content - sum(segment.tokens for segment in kept)
        return (*kept, Segment(mix(self.seed, self.salt, 72, session, k, copy), own, "session"))

    def _root(self, sizes: tuple[int, ...]) -> tuple[Segment, ...]:
        """Tools and system prompt: recordings of equal sizes are taken to have the same ones."""
        layers: tuple[Layer, Layer] = ("organisation", "repository")
        return tuple(Segment(mix(self.seed, self.salt, 73, *sizes[: k + 1]), size, layers[min(k, 1)])
                     for k, size in enumerate(sizes) if size)

    def context_of(self, owner: Owner) -> Owner:
        """The request that began the context in which `owner` was sent."""
        session, k = owner
        requests = self.sessions[session].requests
        while k > 0 and appends(requests[k - 1], requests[k], (session, k - 1)):
            k -= 1
        return session, k


def appends(earlier: Request, later: Request, owner: Owner) -> bool:
    """Whether a prompt only appends to the one before it (`owner`: that one's place)."""
    return later.kept_from == owner and (bool(later.messages) or later.kept_tokens >= min(
        earlier.prompt_tokens - _APPEND_SLACK_TOKENS, later.prompt_tokens - MIN_APPEND_TOKENS))


def text_segment(recording: Recording, text: str, tokens: int, layer: Layer) -> Segment:
    """A segment whose identity is its text: equal texts are shared, wherever they come from."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return Segment(mix(recording.seed, recording.salt, 74, digest), tokens, layer)


def cut(segments: tuple[Segment, ...], tokens: int) -> tuple[Segment, ...]:
    """The first `tokens` tokens of a sequence of segments."""
    kept = []
    for segment in segments:
        if tokens <= 0:
            break
        size = min(segment.tokens, tokens)
        kept.append(Segment(segment.stream, size, segment.layer))
        tokens -= size
    return tuple(kept)
