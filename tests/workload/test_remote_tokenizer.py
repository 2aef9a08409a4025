"""The server's own tokenizer, asked over HTTP: a small server with another vocabulary stands in for it."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.workload import build_script, load_personas, template
from spoc_lib.workload.audit import audit
from spoc_lib.workload.messages import Conversation
from spoc_lib.workload.target import measure_target
from spoc_lib.workload.tokenizer import RemoteTokenizer, offline_tokenizer

PIECES = re.compile(r" ?[A-Za-z]{1,9}|\d| ?[^\sA-Za-z\d]{1,2}|\n+|[ \t]+(?=\S)|\s")
WORDS: list[str] = []
TEXT = ("def join the words of a line into one text and count them all again\n    return total\n"
        "for each user in the list we ask how many tokens this prompt has now\n" * 30)


def encode(text: str) -> list[int]:
    ids = []
    for piece in PIECES.findall(text):
        if piece not in WORDS:
            WORDS.append(piece)
        ids.append(WORDS.index(piece))
    return ids


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body in one packet

    def do_POST(self):  # noqa: N802 (the library's name)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and "messages" in body:
            answer = {"count": 3 + sum(5 + len(encode(m["content"])) for m in body["messages"]), "max_model_len": 4096}
        elif self.path == "/tokenize":
            ids = encode(body["prompt"])
            answer = {"count": len(ids), "tokens": ids}
        elif self.path == "/detokenize":
            answer = {"prompt": "".join(WORDS[i] for i in body["tokens"])}
        payload = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def tokenizer():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield RemoteTokenizer(f"http://127.0.0.1:{server.server_port}/v1", "tiny")
    server.shutdown()
    server.server_close()
    thread.join()


def test_prompts_are_exact_in_the_servers_tokens(tokenizer, tmp_path):
    (tmp_path / "a.py").write_text(TEXT)
    target = measure_target(tokenizer.base_url, "tiny", tmp_path)
    assert target.corpus.summary()["tokenizer"].startswith("tiny@") and target.corpus.seam_error_ratio() < 0.005
    assert (target.overhead, target.context_limit) == (template.Overhead(3, 5), 4096)
    loaded = load_personas("tiny")
    script = build_script(loaded, 1, overhead=target.overhead, context_limit=target.context_limit)
    for user in script.users(6):
        turn = user.next(0)
        messages = Conversation(target.corpus).apply(turn)
        assert tokenizer.count_messages(messages) == pytest.approx(turn.prompt_tokens, rel=0.005)
    gates = {gate.name: gate for gate in audit(script, loaded, target.corpus, 20, 5, sample_users=2).gates}
    assert gates["exact sizes"].passed and gates["common ground in the text"].passed


def test_a_server_with_the_offline_vocabulary_is_not_asked_for_each_text(tokenizer, tmp_path, monkeypatch):
    offline, asked = offline_tokenizer(), []

    def encode_as_offline(text: str) -> list[int]:
        asked.append(text)
        return offline.encode(text)

    monkeypatch.setitem(globals(), "encode", encode_as_offline)
    (tmp_path / "a.py").write_text(TEXT)
    target = measure_target(tokenizer.base_url, "tiny", tmp_path)
    questions = len(asked)
    assert target.corpus.tokenizer.name == offline.name and target.overhead == template.Overhead(3, 5)
    assert offline.count(target.corpus.stream_text(7, 100)) == 100
    assert len(asked) == questions < 12


def test_unreachable_server():
    with pytest.raises(InputError, match="is the server up"):
        RemoteTokenizer("http://127.0.0.1:9", "m").count("x")
    with pytest.raises(InputError, match="not an http"):
        RemoteTokenizer("ftp://x", "m")
