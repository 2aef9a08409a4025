"""Every metric of a window, once: in words for people, in code for the rooms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from spoc_lib.config import Slo
from spoc_lib.metrics.measured import Measured, Waits
from spoc_lib.metrics.registry import METRICS, Metric, metric
from spoc_lib.metrics.samples import Samples

_SENT = "requests sent in it"
_INF = "+∞"
_AT_LEAST = ("at least what it waited: its weight goes to those that waited longer; against an SLO's limit: beyond it "
             "where it waited longer, and where one waited less, all requests sent within one limit of the end are "
             "left out")
_NONE = "not counted"
_SECONDS = {"unit": "s", "shown": "s", "digits": 2, "better": "lower"}
_MILLISECONDS = {"unit": "s", "shown": "ms", "scale": 1e3, "digits": 1, "better": "lower"}


def _waits(seen: Measured, value_s: np.ndarray, cut: np.ndarray, per: np.ndarray | None = None) -> Waits:
    """With what is the same for all latencies of a request: a failed one is infinitely late, and one that was `cut` off
    has waited until then."""
    records, per = seen.records, np.ones(len(value_s)) if per is None else per
    cut = cut & ~records.failed
    value_s = np.where(records.failed, np.inf, np.where(cut, seen.cut_s - records.send_s, value_s))
    return Waits(value_s / per, cut, per)


@metric("waits", title="TTFT", belongs=_SENT, failed=_INF,
        cut=f"its TTFT where the first token came; else {_AT_LEAST}", **_SECONDS)
def ttft(seen: Measured) -> Waits:
    """First chunk that carries content, reasoning or a tool call, minus sending (role-only, empty and usage chunks
    never count)."""
    return _waits(seen, seen.records.ttft_s, np.isnan(seen.records.first_s))


@metric("samples", title="ITL", belongs="gaps that end in it, whenever their request was sent",
        failed="the tokens that its user never received, where it ended in the window: +∞",
        cut="a stream that was silent when the load ended: one gap of at least that", **_MILLISECONDS)
def itl(seen: Measured) -> tuple[Samples, np.ndarray]:
    """Gap between two such chunks over the tokens that the later one carries by the server's usage, one value a
    token."""
    records, found = seen.records, seen.gaps.itl
    parts, owners = [replace(found, user=records.user[found.user])], [found.user]
    lost = np.flatnonzero(records.failed & seen.inside(seen.cut_s))
    missing = np.fmax(records.intended_output_tokens[lost] - seen.received[lost], 1.0)
    silent = np.flatnonzero(records.censored & (seen.last_s < seen.window[1]))
    open_s = seen.cut_s[silent] - seen.last_s[silent]
    for place, value_s, weight, time_s, cut in (
            (lost, np.full(len(lost), np.inf), missing, seen.cut_s[lost], False),
            (silent, open_s, np.ones(len(silent)), seen.last_s[silent], True)):
        if len(place):
            parts.append(Samples(value_s, weight, records.user[place], time_s, np.full(len(place), cut)))
            owners.append(place)
    return Samples.concatenate(parts), np.concatenate(owners)


@metric("samples", title="inter-chunk latency", belongs="gaps that end in it", failed=_NONE, cut=_NONE,
        **_MILLISECONDS)
def inter_chunk(seen: Measured) -> tuple[Samples, np.ndarray]:
    """Gap between two such chunks, however many tokens they carry."""
    gaps = seen.gaps
    return Samples(gaps.gap_s, np.ones(len(gaps.gap_s)), seen.records.user[gaps.request], gaps.time_s), gaps.request


@metric("waits", title="TPOT", belongs=_SENT, failed=_INF, cut="with the tokens and the time that it had",
        **_MILLISECONDS)
def tpot(seen: Measured) -> Waits:
    """(last token − first token) / (tokens − 1) of a request of two tokens or more."""
    several = seen.received > 1
    value_s = np.where(several, (seen.cut_s - seen.records.first_s) / np.where(several, seen.received - 1, 1), np.nan)
    return _waits(seen, value_s, np.zeros(len(several), bool))


@metric("waits", title="end-to-end latency", belongs=_SENT, failed=_INF, cut=_AT_LEAST, **_SECONDS)
def e2e(seen: Measured) -> Waits:
    """Last token minus sending."""
    return _waits(seen, seen.cut_s - seen.records.send_s, seen.records.censored)


@metric("waits", title="TTFT per prompt token", belongs=_SENT, failed=_INF, cut="as TTFT", unit="s/token",
        shown="ms/token", scale=1e3, digits=2, better="lower")
def ttft_per_prompt_token(seen: Measured) -> Waits:
    """TTFT over the tokens of the prompt (the server's usage, else as intended)."""
    return _waits(seen, seen.records.ttft_s, np.isnan(seen.records.first_s), np.maximum(seen.records.prompt_tokens, 1))


@metric("waits", title="schedule lag", belongs=_SENT, failed="as any other", cut="as any other", **_MILLISECONDS)
def schedule_lag(seen: Measured) -> Waits:
    """Sending minus intended sending: the load generator's own lateness, part of no latency."""
    late_s = seen.records.send_s - seen.records.intended_send_s
    return Waits(late_s, np.zeros(len(late_s), bool), np.ones(len(late_s)))


@metric("number", title="failed requests", unit="", belongs=_SENT, failed="counts",
        cut="counts as one that did not fail", better="lower", shown="%", scale=100, digits=2)
def error_rate(seen: Measured) -> float | None:
    """Failed requests over requests."""
    values = seen.failures().value_s
    return float((values > 0).mean()) if len(values) else None


@metric("number", title="goodput", unit="", belongs=_SENT, failed="not good",
        cut="as the latencies that are asked for", better="higher", shown="%", scale=100, digits=2)
def goodput(seen: Measured, slos: Sequence[Slo]) -> float | None:
    """Requests that did not fail and met every limit on latency that applies to them (for ITL: its mean, TPOT) over
    requests."""
    short = seen.shortfalls(slos).value_s > 0
    return float(1 - short.mean()) if len(short) else None


@metric("number", title="goodput", unit="requests/s", belongs=_SENT, failed="not good", cut="as above",
        better="higher", shown="requests/s", digits=2)
def goodput_per_s(seen: Measured, slos: Sequence[Slo]) -> float:
    """Those requests over the window's length."""
    return float((seen.shortfalls(slos).value_s == 0).sum()) / seen.span_s


@metric("number", title="output", unit="tokens/s", belongs="chunks that came in it", failed="the tokens that came",
        cut="the tokens that came", better="higher", shown="tokens/s", digits=0)
def output_tokens_per_s(seen: Measured) -> float:
    """Tokens that chunks carried over the window's length."""
    inside = seen.inside(seen.chunks["time_s"].to_numpy(float))
    return float(seen.chunks["tokens"].to_numpy(float)[inside].sum()) / seen.span_s


@metric("number", title="prompt", unit="tokens/s", belongs="requests whose first token came in it",
        failed="counts where a token came", cut="counts where a token came", shown="tokens/s", digits=0)
def prompt_tokens_per_s(seen: Measured) -> float:
    """Tokens of prompts (usage, else as intended) over the window's length."""
    return float(np.nansum(seen.records.prompt_tokens[seen.inside(seen.records.first_s)])) / seen.span_s


@metric("number", title="requests", unit="1/s", belongs="requests that ended in it", failed=_NONE, cut=_NONE,
        shown="1/s", digits=2)
def request_rate_per_s(seen: Measured) -> float:
    """Completed requests over the window's length."""
    return float((seen.records.completed & seen.inside(seen.records.end_s)).sum()) / seen.span_s


@metric("number", title="prefix hits", unit="", belongs=_SENT, failed="counts where usage came",
        cut="counts where usage came", better="higher", shown="%", scale=100)
def cached_ratio(seen: Measured) -> float | None:
    """Prompt tokens from the prefix cache over prompt tokens, by the server's usage; where it tells none, by its
    counters."""
    told = seen.sent & ~np.isnan(seen.records.cached_tokens)
    whole = float(seen.records.prompt_tokens[told].sum())
    return float(seen.records.cached_tokens[told].sum()) / whole if whole else None


def _users(name: str, of: str, title: str, formula: str, failed: str, cut: str, **told: Any) -> None:
    told = {"unit": "users", "shown": "users", "belongs": "the part of it that lies in the window"} | told
    METRICS[name] = Metric(name, title, formula=formula, failed=failed, cut=cut, kind="users", of=attrgetter(of),
                           **told)


_users("live_users", "live", "live", "In flight + thinking + late; must be the users asked for (Little's law, N = "
       "X (R + Z), as its own integral).", "live until it failed", "live to the end")
_users("thinking_users", "thinking", "thinking", "Mean number of users between the end of an answer and the next "
       "intended sending.", "its user thinks on", "–")
_users("in_flight_users", "in_flight", "in flight", "Mean number of requests between sending and end.",
       "in flight until it failed", "in flight to the end")
_users("late_users", "late", "late", "Mean number of users between the intended and the actual sending: the load "
       "generator's own doing.", "as any other", "as any other", better="lower")
_users("little_error_ratio", "little_error_ratio", "Little's law off by", "How far live users lie from the users asked "
       "for, over the latter.", "as above", "as above", better="lower", unit="", shown="%", scale=100)
