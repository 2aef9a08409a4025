"""The embedded server as its clients meet it: real process, real sockets."""

from __future__ import annotations

import http.client
import json
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spoc_lib.config import load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.engine.http.options import parse_throttle
from spoc_lib.servers import launch
from spoc_lib.workload.template import overhead_tokens
from spoc_lib.workload.tokenizer import offline_tokenizer


def cluster_file(folder, model="gpt-oss-120b", count=4):
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({
        "name": "here", "title": "server tests", "hardware": {"gpu": "h100-sxm", "count": count},
        "engine": {"kind": "embedded", "served_model": "m"}, "model": model, "ladder": {"users": [1]},
        "slos": [{"metric": "ttft", "limit_s": 1.0}],
    }))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """gpt-oss-120b on 4 GPUs: steps of some milliseconds, contexts of 128k tokens."""
    folder = tmp_path_factory.mktemp("server")
    with launch(load_cluster(str(cluster_file(folder))), {}, folder) as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny model with queue limits of 4 requests and 2000 tokens, served as a user would start it: without developer
    routes."""
    folder = tmp_path_factory.mktemp("small")
    ready = folder / "ready.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "spoc_lib", "engine", "serve", "--cluster", str(cluster_file(folder, "tiny-moe", 1)),
         "--ready-file", str(ready), "--json", str(folder / "served.json"), "--max-num-queued-reqs", "4",
         "--max-num-queued-tokens", "2000", "--max-num-seqs=2", "--reasoning-tokens", "3"],
        stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            if ready.exists():
                break
            time.sleep(0.05)
        yield json.loads(ready.read_text())["base_url"]
    finally:
        process.terminate()
        assert process.wait(10) == 0
        said = process.stdout.read()
        assert re.match(r"spoc engine: m \(simulated\) at http://127.0.0.1:\d+, GPU counters at ", said)
        assert re.search(r"served \d+ requests: \d+ prompt tokens", said)
        result = json.loads((folder / "served.json").read_text())
        assert result["generation_tokens"] > 0 and result["passport"]["simulated"]


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def post(url: str, path: str, body, content_type="application/json", timeout=30):
    """(status, parsed body or text)"""
    connection = http.client.HTTPConnection(*address(url), timeout=timeout)
    try:
        payload = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, payload, {"Content-Type": content_type})
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text
    finally:
        connection.close()


def get(url: str, path: str) -> str:
    connection = http.client.HTTPConnection(*address(url), timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def metric(url: str, name: str, labels: str = "") -> float:
    return sum(float(line.rpartition(" ")[2]) for line in get(url, "/metrics").splitlines()
               if line.startswith(name) and labels in line and line[len(name)] in "{ ")


def chat(content, **options) -> dict:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"model": "m", "messages": messages, **options}


def events(text: str) -> list[dict]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


def streamed(url: str, body: dict) -> list[dict]:
    status, text = post(url, "/v1/chat/completions", {**body, "stream": True})
    assert status == 200, text
    return events(text)


# replies and counts

def test_reply_has_exactly_the_tokens_it_says_and_they_survive_the_echo(server):
    tokens = offline_tokenizer().count
    prompt = "import os\n"
    status, first = post(server.base_url, "/v1/chat/completions", chat(prompt, max_tokens=100, ignore_eos=True))
    assert status == 200
    text = first["choices"][0]["message"]["content"]
    assert tokens(text) == 100 == first["usage"]["completion_tokens"]
    assert first["usage"]["prompt_tokens"] == tokens(prompt) + overhead_tokens(1)
    history = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text},
               {"role": "user", "content": "go on"}]
    _, second = post(server.base_url, "/v1/chat/completions", chat(history, max_tokens=1))
    assert second["usage"]["prompt_tokens"] == tokens(prompt) + 100 + tokens("go on") + overhead_tokens(3)


def test_same_request_same_reply_streamed_or_not_and_seed_changes_it(server):
    body = chat("def f(x):", max_tokens=20)
    _, whole = post(server.base_url, "/v1/chat/completions", body)
    chunks = streamed(server.base_url, body)
    text = "".join(one["choices"][0]["delta"]["content"] for one in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    _, other = post(server.base_url, "/v1/chat/completions", {**body, "seed": 1})
    assert other["choices"][0]["message"]["content"] != text


def test_cached_tokens_are_whole_blocks_of_the_common_prefix(server):
    shared = "".join(f"value_{number} = {number}\n" for number in range(300))
    for question, cached in (("first question", False), ("second question", True)):
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": question}]
        _, answer = post(server.base_url, "/v1/chat/completions", chat(messages, max_tokens=2))
        hit = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert hit % 16 == 0
        assert hit > 0 if cached else hit == 0
    assert hit <= offline_tokenizer().count(shared) + 4


def test_natural_end_is_stop_and_min_tokens_moves_it(small):
    _, free = post(small, "/v1/chat/completions", chat("x = 1", max_tokens=2000))
    assert free["choices"][0]["finish_reason"] == "stop"
    assert 64 <= free["usage"]["completion_tokens"] <= 1024
    _, longer = post(small, "/v1/chat/completions", chat("x = 1", max_tokens=2000, min_tokens=1500))
    assert longer["usage"]["completion_tokens"] == 1500


def test_stop_string_ends_the_text_before_it_and_is_never_streamed(server):
    body = chat("y = 2", max_tokens=60, ignore_eos=True)
    _, whole = post(server.base_url, "/v1/chat/completions", body)
    text = whole["choices"][0]["message"]["content"]
    words = text.split(" ")[1:]
    stop = f"{words[30][-2:]} {words[31][:2]}"
    body["stop"] = [stop, "no such text"]
    _, cut = post(server.base_url, "/v1/chat/completions", body)
    choice = cut["choices"][0]
    assert choice["message"]["content"] == text[:text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert cut["usage"]["completion_tokens"] == len(text[:text.index(stop) + len(stop)].split(" ")) - 1
    pieces = [one["choices"][0]["delta"].get("content", "") for one in streamed(server.base_url, body)]
    assert "".join(pieces) == choice["message"]["content"]


def test_stream_interval_gathers_tokens(server):
    body = chat("z", max_tokens=11, ignore_eos=True, stream_interval=4, stream_options={"include_usage": True})
    sizes = [one["choices"][0]["delta"]["content"].count(" ") for one in streamed(server.base_url, body)[1:-1]]
    assert sizes == [1, 4, 4, 2]


def test_choices_are_streamed_under_their_index(server):
    chunks = streamed(server.base_url, chat("n", max_tokens=6, n=3, ignore_eos=True,
                                            stream_options={"include_usage": True}))
    texts = dict.fromkeys(range(3), "")
    for one in chunks[:-1]:
        choice = one["choices"][0]
        texts[choice["index"]] += choice["delta"]["content"]
    assert all(text.count(" ") == 6 for text in texts.values())
    assert len(set(texts.values())) == 3
    assert chunks[-1]["usage"]["completion_tokens"] == 18


def test_reasoning_comes_first_and_apart(small):
    _, whole = post(small, "/v1/chat/completions", chat("why", max_tokens=8, ignore_eos=True))
    message = whole["choices"][0]["message"]
    assert (message["reasoning"].count(" "), message["content"].count(" ")) == (3, 5)
    deltas = [one["choices"][0]["delta"] for one in streamed(small, chat("why", max_tokens=8, ignore_eos=True))]
    assert "".join(one.get("reasoning", "") for one in deltas) == message["reasoning"]
    assert "".join(one.get("content", "") for one in deltas) == message["content"]


def test_tokenize_and_detokenize_are_inverse(server):
    text = "def f(x):\n    return x  # naïve ☃\n"
    _, answer = post(server.base_url, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    _, back = post(server.base_url, "/detokenize", {"tokens": answer["tokens"]})
    assert back["prompt"] == text


# errors

@pytest.mark.parametrize(("change", "message"), [
    ({"n": 0}, "n must be at least 1, got 0."),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens must be less than or equal to max_tokens=5, got 9."),
    ({"top_p": 0}, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"),
    ({"temperature": -1}, "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"),
    ({"stop": [""]}, "stop cannot contain an empty string."),
    ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3.0."),
    ({"n": 20_000}, "n must be at most 16384, got 20000. To increase this limit, set the "
                    "VLLM_MAX_N_SEQUENCES environment variable."),
    ({"tools": [{"type": "function"}]},
     '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'),
    ({"tools": [{"type": "function"}], "tool_choice": "none"},
     "tools is not supported by the embedded engine. (parameter=tools)"),
    ({"tool_choice": "auto"}, "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)"),
    ({"tools": []}, "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely. "
                    "(parameter=tools)"),
    ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2."),
    ({"chat_template": "{{ 1 }}"}, "Chat template is passed with request, but --trust-request-chat-template is not "
                                   "set. Refused request with untrusted chat template."),
    ({"cache_salt": "mine"}, "cache_salt is not supported by the embedded engine. (parameter=cache_salt)"),
    ({"logprobs": True}, "logprobs is not supported by the embedded engine. (parameter=logprobs)"),
    ({"messages": []}, "Cannot apply chat template to an empty conversation. Provide at least one message."),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "m is not a multimodal model"),
])
def test_sampling_parameters_out_of_range(server, change, message):
    status, body = post(server.base_url, "/v1/chat/completions", {**chat("x"), **change})
    assert (status, body["error"]["message"], body["error"]["code"]) == (400, message, 400)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["model", "messages", "prompt", "max_tokens", "n", "role", "content", "stream", "stop", "stream_options",
         "tokens"]), inner, max_size=5), max_leaves=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]), body=JSON)
def test_no_body_makes_the_server_fail(small, path, body):
    if isinstance(body, dict) and isinstance(body.get("max_tokens"), int):
        body["max_tokens"] = min(body["max_tokens"], 20)
    status, _ = post(small, path, body)
    assert status < 500 or status == 503


@pytest.mark.parametrize("body", [b"\xff\xfe", b"", b"[" * 100_000,
                                  b'{"messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_broken_bodies_are_client_errors(small, body):
    status, _ = post(small, "/v1/chat/completions", body)
    assert 200 <= status < 500


def test_queue_limit_is_503(small):
    answers = []

    def one():
        answers.append(post(small, "/v1/completions", {"prompt": "a", "max_tokens": 1000, "ignore_eos": True}))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [body for status, body in answers if status == 503]
    assert [status for status, _ in answers].count(200) >= 4
    assert refused and refused[0]["error"]["type"] == "Service Unavailable"
    assert metric(small, "vllm:admission_rejections_total", 'reason="max_num_queued_reqs"') == len(refused)


def test_queued_tokens_limit_is_503(small):
    running = [open_stream(small, chat("run", max_tokens=4000, ignore_eos=True)) for _ in range(2)]
    assert wait_for(lambda: metric(small, "vllm:num_requests_running") == 2)
    waiting = open_stream(small, {"prompt": [7] * 2000, "max_tokens": 2}, "/v1/completions")
    try:
        assert wait_for(lambda: metric(small, "vllm:num_requests_waiting") == 1)
        status, body = post(small, "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 503
        assert body["error"]["message"].startswith("The engine has reached its prefill token backlog limit.")
        assert metric(small, "vllm:admission_rejections_total", 'reason="max_num_queued_tokens"') == 1
    finally:
        for connection in (*running, waiting):
            connection.close()
    assert wait_for(lambda: metric(small, "vllm:num_requests_running") == 0)


def test_prompts_that_were_let_in_together_are_not_judged_once_more(small):
    for _ in range(2):
        status, body = post(small, "/v1/completions", {"prompt": [[7] * 2000, [8] * 2000], "max_tokens": 1})
        assert status == 200 and len(body["choices"]) == 2


def test_developer_routes_need_the_flag(small, server):
    for path in ("/reset_prefix_cache", "/start_profile", "/stop_profile"):
        assert post(small, path, b"")[0] == 404
        assert post(server.base_url, path, b"")[0] == 200
    assert "Not Found" in get(small, "/server_info")
    said = json.loads(get(server.base_url, "/server_info"))
    assert said["passport"]["simulated"] and said["spoc"]["flags"]["block_size"] == 16


# connections

def open_stream(url: str, body: dict, path: str = "/v1/chat/completions") -> socket.socket:
    connection = socket.create_connection(address(url), timeout=10)
    payload = json.dumps({**body, "stream": True}).encode()
    connection.sendall(b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n" % (path.encode(), len(payload)) + payload)
    return connection


def wait_for(condition, seconds=5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_disconnect_aborts_and_frees_the_blocks(server):
    aborted = metric(server.base_url, "vllm:request_success_total", 'finished_reason="abort"')
    connection = open_stream(server.base_url, chat("a", max_tokens=20_000, ignore_eos=True))
    assert b"data:" in connection.recv(4096) + connection.recv(4096)
    assert metric(server.base_url, "vllm:num_requests_running") == 1
    assert metric(server.base_url, "vllm:kv_cache_usage_perc") > 0
    connection.close()
    assert wait_for(lambda: metric(server.base_url, "vllm:num_requests_running") == 0)
    assert metric(server.base_url, "vllm:kv_cache_usage_perc") == 0
    assert metric(server.base_url, "vllm:request_success_total", 'finished_reason="abort"') == aborted + 1
    assert post(server.base_url, "/reset_prefix_cache", b"")[1] == {"success": True}


def test_a_client_that_does_not_read_is_served_in_few_large_chunks(small):
    before = metric(small, "vllm:request_success_total")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(address(small))
    payload = json.dumps(chat("slow", max_tokens=4000, ignore_eos=True, stream=True)).encode()
    connection.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
                       b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    assert wait_for(lambda: metric(small, "vllm:request_success_total") == before + 1, 60)
    text = b""
    while piece := connection.recv(65536):  # HTTP/1.0: no framing, the end is the end of the connection
        text += piece
    body = text.partition(b"\r\n\r\n")[2].decode()
    deltas = [one["choices"][0]["delta"] for one in events(body)]
    assert sum(one.get("content", "").count(" ") + one.get("reasoning", "").count(" ") for one in deltas) == 4000
    assert len(deltas) < 4000


def test_idle_and_trickling_connections_do_not_stop_the_server(small):
    room = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, room[1]), room[1]))
    before = metric(small, "process_resident_memory_bytes")
    idle = [socket.create_connection(address(small)) for _ in range(1000)]
    for connection in idle[::2]:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
    trickle = socket.create_connection(address(small))
    trickle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
                    b"Content-Length: 31\r\n\r\n")
    body = b'{"prompt": "a", "max_tokens":2}'
    assert len(body) == 31
    try:
        for byte in body:
            trickle.sendall(bytes([byte]))
            time.sleep(0.01)
        assert b"200 OK" in trickle.recv(4096)
        assert post(small, "/v1/completions", {"prompt": "b", "max_tokens": 2})[0] == 200
        assert metric(small, "process_resident_memory_bytes") - before < 40e6
    finally:
        for connection in (*idle, trickle):
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, room)


def test_a_long_prompt_does_not_hold_up_other_streams(server):
    words = [f"name_{number % 977} = call_{number % 463}(value)\n" for number in range(12_000)]
    connection = open_stream(server.base_url, chat("b", max_tokens=100_000, ignore_eos=True))
    file, stamps, stop = connection.makefile("rb"), [], threading.Event()

    def read():
        while not stop.is_set() and (line := file.readline()):
            if b'"content":" ' in line:
                stamps.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        time.sleep(0.3)
        began = time.monotonic()
        status, answer = post(server.base_url, "/v1/chat/completions", chat("".join(words), max_tokens=1))
        assert status == 200 and answer["usage"]["prompt_tokens"] > 100_000
        ended = time.monotonic()
    finally:
        stop.set()
        connection.shutdown(socket.SHUT_RDWR)
        thread.join()
        connection.close()
    # the engine itself mixes the prompt's chunks into the steps, so gaps of a chunk's step time are right; what must
    # not be there is a gap as long as the encoding of the whole prompt
    during = [one for one in stamps if began <= one <= ended]
    gaps = [b - a for a, b in zip(during, during[1:], strict=False)]
    longest_step = max(gaps)
    assert len(during) >= 10
    assert longest_step < 0.5


def test_answers_are_labelled_simulated(server):
    connection = http.client.HTTPConnection(*address(server.base_url))
    connection.request("GET", "/v1/models")
    header = json.loads(connection.getresponse().getheader("x-spoc-passport"))
    connection.close()
    assert header["simulated"] is True and header["model"] == "gpt-oss-120b"
    assert server.simulated and server.passport["simulated"]
    assert 'spoc:passport_info{' in get(server.base_url, "/metrics")
    page = get(server.dcgm_url.removesuffix("/metrics"), "/metrics")
    assert "(simulated)" in page and page.count("DCGM_FI_PROF_SM_ACTIVE{") == 4


# the command

def serve_command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "spoc_lib", "engine", "serve", *arguments], capture_output=True,
                          text=True, timeout=60, check=False)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--cluster", "nowhere"], "unknown cluster 'nowhere'"),
    (["--max-num-seqs", "many"], "max_num_seqs: wants a value of type int (a whole number), not 'many'"),
    (["--throttle", "gpu=9,at=0,factor=0.5"], "the engine has GPUs 0 to 3"),
])
def test_wrong_arguments_get_one_sentence(arguments, sentence):
    done = serve_command(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("text", "sentence"), [
    ("gpu=1", "as gpu=1,at=60,factor=0.7"), ("gpu=1,at=5,factor=2", "factor lies between 0 and 1"),
    ("gpu=one,at=5,factor=0.5", "invalid literal"),
])
def test_wrong_throttle(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_throttle(text)


def test_busy_port_gets_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = serve_command("--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert re.fullmatch(r"spoc: cannot listen on 127.0.0.1:\d+: Address already in use; use --port 0 for any free "
                        r"port\n", done.stderr)
