"""Tokens of the server: pieces are exact, replies survive the echo, block keys mean prefixes."""

from __future__ import annotations

import asyncio
import time
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.engine.http.text import HashedContent, PromptEncoder, Reply, TokenCache, Words, prompt_identity
from spoc_lib.engine.http.timer import Timer
from spoc_lib.workload import template
from spoc_lib.workload.tokenizer import offline_tokenizer

TOKENIZER = offline_tokenizer()
WORDS = Words(TOKENIZER.encode)


#: What a splitting pattern may join or not: newlines, kinds of white space, slashes, punctuation, letters.
SNIPPETS = ["\n", "\n\n", " ", "\t", "/", "//", "}", ");", "x", "if x:", "'s", "9", "\r\n", "\u3000", "é", "\x0b",
            "\u2028", "…", "👍", "    ", "return\n"]


def encoder(**sizes) -> PromptEncoder:
    return PromptEncoder(TOKENIZER.encode, **sizes)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(SNIPPETS), max_size=40).map("".join))
def test_pieces_give_the_ids_of_the_whole(text):
    assert list(encoder().text(text)) == TOKENIZER.encode(text)


def test_source_code_gives_the_ids_of_the_whole_and_again_from_the_cache():
    with open(asyncio.__file__, encoding="utf-8") as file:
        text = file.read()
    with open(np.__file__, encoding="utf-8") as file:
        text += file.read()
    ours = encoder()
    assert list(ours.text(text)) == TOKENIZER.encode(text) == list(ours.text(text))


def test_chat_is_the_template_of_the_workload():
    messages = [{"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]},
                {"role": "assistant", "content": None}]
    assert list(encoder().chat(messages)) == template.encode(messages, TOKENIZER.encode)


def test_cache_is_bounded_and_keeps_what_is_used():
    cache = TokenCache(2000)
    for number in range(1000):
        cache.put(number, array("i", range(10)))
        assert cache.get(0) is not None
    assert len(cache._young) + len(cache._old) < 200
    assert cache.get(1) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**60), st.integers(1, 200))
def test_reply_tokens_are_its_texts_tokens(identity, limit):
    reply = Reply(WORDS, identity, limit=limit, ignore_eos=True)
    assert list(reply.token_ids) == TOKENIZER.encode(reply.text())
    assert reply.length == limit and reply.finish_reason == "length"
    pieces = b"".join(reply.piece(number, number + 1) for number in range(limit))
    assert pieces.decode() == reply.text()


def test_vocabulary_of_replies_is_large_enough_to_tell_replies_apart():
    assert len(WORDS.text) > 150
    assert Reply(WORDS, 1, limit=20).text() != Reply(WORDS, 2, limit=20).text()


def test_a_stop_string_across_words_and_before_min_tokens():
    plain = Reply(WORDS, 7, limit=50, ignore_eos=True)
    words = [WORDS.text[index] for index in plain.indices]
    stop = words[20][-2:] + words[21]
    found = Reply(WORDS, 7, limit=50, ignore_eos=True, stops=[stop])
    assert found.length <= 22 and found.stop_reason == stop and stop not in found.text()
    kept = Reply(WORDS, 7, limit=50, ignore_eos=True, stops=[stop], include_stop=True)
    assert kept.text().endswith(stop)
    later = Reply(WORDS, 7, limit=50, ignore_eos=True, stops=[words[3]], minimum=40)
    assert later.length >= 40


def test_block_keys_are_equal_exactly_for_equal_prefixes():
    none = np.zeros(0, dtype=np.int32)
    prompt = array("i", range(100))
    other = array("i", [*range(50), 999, *range(51, 100)])
    ours, theirs = HashedContent(prompt, none, 16), HashedContent(other, none, 16)
    assert [ours.key(block) == theirs.key(block) for block in range(6)] == [True, True, True, False, False, False]
    swapped = HashedContent(array("i", [1, 0, *range(2, 100)]), none, 16)
    assert swapped.key(0) != ours.key(0)


def test_a_reply_counts_as_the_prompt_that_it_becomes():
    reply = np.arange(500, 540, dtype=np.int32)
    prompt = array("i", range(24))
    grown = HashedContent(array("i", [*prompt, *reply]), np.zeros(0, dtype=np.int32), 16)
    generated = HashedContent(prompt, reply, 16)
    assert [grown.key(block) for block in range(4)] == [generated.key(block) for block in range(4)]
    assert prompt_identity(prompt) != prompt_identity(array("i", reversed(prompt)))


def test_timer_is_not_late_and_can_be_woken():
    async def measure() -> tuple[float, float]:
        with Timer() as timer:
            moment = time.monotonic() + 0.0205
            await timer.until(moment)
            late = time.monotonic() - moment
            began = time.monotonic()
            asyncio.get_running_loop().call_later(0.02, timer.wake)
            await timer.until(None)
            return late, time.monotonic() - began

    late, woken = asyncio.run(measure())
    assert 0 <= late < 0.1 and 0.015 < woken < 0.2


def test_encoder_is_fast_for_what_it_has_seen():
    text = "".join(f"def function_{number}(value):\n    return value + {number}\n" for number in range(5000))
    ours = encoder()
    ours.text(text)
    began = time.process_time()
    for _ in range(5):
        ours.text(text)
    assert (time.process_time() - began) / 5 < 0.01


@pytest.mark.parametrize("size", [1, 16, 128])
def test_block_size_of_the_keys(size):
    content = HashedContent(array("i", range(130)), np.zeros(0, dtype=np.int32), size)
    assert len({content.key(block) for block in range(130 // size)}) == 130 // size
