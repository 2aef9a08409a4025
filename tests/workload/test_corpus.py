"""Exact sizes: texts have the tokens they should have, alone, joined, and through the chat template."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spoc_lib.core.errors import InputError
from spoc_lib.workload import build_script, template
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.messages import Conversation
from spoc_lib.workload.script import Segment
from spoc_lib.workload.tokenizer import offline_tokenizer

TOKENIZER = offline_tokenizer()


@pytest.fixture(scope="module")
def corpus():
    return Corpus.from_directory(max_bytes=1 << 20)


@pytest.fixture(scope="module")
def nasty(tmp_path_factory):
    """Source that provokes seams: comments with slashes, CRLF, tabs, blank lines with spaces, emoji, long lines."""
    folder = tmp_path_factory.mktemp("nasty")
    lines = ["// a comment", "/* block", "   */", "", "   ", "\t\tif (x) {\r", "}\r", "x = 'é 日本 🙂';", "\x0c", "{};",
             "<|endoftext|>", "y" * 900, "a,b,c,,,,;;;///", "    return 12345678901;", "#!/bin/sh", "\u00a0nbsp", "£"]
    words = ["alpha beta gamma delta epsilon zeta theta lambda sigma omega value index count total first last"]
    for k in range(6):
        (folder / f"f{k}.js").write_text("\n".join(lines[k:] + lines[:k] + words * 3) * 4)
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    return Corpus.from_directory(folder)


@pytest.mark.parametrize("which", ["corpus", "nasty"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_joined_texts_keep_their_counts(request, which, data):
    source = request.getfixturevalue(which)
    sizes = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=8))
    streams = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(sizes), max_size=len(sizes)))
    texts = [source.text(Segment(stream, size, "turn")) for stream, size in zip(streams, sizes, strict=True)]
    assert [TOKENIZER.count(text) for text in texts] == sizes
    assert TOKENIZER.count("".join(texts)) == sum(sizes)


@settings(max_examples=40, deadline=None)
@given(stream=st.integers(0, 2**63 - 1), short=st.integers(1, 900), more=st.integers(1, 900))
def test_the_shorter_is_a_prefix(corpus, stream, short, more):
    one, two = (TOKENIZER.encode(corpus.stream_text(stream, n)) for n in (short, short + more))
    common = next((k for k, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), short)
    assert common >= short - 12


def test_unequal_streams_differ_within_a_block(corpus):
    heads = {tuple(TOKENIZER.encode(corpus.stream_text(stream * 7919, 40))[:13]) for stream in range(2000)}
    assert len(heads) == 2000


@pytest.mark.parametrize("personas", ["spoc", "tiny"])
def test_prompts_count_exactly_through_the_template(corpus, personas):
    script = build_script(personas, 1)
    for user in script.users(10):
        conversation = Conversation(corpus)
        for k in range(2):
            turn = user.next(conversation.history_tokens)
            messages = conversation.apply(turn)
            assert len(template.encode(messages, TOKENIZER.encode)) == turn.prompt_tokens
            roles = [m["role"] for m in messages]
            assert roles[0] == "system" and roles[1::2] == ["user"] * len(roles[1::2])
            assert set(roles[2::2]) <= {"assistant"}
            conversation.add_reply(f"reply {k}\n" * 9)


def test_template_counts():
    messages = [{"role": "system", "content": "root"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": None}]
    ids = template.encode(messages, TOKENIZER.encode)
    assert len(ids) == TOKENIZER.count("root") + TOKENIZER.count("hi") + template.overhead_tokens(3)
    assert ids[0] == template.START_ID and ids.count(template.END_ID) == 3
    assert template.render(messages).endswith("<|start|>assistant")


def test_measured_overhead_of_a_foreign_template():
    def count_messages(messages):
        return 11 + sum(7 + TOKENIZER.count(m["content"]) for m in messages)

    assert template.measured_overhead(count_messages, TOKENIZER.count) == template.Overhead(11, 7)


def test_echo_policy(corpus):
    for echo, expected in (("content", "answer"), ("reasoning", "think answer")):
        conversation = Conversation(corpus, echo)
        conversation.apply(build_script("tiny", 1, start="cold").user(0).next(0))
        conversation.add_reply("answer", reasoning="think ")
        assert conversation.messages[-1] == {"role": "assistant", "content": expected}


def test_order_is_that_of_names(tmp_path):
    for name in ("b.py", "a.py"):
        (tmp_path / name).write_text("one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
                                     "fifteen sixteen seventeen eighteen\n" f"name_{name[0]} = 1\n")
    body = Corpus.from_directory(tmp_path).body
    assert body.index("name_a") < body.index("name_b")


@pytest.mark.parametrize(("files", "said"), [
    ({}, "it is empty"), ({"x.bin": b"\0\1"}, "binary"), ({"x.py": b"\xff\xfe\0"}, "binary"), (None, "not a directory"),
    ({"x.py": b"a = 1\n"}, "larger folder"),
])
def test_unusable_monorepo(tmp_path, files, said):
    for name, content in (files or {}).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as error:
        Corpus.from_directory(tmp_path if files is not None else tmp_path / "absent")
    assert said in error.value.message


def test_a_turn_taken_back_leaves_the_history_as_it_was():
    corpus = Corpus.from_directory()
    history = Conversation(corpus)
    user = build_script("tiny", 3).user(0)
    history.apply(user.next(0))
    history.add_reply("done.", tokens=2)
    before, size = history.messages, history.history_tokens
    history.apply(user.next(history.history_tokens))
    history.drop_last()
    assert (history.messages, history.history_tokens) == (before, size)
