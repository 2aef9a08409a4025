"""A whole sweep through a gateway that is as strict as they come: TLS that nobody vouches for, a key in a header of its
own, a header it routes by, a path that is not /v1's, no page but the chat route, and fields that it refuses."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import aiohttp
import pytest
from aiohttp import web

from spoc_lib.config import Engine, LadderSpec, Profile, Slo, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.servers import launch
from spoc_lib.sweep import run_sweep
from spoc_lib.sweep.capacity import sentence as capacity_sentence
from spoc_lib.workload import build_script

pytestmark = pytest.mark.slow
KEY = "sk-of-the-gateway-0123456789"
PATH = "/team/v1beta/openai"


@contextmanager
def gateway(behind: str, tls: ssl.SSLContext, seen: list[str]) -> Iterator[str]:
    """Serve `behind`'s chat route in a thread; yields the base URL. seen: why requests were refused."""
    loop, ready, address = asyncio.new_event_loop(), threading.Event(), []

    async def chat(request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        refused = next((why for why, wrong in (
            ("key", request.headers.get("api-key") != KEY or "Authorization" in request.headers),
            ("route", request.headers.get("X-Team") != "perf"),
            ("fields", "max_tokens" in fields or "ignore_eos" in fields or fields.get("reasoning_effort") != "low"),
        ) if wrong), None)
        if refused:
            seen.append(refused)
            return web.json_response({"error": refused, "echo": dict(request.headers)}, status=400)
        del fields["reasoning_effort"]
        fields |= {"max_tokens": fields.pop("max_completion_tokens"), "ignore_eos": True}
        async with (aiohttp.ClientSession() as session,
                    session.post(f"{behind}/v1/chat/completions", json=fields) as answer):
            relayed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await relayed.prepare(request)
            async for chunk in answer.content.iter_any():
                await relayed.write(chunk)
            return relayed

    async def anything(_: web.Request) -> web.Response:
        return web.Response(text="<html>Welcome</html>", content_type="text/html", status=404)

    async def main() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(f"{PATH}/chat/completions", chat)
        app.router.add_route("*", "/{rest:.*}", anything)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        address.append(runner.addresses[0][1])
        ready.set()
        await asyncio.Event().wait()

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(main())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"https://127.0.0.1:{address[0]}{PATH}"
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join(10)


def profile() -> Profile:
    return Profile(name="test", title="seconds", audit_users=4, audit_turns=2, search_trials=1, search_population=2,
                   search_finalists=1, screen_s=20, rung_s=30, warmup_s=3, http_rung_s=8, http_users=4, probes=1,
                   trace_s=1, gap_cap_s=3)


def test_a_sweep_through_a_strict_gateway(tmp_path, certificate, monkeypatch):
    monkeypatch.setenv("GATEWAY_KEY", KEY)
    context, authority = certificate
    simulated = load_cluster("sim-2xh200").model_copy(update={
        "slos": [Slo(metric="ttft", percentile=90, limit_s=3.0)], "ladder": LadderSpec(users=[4]), "personas": "tiny"})
    seen: list[str] = []

    def remote(url: str, **changed) -> Engine:
        return Engine(**{**dict(
            kind="remote", base_url=url, served_model="gpt-oss-120b", api_key_env="GATEWAY_KEY",
            api_key_header="api-key", headers={"X-Team": "perf"}, verify_tls=False,
            extra_body={"max_tokens": None, "ignore_eos": None, "reasoning_effort": "low"}), **changed})

    with launch(simulated, {}, tmp_path / "engine") as server, gateway(server.base_url, context, seen) as url:
        for wrong, said in (({"verify_tls": True}, "certificate"), ({"api_key_header": "Authorization"}, "400"),
                            ({"headers": {}}, "400"), ({"extra_body": {}}, "400"),
                            ({"api": "completions"}, "engine.api: chat"), ({"served_model": None}, "404")):
            cluster = simulated.model_copy(update={"engine": remote(url, **wrong)})
            with pytest.raises(InputError, match=said) as refused, launch(cluster, {}, tmp_path / "wrong"):
                pass
            assert KEY not in refused.value.message, wrong
        assert seen == ["key", "route", "fields"]
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        cluster = simulated.model_copy(update={"engine": remote(url, verify_tls=True)})
        result = run_sweep(cluster, profile(), {}, tmp_path / "sweep", lambda salt: build_script(
            "tiny", 5, salt=salt, gap_cap_s=3, context_limit=4096))
    rung = result.rungs.iloc[0]
    assert (rung.driver, rung.failed) == ("locust", 0) and rung.completed > 0, rung.reason
    assert rung.verdict != "invalid", rung.reason
    assert seen == ["key", "route", "fields"]
    assert any("vLLM" in text and "404" in text for text in result.problems), result.problems
    assert "neither the server's metrics page" in result.capacity["saturated"]["evidence"][0]
    assert "is used up" not in capacity_sentence(result.capacity)
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in kept
    plan = json.loads(next((tmp_path / "sweep").rglob("plan.json")).read_text())
    assert plan["headers"] == {"X-Team": "perf"} and plan["api_key_header"] == "api-key"
