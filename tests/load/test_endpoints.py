"""Endpoints of all kinds: TLS, base paths, completions, cache reset, servers that list nothing."""

from __future__ import annotations

import socket
import threading

import orjson
import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.load import FixedTurns, LoadPlan, run
from spoc_lib.load.endpoint import first_model, probe
from spoc_lib.servers import readiness

USAGE = {"prompt_tokens": 1, "completion_tokens": 2}
TURNS = FixedTurns(output_tokens=2, think_time_s=0.2)


def test_completions_below_a_path_with_headers_and_body_fields(tmp_path, server):
    seen = []

    async def handler(request):
        seen.append((request.head.split(b"\r\n")[0], b"X-Team: blue" in request.head, orjson.loads(request.body)))
        await request.send(server.head)
        await request.event({"choices": [{"text": "a"}]})
        await request.event({"choices": [{"text": "b", "finish_reason": "length"}], "usage": USAGE})
        await request.end()

    with server(handler, models={}) as url:
        plan = LoadPlan(base_url=f"{url}/proxy/", model="m", users=1, duration_s=1.5, api="completions",
                        headers={"X-Team": "blue"}, extra_body={"top_p": 0.5}, fixed=TURNS)
        summary = run(plan, tmp_path).summary
    line, header, body = seen[0]
    assert line == b"POST /proxy/v1/completions HTTP/1.1" and header
    assert (body["top_p"], body["max_tokens"], body["stream"]) == (0.5, 2, True) and isinstance(body["prompt"], str)
    assert summary["completed"] == summary["planned"] > 2
    assert any("name is not checked" in note for note in summary["notes"])


def test_reset_is_refused_where_there_is_no_such_page(tmp_path, server):
    async def handler(request):
        await request.json("404 Not Found", {"detail": "Not Found"})

    with server(handler) as url, pytest.raises(InputError, match="does not empty its prefix cache"):
        run(LoadPlan(base_url=url, model="m", users=1, duration_s=1, cache="reset", fixed=TURNS), tmp_path)


def test_reset_is_done_before_the_first_request(tmp_path, server):
    seen = []

    async def handler(request):
        seen.append(request.head.split(b" ")[1])
        if request.head.startswith(b"POST /reset_prefix_cache"):
            await request.json("200 OK", {})
        else:
            await request.answer(["a", "b"], usage=USAGE)

    with server(handler) as url:
        run(LoadPlan(base_url=url, model="m", users=1, duration_s=1, cache="reset", fixed=TURNS), tmp_path)
    assert seen[0] == b"/reset_prefix_cache" and seen.count(seen[0]) == 1 and len(seen) > 1


@pytest.mark.parametrize(("models", "name"), [({"data": [{"id": "m"}]}, "m"), ({}, None), ({"data": []}, None)])
def test_the_first_model(server, models, name):
    async def handler(request):
        raise AssertionError("only the list is asked")

    with server(handler, models=models) as url:
        plan = LoadPlan(base_url=url, model="?", users=1, duration_s=1)
        if name:
            assert first_model(plan) == name
        else:
            with pytest.raises(InputError, match="name one with --model"):
                first_model(plan)


def test_the_context_limit_comes_from_the_server(server):
    async def handler(request):
        raise AssertionError("only the list is asked")

    with server(handler, models={"data": [{"id": "m", "max_model_len": 4096}]}) as url:
        assert probe(LoadPlan(base_url=url, model="m", users=1, duration_s=1)).max_model_len == 4096


def plan(url: str, **changed) -> LoadPlan:
    return LoadPlan(**{"base_url": url, "model": "llama3", "users": 1, "duration_s": 1, **changed})


def takes(*models: str):
    """A server that answers one question as each of these models, and says so of no other."""
    async def handler(request):
        body = orjson.loads(request.body)
        assert body["max_tokens"] == 1 and "stream" not in body
        if body["model"] in models:
            await request.json("200 OK", {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]})
        else:
            await request.json("404 Not Found", {"error": {"message": f"no model {body['model']}"}})

    return handler


@pytest.mark.parametrize("listed", [["llama3:latest"], ["*"], ["openai/*", "anthropic/*"], ["/models/q.gguf"], []])
def test_a_model_that_is_listed_otherwise_is_asked_for_one_token(server, listed):
    models = {"data": [{"id": name, "max_model_len": 9} for name in listed]}
    with server(takes("llama3"), models=models) as url:
        seen = probe(plan(url))
        assert seen.max_model_len is None and "answers as 'llama3'" in seen.notes[0]
        assert readiness.Endpoint(url).identify("llama3").model == "llama3" if listed else True
        with pytest.raises(InputError, match="does not serve the model 'nope': it serves .*no model nope"):
            probe(plan(url, model="nope"))
        with pytest.raises(readiness.NotReadyError, match="no model nope" if listed else "lists no model"):
            readiness.Endpoint(url).identify("nope")


def test_a_server_may_stream_whatever_is_asked(server):
    async def handler(request):
        await request.answer(["a"])

    with server(handler) as url:
        assert "answers as 'llama3'" in probe(plan(url)).notes[0]


def test_an_answer_of_200_without_a_completion_is_none(server):
    async def handler(request):
        await request.json("200 OK", {"error": {"message": "no such model"}})

    with server(handler) as url, pytest.raises(InputError, match="answers 200 and no completion: .*no such model"):
        probe(plan(url))


def test_a_refused_field_is_named_before_the_first_request(server):
    async def handler(request):
        await request.json("422 No", {"detail": [{"loc": ["body", "max_tokens"], "msg": "Extra inputs not permitted"}]})

    remedy = "--body '{\"max_tokens\": null}'.*max_completion_tokens"
    with server(handler) as url, pytest.raises(InputError, match=remedy):
        probe(plan(url))


@pytest.mark.parametrize(("scheme", "answer", "said"), [
    ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "plain HTTP there: write http://127"),
    ("http", b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n", "TLS there"),
    ("http", b"HTTP/1.1 400 No\r\n\r\n<center>The plain HTTP request was sent to HTTPS port</center>", "TLS there"),
    ("http", b"\x15\x03\x01\x00\x02\x02\x46", "TLS there: write https://127")])
def test_the_other_scheme_is_named(scheme, answer, said):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        def reply() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=reply, daemon=True).start()
        with pytest.raises(InputError, match=f"speaks {said}"):
            probe(plan(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"))


def test_a_server_that_drops_the_question_is_still_a_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True).start()
        plan = LoadPlan(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", model="m", users=1, duration_s=1)
        assert "gives no answer" in probe(plan).notes[0]


def test_tls(tmp_path, server, certificate, monkeypatch):
    context, authority = certificate

    async def handler(request):
        await request.answer(["a", "b"], usage=USAGE)

    with server(handler, tls=context) as url:
        plan = LoadPlan(base_url=url, model="m", users=2, duration_s=1.0, fixed=TURNS, verify_tls=False)
        before = context.session_stats()["accept_good"]
        summary = run(plan, tmp_path).summary
        assert summary["completed"] == summary["planned"] > 2 and summary["stamps"] == "process"
        # one for the probe and one a user: a connection made ahead is used, and used again
        assert context.session_stats()["accept_good"] - before == 3
        strict = plan.model_copy(update={"verify_tls": True})
        with pytest.raises(InputError, match="certificate"):
            run(strict, tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        trusted = run(strict, tmp_path).summary
        assert trusted["completed"] == trusted["planned"] > 2 and trusted["valid"]
