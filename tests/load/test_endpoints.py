"""Endpoints of all kinds: TLS, base paths, completions, cache reset, servers that list nothing."""

from __future__ import annotations

import orjson
import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.load import FixedTurns, LoadPlan, run
from spoc_lib.load.endpoint import first_model, probe

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


def test_a_server_that_drops_the_question_is_still_a_server():
    import socket
    import threading

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
