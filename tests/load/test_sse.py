"""The stream reader: every case seen in the field, and every split of the bytes gives the same result."""

from __future__ import annotations

import json
import re
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
    assert (reader.finish_reason, reader.done, reader.fault) == ("stop", True, None)
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
    assert (reader.reply, reader.done, reader.odd) == ("x", True, {})


def test_data_on_two_lines_is_joined():
    assert EventParser().feed(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_the_end_may_lack_its_empty_line():
    reader = read([data(delta(content="x")), b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n'])
    assert reader.fault is None


def fault(*events: object) -> str | None:
    found = read([data(event) for event in events]).fault
    return found and found[0]


def test_the_finish_reason_tells_a_whole_answer_and_done_does_not():
    assert fault(delta(content="x"), delta("stop")) is None
    assert fault(delta(content="x")) == "cut"
    assert fault(delta(content="x"), b"[DONE]") == "unfinished"
    assert fault(delta("", content="x"), delta("None"), USAGE, b"[DONE]") == "unfinished"


@pytest.mark.parametrize("reason", [
    "stop", "length", "tool_calls", "function_call", "eos_token", "end_turn", "MAX_TOKENS", "FinishReason.STOP",
    "model_length", "COMPLETE", ["stop"], {"type": "length", "length": 16}, {"type": "stop", "matched": 2},
    "token_limit", "normal", "max_output", "max_new_tokens", "END_ID", "STOP_WORDS", "limit"])
def test_ends_of_an_answer_in_many_words(reason):
    assert fault(delta(content="x"), delta(reason), USAGE, b"[DONE]") is None


@pytest.mark.parametrize("word", ["NOT_FINISHED", "FINISH_REASON_UNSPECIFIED", "in_progress", None, ""])
def test_a_word_for_an_answer_that_goes_on_is_no_end(word):
    assert fault(delta(word, content="x"), delta("stop", content="y"), USAGE) is None
    assert fault(delta(word, content="x"), b"[DONE]") == "unfinished"
    assert fault(delta(word, content="x"), delta("error"), delta("stop"), b"[DONE]") == "finish_error"


@pytest.mark.parametrize(("reason", "error_class"), [
    ("abort", "finish_abort"), ("Aborted", "finish_aborted"), ("error", "finish_error"), ("ERROR", "finish_error"),
    ("cancelled", "finish_cancelled"), ("canceled", "finish_canceled"), ("FinishReason.ABORT", "finish_abort"),
    ("content_filter", "finish_content_filter"), ("content-filter", "finish_content_filter"),
    ("zz top", "finish_zz_top"),
    ({"type": "abort", "message": "server is shutting down", "status_code": 503}, "finish_abort"),
    ({"type": "abort", "message": "the input is longer than the model's context length"}, "context_overflow"),
    (["nothing"], "finish_nothing"), (7, "finish_7"), ("\U0001f600", "finish_unknown")])
def test_an_answer_that_the_server_broke_off_is_no_answer(reason, error_class):
    events = delta(content="x"), delta(reason), USAGE, b"[DONE]"
    assert fault(*events) == error_class
    assert read([data(event) for event in events]).count("completion_tokens") == 3  # what came after is read


@pytest.mark.parametrize("bad", [
    {"error": {"message": "boom"}}, {"error": "boom", "error_type": "generation"}, {"detail": "boom"},
    {"object": "error", "message": "boom", "code": 500}, {"error_message": "boom", "error_code": 50001},
    {"type": "error", "error": {"type": "overloaded_error", "message": "boom"}}, {"detail": [{"msg": "boom"}]},
    {"choices": [], "error": {"message": "boom"}}, {"choices": None, "message": "boom"}, {"msg": "boom", "code": 500},
    {"choices": [{"index": 0, "delta": {"content": ""}, "error": {"message": "boom"}, "finish_reason": "error"}]},
    {"status": "error", "reason": "boom"}, {"errors": [{"message": "boom"}]}])
def test_an_error_in_the_stream_in_many_shapes(bad):
    reader = read([data(event) for event in (delta(content="x"), bad, b"[DONE]")])
    assert reader.fault and reader.fault[0] == "stream_error" and "boom" in reader.fault[1]


@pytest.mark.parametrize("event", [b"event: error\ndata: boom\n\n", b"event: error\ndata: {\"why\": \"boom\"}\n\n"])
def test_an_event_of_the_name_error_is_one(event):
    reader = read([data(delta(content="x")), event, data(delta("stop"))])
    assert reader.fault and reader.fault[0] == "stream_error" and "boom" in reader.fault[1]


@pytest.mark.parametrize("beat", [
    b"data:\n\n", b"data: \n\n", b"data\n\n", b"data:   \n\n", b"data:\r\n\r\n", b": keep-alive\n\n",
    b"event: ping\ndata:\n\n", b"event: ping\ndata: ping\n\n", b"event: tick\ndata: 12:00\n\n", b"event: ping\n\n",
    b'event: ping\ndata: {"type": "ping"}\n\n', b"data: ping\n\n", b"data: keep-alive\n\n", b"data: : heartbeat\n\n",
    b"data: {}\n\n", b"data: null\n\n", b'data: {"type": "ping"}\n\n', b'data: {"object": "keepalive"}\n\n'])
def test_heartbeats_are_no_part_of_the_answer(beat):
    reader = read([beat, beat, beat + ANSWER[0], beat, *ANSWER[1:4], beat, *ANSWER[4:]])
    assert (reader.fault, reader.reply, len(reader.times_s)) == (None, "Héllo 世", 3)


def raw(content: bytes, more: bytes = b"") -> bytes:
    return data(b'{"choices":[{"index":0,"delta":{"content":' + content + b'},"finish_reason":null' + more + b"}]}")


@pytest.mark.parametrize(("chunks", "reply"), [
    ([raw(rb'"\ud83d"'), raw(rb'"\ude00"')], "\U0001f600"), ([raw(rb'"ok \ud83d"'), raw(b'" fine"')], "ok \ufffd fine"),
    ([raw(b'"\xf0\x9f"'), raw(b'"\x98\x80"')], "\ufffd" * 3), ([raw('"\ufffd"'.encode())] * 2, "\ufffd" * 2),
    ([raw(b'"a"', b',"logprobs":{"content":[{"logprob":NaN}]}'), raw(b'"b"', b',"logprobs":-Infinity')], "ab"),
    ([raw(b'"a"', b',"created":' + b"9" * 400), raw(b'"x","content":"b"')], "ab")])
def test_text_that_json_or_utf8_splits_is_timed_and_can_be_shown(chunks, reply):
    reader = read([*chunks, data(delta("stop")), data(USAGE)])
    assert (reader.fault, reader.times_s, reader.reply, reader.text) == (None, [0.0, 1.0], reply, reply)
    orjson.dumps([reader.reply, reader.text])


def test_content_in_parts_is_split_into_thought_and_answer():
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "I "}]}
    reader = read([data(delta(content=[thought])), data(delta(content=[thought, {"type": "text", "text": "So"}])),
                   data(delta(content={"type": "text", "text": " it"})), data(delta(content=[" ", "is"])),
                   data(delta(content=[{"type": "reference", "reference_ids": [1]}])), data(delta("stop"))])
    assert (reader.fault, reader.times_s, reader.reply, reader.reasoning) == (None, [0, 1, 2, 3], "So it is", "I I ")


@pytest.mark.parametrize(("fields", "text", "reply", "reasoning"), [
    ({"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, "hm", "", "hm"),
    ({"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}, "hm", "", "hm"),
    ({"reasoning": {"content": "hm"}}, "hm", "", "hm"), ({"refusal": "no"}, "no", "no", ""),
    ({"function_call": {"name": "ls", "arguments": "{}"}}, "ls{}", "", ""),
    ({"tool_calls": [{"function": {"name": "ls", "arguments": {"a": 1}}}, None]}, 'ls{"a": 1}', "", ""),
    ({"audio": {"data": "AAAA", "transcript": "hi"}}, "hi", "", "")])
def test_tokens_in_other_fields(fields, text, reply, reasoning):
    reader = read([data(delta(content=None, **fields)), data(delta("stop"))])
    assert (reader.fault, reader.texts, reader.reply, reader.reasoning) == (None, [text], reply, reasoning)


@pytest.mark.parametrize("last", [
    [{"choices": [{"delta": {}, "finish_reason": "stop", "usage": "USAGE"}]}],
    [{**delta("stop"), "x_groq": {"usage": "USAGE"}}], [{**delta("stop"), "usage": "USAGE"}],
    [delta("stop"), {"choices": [], "usage": "USAGE"}],
    [delta("stop"), {"choices": None, "x_groq": {"usage": "USAGE"}}],
    [{"choices": [{"delta": {}, "finish_reason": "stop", "usage": "USAGE"}], "usage": None},
     {"choices": [], "usage": {}}]])
def test_usage_wherever_it_stands(last):
    told = b'{"prompt_tokens":900,"completion_tokens":20,"cached_tokens":640}'
    reader = read([data(delta(content="word "))] + [data(orjson.dumps(event).replace(b'"USAGE"', told))
                                                    for event in last])
    assert [reader.count(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")] == [900, 20, 640]


def test_events_of_another_api_are_counted_and_named():
    reader = read([data({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "x"}})] * 2
                  + [data(b"[DONE]")])
    assert sum(reader.odd.values()) == 2 and "content_block_delta" in reader.fault[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from(["error", "abort", "stop", "[DONE]", "ping", "\ud83d"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([
        "choices", "delta", "content", "usage", "error", "type", "text", "finish_reason", "message", "tool_calls",
        "function", "arguments", "completion_tokens", "detail", "reasoning_details", "audio", "x"]), inner, max_size=4),
    max_leaves=12)
FIELDS = ["content", "reasoning", "reasoning_content", "tool_calls", "function_call", "audio", "refusal", "thinking"]


def outcome(stream: bytes) -> None:
    """Whatever came has a class or is whole, and all that is kept of it can be written down."""
    reader = read([stream[:len(stream) // 2], stream[len(stream) // 2:]])
    assert reader.fault is None or re.fullmatch(r"[a-z0-9_]{1,60}", reader.fault[0])
    kept = [reader.fault, reader.reply, reader.reasoning, reader.text, reader.finish_reason, reader.output_tokens,
            reader.hidden_tokens, reader.count("cached_tokens")]
    orjson.dumps(kept)
    shares = token_shares(reader.texts, reader.running_tokens, reader.output_tokens)
    assert len(shares) == len(reader.times_s)


@settings(max_examples=400, deadline=None)
@given(JSON, JSON, st.sampled_from(FIELDS), st.sampled_from(["finish_reason", "delta", "usage", "error", "message"]))
def test_any_json_in_any_field_has_an_outcome(value, other, field, choice_field):
    chunk = {"choices": [{"delta": {field: value}, choice_field: other}], "usage": other}
    for event in (value, {**chunk, "error": None}, {"choices": value, "usage": other}, {"error": value}):
        outcome(b"data: " + json.dumps(event).encode() + b"\n\n" + ANSWER[4])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=12) | st.sampled_from([
    *ANSWER, b"data: ", b"event: error", b"\n", b"\r\n\r\n", b"\n\n", b'{"choices":[', b"\xef\xbb\xbf", b"[DONE]"]),
    max_size=12))
def test_any_bytes_have_an_outcome(pieces):
    outcome(b"".join(pieces))


def test_nesting_and_numbers_beyond_any_parser_have_an_outcome():
    for opening in (b'{"error":', b'{"choices":[{"delta":{"content":[', b'{"choices":[{"finish_reason":'):
        outcome(data(opening + b"[" * 900))
        outcome(data(opening * 900))
    for depth in (300, 900, 5000):
        outcome(data(b'{"error":' * depth + b"1" + b"}" * depth))
        outcome(data(b'{"choices":[{"finish_reason":' + b"[" * depth + b"]" * depth + b"}]}"))
        outcome(data(b'{"choices":[{"delta":{"content":' + b"[" * depth + b"]" * depth + b"}}]}"))
    outcome(data(b'{"error":' + b"9" * 5000 + b"}"))


def test_a_200_may_carry_an_error():
    reader = read([data(delta(content="x")), data({"error": {"message": "worker died", "code": 500}})])
    assert (reader.error_class, reader.error_message) == ("stream_error", "worker died")
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


def test_a_finish_reason_is_a_word():
    assert read([data(delta({"type": "stop"}))]).finish_reason == "stop"


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


@pytest.mark.parametrize(("usage", "counts"), [
    ({"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 135, "completion_tokens_details": {
        "reasoning_tokens": 94}}, (103, 94, 9, 32, None)),  # counted apart: the total tells
    ({"prompt_tokens": 32, "completion_tokens": 9, "total_tokens": 41, "completion_tokens_details": {
        "reasoning_tokens": 4}}, (9, 4, 5, 32, None)),
    ({"prompt_tokens": 32, "completion_tokens": 0, "total_tokens": 92, "completion_tokens_details": {
        "reasoning_tokens": 60}}, (60, 0, 60, 32, None)),  # less is left than chunks came
    ({"input_tokens": 32, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 16},
      "output_tokens_details": {"reasoning_tokens": 4}}, (9, 4, 5, 32, 16))])
def test_reasoning_belongs_to_the_completion_however_a_server_counts_it(usage, counts):
    events = delta(content="a"), delta(content="b"), delta("stop"), {"choices": [], "usage": usage}, \
        {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}  # a router's own, which counts nothing
    reader = read([data(event) for event in events])
    assert (reader.count("completion_tokens"), reader.hidden_tokens, reader.output_tokens,
            reader.count("prompt_tokens"), reader.count("cached_tokens")) == counts
    events = delta(reasoning_content="hm"), *events
    assert read([data(event) for event in events]).output_tokens == counts[0]  # it was streamed: all was carried


def test_a_last_event_that_repeats_the_whole_answer_adds_nothing():
    whole = {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop", "message": {
        "role": "assistant", "content": "ab"}}], "usage": {"completion_tokens": 2}}
    reader = read([data(event) for event in (delta(content="a"), delta(content="b"), whole)])
    assert (reader.reply, reader.times_s, reader.fault, reader.output_tokens) == ("ab", [0.0, 1.0], None, 2)
