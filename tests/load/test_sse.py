"""The stream reader: every case seen in the field, and every split of the bytes gives the same result."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.load.sse import EventParser, StreamReader, classify_error, token_shares


def data(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else orjson.dumps(value)) + b"\n\n"


def delta(finish: str | None = None, **fields: object) -> dict:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3,
                                  "prompt_tokens_details": {"cached_tokens": 4}}}
ANSWER = [data(delta(role="assistant", content="")), data(delta(content="Hé")), data(delta(content="llo")),
          data(delta(content=" 世")), data(delta("stop")), data(USAGE), data(b"[DONE]")]


def read(pieces: list[bytes]) -> StreamReader:
    reader = StreamReader()
    for time, piece in enumerate(pieces):
        reader.feed(float(time), piece)
    reader.close(float(len(pieces)))
    return reader


def test_only_chunks_with_tokens_count():
    reader = read(ANSWER)
    assert reader.times_s == [1.0, 2.0, 3.0]  # role, finish, usage and [DONE] never count
    assert reader.reply == "Héllo 世"
    assert (reader.finish_reason, reader.done, reader.complete) == ("stop", True, True)
    assert [reader.count(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")] == [7, 3, 4]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_counts_but_is_not_the_reply(name):
    reader = read([data(delta(**{name: "hm"})), data(delta(content="yes")), data(delta("stop"))])
    assert (reader.texts, reader.reply, len(reader.times_s)) == (["hm", "yes"], "yes", 2)


def test_tool_calls_count():
    call = [{"index": 0, "function": {"name": "ls", "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": "{}"}}]
    reader = read([data(delta(content=None, tool_calls=call)), data(delta(tool_calls=more)), data(delta("tool_calls"))])
    assert (len(reader.times_s), reader.texts, reader.finish_reason) == (2, ["ls", "{}"], "tool_calls")


def test_completions_have_text():
    reader = read([data({"choices": [{"text": "a", "finish_reason": None}]}),
                   data({"choices": [{"text": "", "finish_reason": "length"}]})])
    assert (reader.reply, reader.times_s, reader.finish_reason) == ("a", [0.0], "length")


def test_comments_event_lines_and_crlf():
    stream = b": ping\r\n\r\nevent: message\r\nid: 3\r\nretry: 10\r\ndata: " + orjson.dumps(delta(content="x")) + \
        b"\r\n\r\ndata:[DONE]\r\n\r\n"
    reader = read([stream])
    assert (reader.reply, reader.done) == ("x", True)


def test_data_on_two_lines_is_joined():
    assert EventParser().feed(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_the_end_may_lack_its_empty_line():
    reader = read([data(delta(content="x")), b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n'])
    assert reader.complete


def test_no_done_but_finish_is_complete_and_neither_is_not():
    assert read([data(delta(content="x")), data(delta("stop"))]).complete
    assert not read([data(delta(content="x"))]).complete


def test_a_200_may_carry_an_error():
    reader = read([data(delta(content="x")), data({"error": {"message": "worker died", "code": 500}})])
    assert (reader.error_class, reader.error_message, reader.complete) == ("stream_error", "worker died", False)
    overflow = read([data({"error": {"message": "This model's maximum context length is 4096 tokens."}})])
    assert overflow.error_class == "context_overflow"


@pytest.mark.parametrize("bad", [b"{not json", b"[1]", b'"text"', b'{"choices":[7]}', b'{"choices":[{"delta":[]}]}',
                                 b'{"choices":[{"delta":{"content":5}}]}'])
def test_a_bad_event_is_named(bad):
    assert read([data(bad)]).error_class == "bad_event"


def test_usage_may_be_odd():
    assert read([data({"choices": [], "usage": {"completion_tokens": None}})]).count("completion_tokens") is None
    assert read([data({"choices": [], "usage": {"prompt_tokens_details": None}})]).count("cached_tokens") is None


def test_classify_error_reads_all_shapes():
    assert classify_error({"error": {"message": "m", "code": "context_length_exceeded"}}, "http_400") == (
        "context_overflow", "m")
    assert classify_error({"object": "error", "message": "no"}, "http_400") == ("http_400", "no")
    assert classify_error("Internal Server Error", "http_500")[0] == "http_500"
    assert classify_error({"detail": [{"msg": "x"}]}, "http_422")[0] == "http_422"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_split_gives_the_same_answer(draw):
    ending = draw.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
    noise = b": keep-alive\n\n"
    stream = draw.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + noise.join(ANSWER)
    stream = stream.replace(b"\n", ending)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, split = read([stream]), read(pieces)
    assert (split.reply, split.texts, split.usage, split.done) == (whole.reply, whole.texts, whole.usage, True)
    assert split.times_s == sorted(split.times_s)


def test_byte_by_byte():
    stream = b"".join(ANSWER)
    assert read([stream[k:k + 1] for k in range(len(stream))]).reply == "Héllo 世"


@given(st.lists(st.text(max_size=8), max_size=20), st.one_of(st.none(), st.integers(0, 200)))
def test_shares_sum_to_the_usage(texts, total):
    shares = token_shares(texts, [None] * len(texts), total)
    assert len(shares) == len(texts)
    if texts:
        assert sum(shares) == pytest.approx(len(texts) if total is None else total)


def test_shares_known_answers():
    assert token_shares(["a", "b"], [None, None], 2) == [1.0, 1.0]
    assert token_shares(["abcd", "abcd"], [None, None], 8) == [4.0, 4.0]
    assert token_shares(["a", "b"], [1, 5], 5) == [1.0, 4.0]  # the server counts as it goes
    assert token_shares(["a", "b"], [1, 4], 5) == [1.0, 4.0]  # and an end token without text
    assert token_shares(["a", "b", "c", "d"], [None] * 4, 2) == [0.5] * 4
