"""The stream reader: every case seen in the field, and every split of the bytes gives the same result."""

from __future__ import annotations

import time

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.load.reader import StreamReader, classify_error, token_shares
from spoc_lib.load.sse import EventParser


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
    for number, piece in enumerate(pieces):
        reader.feed(float(number), piece)
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


@pytest.mark.parametrize("value", ["7", -7, 1e30, 10**19, True, [7], {"n": 7}])
def test_a_number_of_tokens_that_cannot_be_is_none(value):
    usage = {"prompt_tokens": value, "completion_tokens": value, "prompt_tokens_details": {"cached_tokens": value}}
    reader = read([data({**delta(content="x"), "usage": usage}), data({"choices": [], "usage": usage})])
    assert [reader.count(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")] == [None] * 3
    assert reader.running_tokens == [None]
    assert read([data({"choices": [], "usage": {"prompt_tokens_details": value}})]).count("cached_tokens") is None


def test_no_tokens_where_chunks_came_is_no_usage():
    nothing = {"choices": [], "usage": {"completion_tokens": 0}}
    assert read([data(delta(content="x")), data(nothing)]).count("completion_tokens") is None
    assert read([data(nothing)]).count("completion_tokens") == 0


def test_a_finish_reason_is_text():
    assert read([data(delta({"type": "stop"}))]).finish_reason == "{'type': 'stop'}"


def thinking(completion: int, reasoning: object, *deltas: dict) -> StreamReader:
    usage = {"completion_tokens": completion, "completion_tokens_details": {"reasoning_tokens": reasoning}}
    return read([*map(data, deltas), data({"choices": [], "usage": usage})])


def test_reasoning_that_is_kept_back_is_no_token_of_the_stream():
    """The gaps are of what came: tokens that the server thought and did not send would make them shorter."""
    answer = [delta(content=text) for text in "abc"]
    hidden = thinking(1003, 1000, *answer)
    assert (hidden.hidden_tokens, hidden.output_tokens, hidden.count("completion_tokens")) == (1000, 3, 1003)
    sent = thinking(5, 2, delta(reasoning_content="h"), delta(reasoning_content="m"), *answer)
    assert (sent.hidden_tokens, sent.output_tokens) == (0, 5)
    within_content = thinking(3, 2, *answer)  # <think> in the content: every token came
    assert (within_content.hidden_tokens, within_content.output_tokens) == (0, 3)
    assert thinking(5, "2", *answer).hidden_tokens == thinking(5, 0, *answer).hidden_tokens == 0


def test_a_named_error_event_is_an_error():
    reader = read([b'event: error\ndata: {"message": "gone", "type": "server_error"}\n\n'])
    assert (reader.error_class, reader.error_message) == ("stream_error", "gone")


def test_a_long_event_costs_no_more_than_its_length():
    """In pieces of a read each: joined anew with each piece, 16 MB would take many seconds."""
    event = data(delta(content="x" * (16 << 20)))
    began = time.process_time()
    reader = read([event[k:k + 8192] for k in range(0, len(event), 8192)])
    assert len(reader.reply) == 16 << 20 and time.process_time() - began < 2.0


def test_classify_error_reads_all_shapes():
    assert classify_error({"error": {"message": "m", "code": "context_length_exceeded"}}, "http_400") == (
        "context_overflow", "m")
    assert classify_error({"object": "error", "message": "no"}, "http_400") == ("http_400", "no")
    assert classify_error("Internal Server Error", "http_500")[0] == "http_500"
    assert classify_error({"detail": [{"msg": "x"}]}, "http_422")[0] == "http_422"


@pytest.mark.parametrize("message", [
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",  # vLLM
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).",  # SGLang
    "the request exceeds the available context size. try increasing the context size",  # llama.cpp
    "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens",  # TGI
    "The input token count (5000) exceeds the maximum number of tokens allowed (4096).",  # Gemini
])
def test_servers_say_overflow_in_many_words(message):
    assert classify_error({"error": {"message": message}}, "http_400")[0] == "context_overflow"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_split_gives_the_same_answer(draw):
    endings = draw.draw(st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=1, max_size=4))
    noise = b": keep-alive\n\n"
    stream = draw.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + noise.join(ANSWER)
    paragraphs = enumerate(stream.split(b"\n\n")[:-1])  # each may end in its own way
    stream = b"".join(text.replace(b"\n", endings[k % len(endings)]) + 2 * endings[k % len(endings)]
                      for k, text in paragraphs)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    whole, split = read([stream]), read(pieces)
    assert (split.reply, split.texts, split.usage, split.done) == ("Héllo 世", whole.texts, whole.usage, True)
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
