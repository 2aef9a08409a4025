"""One rung against a server that gives each user another fault: every request is accounted for, each by its class."""

from __future__ import annotations

import asyncio
import threading

import orjson
import pandas as pd
import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.load import FixedTurns, LoadPlan, run

USAGE = {"prompt_tokens": 4, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
HTML = b"<html>oops</html>"


async def plain(r):
    await r.answer(list("abcd"), usage=USAGE)


async def reasoning(r):
    await start(r)
    await r.event(delta(r, reasoning="think"), 0.05)
    await r.event(delta(r, content="abc"))
    await finish(r)


async def several_tokens_a_chunk(r):
    await start(r)
    for text in ("ab", "cd"):
        await r.event(delta(r, content=text), 0.1)
    await finish(r)


async def split_in_the_middle(r):
    await start(r)
    event = b"data: " + '{"choices":[{"delta":{"content":"世界"}}]}'.encode() + b"\n\n"
    for byte in range(0, len(event), 7):
        await r.piece(event[byte:byte + 7], 0.005)
    await finish(r)


async def crlf_and_comments(r):
    await start(r)
    await r.piece(b": ping\r\n\r\nevent: x\r\ndata: " + orjson.dumps(delta(r, content="hi")) + b"\r\n\r\n")
    await finish(r)


async def no_done(r):
    await r.answer(list("abcd"), usage=USAGE, done=False)


async def done_but_never_ends(r):
    await start(r)
    await r.event(delta(r, content="x"))
    await r.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    await r.event(b"[DONE]")
    await asyncio.sleep(10)


async def no_usage(r):
    await r.answer(["hello ", "world"])


async def until_closed(r):
    await r.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    await r.send(b"data: " + orjson.dumps(delta(r, content="x")) + b"\n\n")
    await r.send(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n')
    r.writer.close()


async def fewer_than_asked(r):
    await r.answer(["a"], usage={**USAGE, "completion_tokens": 1}, finish="stop")


async def cut_in_mid_answer(r):
    await start(r)
    await r.event(delta(r, content="x"), 0.05)
    r.writer.close()


async def ends_without_finish(r):
    await r.answer(["a", "b"], finish=None, done=False)


async def done_without_finish(r):
    await r.answer(["a", "b"], finish=None, usage=USAGE)


async def aborted(r):
    await r.answer(["a", "b"], finish="abort", usage=USAGE)


async def reset_before_answer(r):
    r.reset()


async def error_event(r):
    await start(r)
    await r.event({"error": {"message": "engine died", "code": 500}})
    await r.end()


async def bad_event(r):
    await start(r)
    await r.event(b"{oops")
    await r.end()


async def empty(r):
    await r.answer([])


async def overflow(r):
    await r.json("400 Bad Request", {"error": {"message": "This model's maximum context length is 10 tokens."}})


async def refuses(r):
    await r.json("422 Unprocessable Entity", {"detail": "no"})


async def html_500(r):
    await r.send(b"HTTP/1.1 500 Oops\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%b" % (len(HTML), HTML))


async def not_streamed(r):
    await r.json("200 OK", {"choices": [{"message": {"content": "all at once"}}]})


async def silent(r):
    await asyncio.sleep(20)


async def busy_once(r):
    if r.number == 0 and r.user not in BUSY:
        BUSY.add(r.user)
        await r.json("503 Service Unavailable", {"error": "busy"}, "Retry-After: 1\r\n")
    else:
        await plain(r)


BUSY: set[int] = set()
#: (fault, error class of its first request; None = completed)
CASES = [(plain, None), (reasoning, None), (several_tokens_a_chunk, None), (split_in_the_middle, None),
         (crlf_and_comments, None), (no_done, None), (done_but_never_ends, None), (no_usage, None),
         (until_closed, None), (fewer_than_asked, None), (cut_in_mid_answer, "cut"), (ends_without_finish, "cut"),
         (done_without_finish, "unfinished"), (aborted, "finish_abort"),
         (reset_before_answer, "cut"), (error_event, "stream_error"), (bad_event, "bad_event"), (empty, "empty"),
         (overflow, "context_overflow"), (refuses, "http_422"), (html_500, "http_500"),
         (not_streamed, "not_streamed"), (silent, "timeout"), (busy_once, "http_503")]


async def start(r):
    await r.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


async def finish(r):
    await r.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
    await r.event({"choices": [], "usage": USAGE})
    await r.event(b"[DONE]")
    await r.end()


def delta(r, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


@pytest.fixture(scope="module")
def rung(tmp_path_factory):
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    spec = spec_from_file_location("load_conftest", Path(__file__).with_name("conftest.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    seen: list[int] = []

    async def handler(request):
        seen.append(request.user)
        await CASES[request.user][0](request)

    with module.scripted(handler) as url:
        plan = LoadPlan(base_url=url, model="m", users=len(CASES), duration_s=3.5, idle_timeout_s=1.2,
                        stop_timeout_s=3, fixed=FixedTurns(output_tokens=4, think_time_s=0.3))
        return run(plan, tmp_path_factory.mktemp("faults")), seen


@pytest.mark.parametrize("user", range(len(CASES)), ids=[case.__name__ for case, _ in CASES])
def test_each_fault_has_its_class(rung, user):
    result, _ = rung
    first = result.requests[result.requests["user"] == user].iloc[0]
    expected = CASES[user][1]
    assert first["outcome"] == ("failed" if expected else "completed")
    assert (None if pd.isna(first["error_class"]) else first["error_class"]) == expected


def test_every_request_is_in_the_books(rung):
    result, seen = rung
    summary = result.summary
    assert summary["planned"] == summary["completed"] + summary["failed"] + summary["censored"]
    assert summary["planned"] == len(result.requests) == result.requests["request"].nunique() == len(seen)
    assert summary["valid"], summary["invalid"]
    assert summary["live_users"] == len(CASES)


def test_failures_are_infinite_in_the_percentiles(rung):
    assert rung[0].summary["ttft_s"]["p99"] == float("inf")


def test_retry_after_is_honoured_and_counted(rung):
    result, _ = rung
    own = result.requests[result.requests["user"] == len(CASES) - 1]
    refused, again = own.iloc[0], own.iloc[1]
    assert (refused["http_status"], again["outcome"], again["conversation"]) == (503, "completed", 0)
    assert again["intended_send_s"] - refused["end_s"] == pytest.approx(1.0)
    assert again["send_s"] >= again["intended_send_s"]
    assert result.summary["retry_after"] == 1


def test_tokens_follow_the_usage(rung):
    requests, chunks = rung[0].requests, rung[0].chunks
    user = [case for case, _ in CASES].index(several_tokens_a_chunk)
    first = requests[requests["user"] == user].iloc[0]
    own = chunks[chunks["request"] == first["request"]]
    assert list(own["tokens"]) == [2.0, 2.0]
    assert first["cached_tokens"] == 2
    counted = requests[requests["tokens_source"] == "usage"].set_index("request")["output_tokens"]
    sums = chunks.groupby("request")["tokens"].sum()
    assert (sums[counted.index.intersection(sums.index)] - counted).abs().max() < 1e-9


def test_without_usage_the_tokenizer_counts_and_says_so(rung):
    result, _ = rung
    user = [case for case, _ in CASES].index(no_usage)
    first = result.requests[result.requests["user"] == user].iloc[0]
    assert (first["tokens_source"], first["output_tokens"]) == ("tokenizer", 2)
    assert result.summary["tokens_source"] == "mixed"
    assert any("tokenizer o200k_base" in note for note in result.summary["notes"])


def test_short_answers_are_counted(rung):
    assert rung[0].summary["short_answers"] >= 1


def test_a_role_chunk_is_no_first_token(rung):
    requests = rung[0].requests
    user = [case for case, _ in CASES].index(split_in_the_middle)
    first = requests[requests["user"] == user].iloc[0]
    assert first["ttft_s"] > 0.02 and first["chunks"] == 1  # the event's last piece, not its first


def test_nothing_is_left_behind(rung):
    assert not [thread for thread in threading.enumerate() if "locust" in thread.name.lower()]


def test_nobody_there_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="no server answers at http://127.0.0.1:1: Connection refused"):
        run(LoadPlan(base_url="http://127.0.0.1:1", model="m", users=1, duration_s=1), tmp_path)
