"""Answers that no server should give, and some do: none ends the client, each has its class, and the books balance."""

from __future__ import annotations

import asyncio
import gzip
import time
from email.utils import formatdate

import orjson
import pandas as pd

from spoc_lib.load import FixedTurns, LoadPlan, run

USAGE = {"prompt_tokens": 4, "completion_tokens": 2}
STREAM = b"Content-Type: text/event-stream\r\n"
PACKED = b"Content-Encoding: gzip\r\n"


def delta(finish: object = None, **fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


EVENTS = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in (
    delta(content="a"), delta(content="b"), delta("stop"), {"choices": [], "usage": USAGE})) + b"data: [DONE]\n\n"


def whole(status: str, headers: bytes, body: bytes):
    """An answer sent at once."""
    async def handler(request, server):
        head = f"HTTP/1.1 {status}\r\n".encode() + headers
        await request.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    return handler


def events(*values: object):
    """A stream of these events."""
    async def handler(request, server):
        await request.send(server.head)
        for value in values:
            await request.event(value)
        await request.event(b"[DONE]")
        await request.end()

    return handler


async def interim_answers(request, server):
    for status in (b"100 Continue", b"103 Early Hints\r\nLink: </style.css>"):
        await request.send(b"HTTP/1.1 " + status + b"\r\n\r\n", 0.05)
    await request.answer(["a", "b"], usage=USAGE, pause_s=0.05)


async def the_model_writes_done(request, server):
    await request.send(server.head)
    await request.event(delta(content="it ends in"), 0.1)
    await request.event(delta(content=" [DONE], then"), 2.4)
    await request.event(delta(content=" nothing"))
    await request.event(delta("stop"))
    await request.end()


async def busy_until(request, server):
    if request.number == 0 and request.user not in SEEN:
        SEEN[request.user] = time.time() + 2
        await request.json("503 Service Unavailable", {"error": "busy"},
                           f"Retry-After: {formatdate(SEEN[request.user], usegmt=True)}\r\n")
    else:
        RETRIED.setdefault(request.user, time.time())
        await request.answer(["a", "b"], usage=USAGE)


SEEN: dict[int, float] = {}
RETRIED: dict[int, float] = {}
LONG = delta(content="x" * (3 << 20))
#: (name, handler, error class of its first request, its output tokens)
CASES = [
    ("usage_with_odd_details", events(delta(content="a"), delta("stop"), {
        "choices": [], "usage": {**USAGE, "prompt_tokens_details": "none"}}), None, 2),
    ("usage_beyond_64_bits", events(delta(content="a"), delta("stop"), {
        "choices": [], "usage": {"prompt_tokens": 10**19, "completion_tokens": 10**19}}), None, 1),
    ("negative_usage", events(delta(content="a"), delta("stop"), {
        "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": -4}}), None, 1),
    ("finish_reason_is_an_object", events(delta(content="a"), delta({"type": "stop"}), {
        "choices": [], "usage": USAGE}), None, 2),
    ("named_error_event", events(delta(content="a"), {"message": "gone", "type": "x"}), "stream_error", None),
    ("long_event", events(LONG, delta("stop"), {"choices": [], "usage": USAGE}), None, 2),
    ("content_type_in_capitals", whole("200 OK", b"Content-Type: Text/Event-Stream\r\n", EVENTS), None, 2),
    ("created", whole("201 Created", STREAM, EVENTS), None, 2),
    ("plain_text_stream", whole("200 OK", b"Content-Type: text/plain; charset=utf-8\r\n", EVENTS), None, 2),
    ("octet_stream", whole("200 OK", b"Content-Type: application/octet-stream\r\n", EVENTS), None, 2),
    ("plain_text_error", whole("200 OK", b"Content-Type: text/plain\r\n", b"upstream is gone"), "not_streamed", None),
    ("no_content", whole("204 No Content", b"", b""), "cut", None),
    ("refused_field", whole("422 No", b"", b'{"detail":[{"loc":["body","ignore_eos"],"msg":"extra"}]}'), "http_422",
     None),
    ("heartbeats", events(b"", b" ", b"ping", delta(content="a"), delta("stop"), {"choices": [], "usage": USAGE}),
     None, 2),
    ("packed_stream", whole("200 OK", STREAM + PACKED, gzip.compress(EVENTS)), "bad_event", None),
    ("packed_error", whole("400 Bad Request", b"Content-Encoding: gzip\r\n", gzip.compress(
        b'{"error":{"message":"the request exceeds the available context size"}}')), "context_overflow", None),
    ("error_that_is_no_archive", whole("400 Bad Request", b"Content-Encoding: gzip\r\n", b"oops"), "http_400", None),
    ("unknown_packing", whole("500 Oops", b"Content-Encoding: zstd\r\n", b"oops"), "http_500", None),
    ("redirect", whole("307 Temporary Redirect", b"Location: /v2/chat\r\n", b""), "http_307", None),
    ("redirect_nowhere", whole("308 Permanent Redirect", b"Location: http://[::1\r\n", b""), "http_308", None),
    ("no_http", whole("999 What", b"", b""), "http_999", None),
    ("interim_answers", interim_answers, None, 2),
    ("the_model_writes_done", the_model_writes_done, None, 8),
    ("busy_until", busy_until, "http_503", None),
]


def test_no_odd_answer_ends_the_client(tmp_path, server):
    async def handler(request):
        await CASES[request.user][1](request, server)
        await asyncio.sleep(0)

    with server(handler) as url:
        plan = LoadPlan(base_url=url, model="m", users=len(CASES), duration_s=3.5, idle_timeout_s=4, stop_timeout_s=4,
                        fixed=FixedTurns(output_tokens=10, think_time_s=0.5))
        result = run(plan, tmp_path)
    summary, requests = result.summary, result.requests
    first = requests.sort_values(["user", "send_s"]).drop_duplicates("user")
    seen = {name: (None if pd.isna(row.error_class) else row.error_class,
                   None if pd.isna(row.output_tokens) else row.output_tokens)
            for (name, *_), row in zip(CASES, first.itertuples(), strict=True)}
    assert seen == {name: (error, tokens) for name, _, error, tokens in CASES}
    assert summary["valid"], summary["invalid"]
    assert summary["planned"] == summary["completed"] + summary["failed"] + summary["censored"]
    assert "with text/plain, not a text/event-stream: upstream is gone" in summary["error_samples"]["not_streamed"]
    assert "--body '{\"ignore_eos\": null}'" in summary["error_samples"]["http_422"]
    assert "give that address" in summary["error_samples"]["http_307"]
    assert summary["retry_after"] == 1
    ((user, asked_s),) = SEEN.items()
    assert asked_s - 1.1 < RETRIED[user] < asked_s + 3  # an HTTP date has whole seconds
