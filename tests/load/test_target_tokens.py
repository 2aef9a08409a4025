"""What is sent over HTTP: sizes in the server's own tokens, the echo of reasoning, recorded text."""

from __future__ import annotations

import json
import re

import orjson
import pytest
import yaml

from spoc_lib import config
from spoc_lib.core.errors import InputError
from spoc_lib.load import LoadPlan, run
from spoc_lib.load.script import material
from spoc_lib.workload.template import Overhead

PIECES = re.compile(r" ?[A-Za-z]{1,9}|\d| ?[^\sA-Za-z\d]{1,2}|\n+|[ \t]+(?=\S)|\s")
WORDS: list[str] = []
NUMBERS: dict[str, int] = {}


def encode(text: str) -> list[int]:
    ids = []
    for piece in PIECES.findall(text):
        if piece not in NUMBERS:
            NUMBERS[piece] = len(WORDS)
            WORDS.append(piece)
        ids.append(NUMBERS[piece])
    return ids


def count(messages: list[dict]) -> int:
    return 3 + sum(5 + len(encode(m["content"])) for m in messages)


def tokenizing(seen: list[dict], delta: dict | None = None):
    """A chat server with a vocabulary and a template of its own."""
    async def handler(request):
        line, body = request.head.split(b" ")[1], orjson.loads(request.body)
        if line == b"/tokenize" and "messages" in body:
            await request.json("200 OK", {"count": count(body["messages"]), "max_model_len": 4096})
        elif line == b"/tokenize":
            ids = encode(body["prompt"])
            await request.json("200 OK", {"count": len(ids), "tokens": ids})
        elif line == b"/detokenize":
            await request.json("200 OK", {"prompt": "".join(WORDS[i] for i in body["tokens"])})
        else:
            seen.append(body)
            usage = {"prompt_tokens": count(body["messages"]), "completion_tokens": body["max_tokens"]}
            await request.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                               b"Transfer-Encoding: chunked\r\n\r\n")
            for part in delta or ({"content": "a b"},):
                await request.event({"choices": [{"delta": part}]})
            await request.event({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": usage})
            await request.end()

    return handler


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text("def join the words of a line into one text and count them all again\n"
                                 "    return total\n" * 60)
    return str(folder)


def plan_of(url: str, **values) -> LoadPlan:
    return LoadPlan(**{"base_url": url, "model": "m", "users": 3, "duration_s": 1.5, "personas": "tiny", "seed": 3,
                       "gap_cap_s": 0.3, "start": "cold", "stop_timeout_s": 5.0, **values})


def test_intended_sizes_are_those_that_the_server_counts(tmp_path, server, corpus):
    seen: list[dict] = []
    with server(tokenizing(seen)) as url:
        plan = plan_of(url, corpus=corpus, tokenizer="target", context_limit=4096)
        assert material(plan).overhead == Overhead(3, 5)
        result = run(plan, tmp_path / "rung")
    done = result.requests[result.requests.outcome == "completed"]
    assert len(done) >= 3 and done.user.nunique() == 3
    error = (done.prompt_tokens / done.intended_prompt_tokens - 1).abs()
    assert error[done.turn == 0].max() <= 0.005  # later prompts hold replies of the server's own


def test_a_server_without_tokenize_is_refused_in_one_sentence(server, corpus):
    async def handler(request):
        await request.json("404 Not Found", {})

    with server(handler) as url, pytest.raises(InputError, match="offline tokenizer must be chosen"):
        material(plan_of(url, corpus=corpus, tokenizer="target"))


@pytest.mark.parametrize("echo", ["content", "reasoning"])
def test_echo_decides_what_of_a_reply_returns(tmp_path, server, corpus, echo):
    document = yaml.safe_load(config.find("personas", "tiny", "personas").read_text()) | {"echo": echo}
    personas = tmp_path / "personas.yaml"
    personas.write_text(yaml.safe_dump(document))
    seen: list[dict] = []
    with server(tokenizing(seen, ({"reasoning_content": "think "}, {"content": "answer"}))) as url:
        run(plan_of(url, corpus=corpus, personas=str(personas)), tmp_path / "rung")
    replies = {m["content"] for body in seen for m in body["messages"] if m["role"] == "assistant"}
    assert replies == {"answer" if echo == "content" else "think answer"}


def test_recorded_text_is_what_is_sent(tmp_path, server, corpus):
    trace = tmp_path / "talk.json"
    talk = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "The parser drops a line."},
            {"role": "assistant", "content": "I read parser.py."}, {"role": "user", "content": "It still fails."},
            {"role": "assistant", "content": "Fixed."}]
    trace.write_text(json.dumps(talk))
    seen: list[dict] = []
    with server(tokenizing(seen)) as url:
        plan = plan_of(url, corpus=corpus, personas=f"traces:{trace}", users=1)
        run(plan, tmp_path / "rung")
        with pytest.raises(InputError, match="'offline'"):
            material(plan.model_copy(update={"tokenizer": "target"}))
    assert [m["content"] for m in seen[0]["messages"]] == ["You fix bugs.", "The parser drops a line."]
    assert any("It still fails." in m["content"] for body in seen for m in body["messages"])


def test_rungs_over_http_take_the_targets_tokens_where_they_can(server):
    from types import SimpleNamespace as Holder

    from spoc_lib.config.cluster import Engine
    from spoc_lib.sweep.drivers import whose_tokens
    from spoc_lib.workload import build_script

    async def without(request):
        await request.json("404 Not Found", {})

    cluster, script = Holder(engine=Engine(kind="process", command=["x"])), build_script("tiny", 1)
    with server(tokenizing([])) as url:
        assert whose_tokens(cluster, Holder(base_url=url, model="m"), script) == ("target", [])
    with server(without) as url:
        tokens, said = whose_tokens(cluster, Holder(base_url=url, model="m"), script)
    assert tokens == "offline" and "may differ from the server's own" in said[0]
