"""The embedded engine as an HTTP server: vLLM 0.32 to a client, the twin behind it.

`serve` blocks until SIGTERM or SIGINT. Everything runs on one event loop: requests, the engine's steps, the pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import write_json
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.gpu_counters import Throttle
from spoc_lib.engine.http import answers, checks
from spoc_lib.engine.http import openai_api as api
from spoc_lib.engine.http.chat import Generator
from spoc_lib.engine.http.dcgm_page import DcgmPage
from spoc_lib.engine.http.metrics_page import MetricsPage
from spoc_lib.engine.http.realtime import RealtimeEngine
from spoc_lib.engine.http.socket_stamps import StampingListener
from spoc_lib.engine.http.text import PromptEncoder, Words
from spoc_lib.workload.tokenizer import offline_tokenizer

MAX_BODY_BYTES = 64 * 1024 * 1024
#: What the kernel keeps for a client that does not read; the default grows to megabytes.
SEND_BUFFER_BYTES = 128 * 1024
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """host, ports (0 = any free one); model: the name on the API; dev: /reset_prefix_cache, /server_info and the
    profiler's routes exist; reasoning_tokens: first tokens of each chat reply that are reasoning;
    ready_file: where {base_url, dcgm_url, pid} goes once requests are served."""

    host: str = "127.0.0.1"
    port: int = 0
    dcgm_port: int = 0
    model: str | None = None
    dev: bool = False
    throttle: Throttle | None = None
    reasoning_tokens: int = 0
    ready_file: Path | None = None


class EmbeddedServer:
    """The web application around one `RealtimeEngine`."""

    def __init__(self, engine: EmbeddedEngine, options: ServerOptions, listener: StampingListener) -> None:
        self.options = options
        self._listener = listener
        self.engine = engine
        self.model = options.model or engine.model.name
        tokenizer = offline_tokenizer()
        self._tokenizer = tokenizer
        self.metrics = MetricsPage(engine, self.model)
        self.realtime = RealtimeEngine(engine, self.metrics, options.throttle)
        self.dcgm = DcgmPage(engine, self.metrics.activity, options.throttle, self.realtime.started_s)
        self.generator = Generator(
            self.realtime, PromptEncoder(tokenizer.encode), Words(tokenizer.encode), model=self.model,
            reasoning_tokens=options.reasoning_tokens, rejected=self.metrics.rejected)
        self._warm_up()
        self._started_s = time.time()
        passport = engine.passport()
        self._passport = passport
        named = ("simulated", "model", "gpu", "gpu_count", "step_time", "calibration_id")
        self._passport_header = json.dumps({name: passport.get(name) for name in named})

    def _warm_up(self) -> None:
        """Compile and fill tables now, not in the first request's step."""
        batch = Batch(2, 1, 1, 1, 1, 1, 1.0, 1.0, 0, 2)
        self.engine.step_time.seconds(batch)
        self.engine.step_time.components(batch)
        self.generator.warm_up()

    def application(self) -> web.Application:
        """Routes of the API port."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answers])
        app.on_response_prepare.append(self._label)
        add = app.router.add_route
        add("POST", "/v1/chat/completions", self._chat)
        add("POST", "/v1/completions", self._completion)
        add("POST", "/tokenize", self._tokenize)
        add("POST", "/detokenize", self._detokenize)
        add("GET", "/v1/models", self._models)
        add("GET", "/version", self._version)
        add("GET", "/load", self._load)
        add("GET", "/health", self._empty)
        add("GET", "/ping", self._empty)
        add("POST", "/ping", self._empty)
        add("GET", "/metrics", self._metrics)
        add("GET", "/spoc/passport", self._whole_passport)
        if self.options.dev:
            add("POST", "/reset_prefix_cache", self._reset_prefix_cache)
            add("GET", "/server_info", self._server_info)
            add("POST", "/start_profile", self._empty)
            add("POST", "/stop_profile", self._empty)
        return app

    def dcgm_application(self) -> web.Application:
        """Routes of the DCGM port."""
        app = web.Application()

        async def page(_request: web.Request) -> web.Response:
            return web.Response(body=self.dcgm.render(), headers={"Content-Type": METRICS_TYPE})

        app.router.add_get("/metrics", page)
        app.router.add_get("/health", self._empty)
        return app

    # answers around every route

    @web.middleware
    async def _answers(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        """Error bodies as vLLM's, the passport header, and the HTTP metrics."""
        start = time.monotonic()
        try:
            response = await handler(request)
        except api.ApiError as error:
            response = _json(error.body(), error.status)
        except web.HTTPRequestEntityTooLarge:
            response = _json(orjson.dumps({"detail": "Request Entity Too Large"}), 413)
        except web.HTTPException as error:
            response = _json(orjson.dumps({"detail": error.reason}), error.status)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
        except ConnectionError:  # the client has gone: nobody to answer
            raise
        except Exception:
            traceback.print_exc()
            response = _json(api.ApiError(500, "Internal server error", "InternalServerError").body(), 500)
        resource_of = request.match_info.route.resource
        self.metrics.http(resource_of.canonical if resource_of else "none", request.method, response.status,
                          request.content_length or 0, response.content_length or 0, time.monotonic() - start)
        return response

    async def _label(self, _request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-spoc-passport"] = self._passport_header

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        body, arrived = await http.read(), self._arrived_s(http)
        return await self.generator.chat(http, api.parse_body(api.ChatRequest, body, http.content_type), arrived)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        body, arrived = await http.read(), self._arrived_s(http)
        request = api.parse_body(api.CompletionRequest, body, http.content_type)
        return await self.generator.completion(http, request, arrived)

    def _arrived_s(self, http: web.Request) -> float:
        """When the request's last bytes reached this host, seconds on the monotonic clock."""
        connection = http.transport.get_extra_info("socket") if http.transport else None
        return self._listener.arrived_s(connection.fileno()) if connection else time.monotonic()

    async def _tokenize(self, http: web.Request) -> web.Response:
        request = api.parse_body(api.TokenizeRequest, await http.read(), http.content_type)
        checks.check_model(request.model, self.model)
        if request.messages is not None:
            checks.check_messages(request.messages, self.model)
            ids = await self.generator.encode_chat(request.messages)
        else:
            ids = await self.generator.encode_prompt(request.prompt) if request.prompt else array("i")
        strings = [self._tokenizer.decode([one]) for one in ids] if request.return_token_strs else None
        return _json(orjson.dumps({"count": len(ids), "max_model_len": self.realtime.core.max_model_len,
                                   "tokens": list(ids), "token_strs": strings}))

    async def _detokenize(self, http: web.Request) -> web.Response:
        request = api.parse_body(api.DetokenizeRequest, await http.read(), http.content_type)
        checks.check_model(request.model, self.model)
        try:
            text = self._tokenizer.decode(request.tokens)
        except KeyError as error:
            raise api.invalid(f"Token id {error} is out of vocabulary", "tokens") from error
        return _json(orjson.dumps({"prompt": text}))

    async def _models(self, _http: web.Request) -> web.Response:
        return _json(answers.models(self.model, self.realtime.core.max_model_len, self._started_s))

    async def _version(self, _http: web.Request) -> web.Response:
        return _json(orjson.dumps({"version": answers.VERSION}))

    async def _load(self, _http: web.Request) -> web.Response:
        return _json(orjson.dumps({"server_load": self.realtime.unfinished}))

    async def _empty(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _http: web.Request) -> web.Response:
        return web.Response(body=self.metrics.render(self.realtime), headers={"Content-Type": METRICS_TYPE})

    async def _reset_prefix_cache(self, _http: web.Request) -> web.Response:
        return _json(orjson.dumps({"success": self.realtime.core.reset_prefix_cache()}))

    async def _server_info(self, _http: web.Request) -> web.Response:
        return _json(orjson.dumps({"spoc": self.engine.describe(), "passport": self._passport}))

    async def _whole_passport(self, _http: web.Request) -> web.Response:
        return _json(orjson.dumps(self._passport))


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def listen(host: str, port: int) -> StampingListener:
    """A listening socket; InputError when the port is taken."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = StampingListener(kind, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InputError("port-busy", f"cannot listen on {host}:{port}: {error.strerror}; "
                         "use --port 0 for any free port") from error
    listener.listen(1024)
    return listener


def serve(engine: EmbeddedEngine, options: ServerOptions = ServerOptions()) -> dict[str, Any]:
    """Serve until SIGTERM or SIGINT. Prints one line with the two URLs when requests are answered.

    Returns what was served: base_url, dcgm_url, requests (by finish reason), prompt_tokens, cached_tokens,
    generation_tokens, preemptions, clock_resets, passport.
    """
    api_socket = listen(options.host, options.port)
    dcgm_socket = listen(options.host, options.dcgm_port)
    sys.setswitchinterval(0.0005)  # a thread that encodes a long prompt gives way to the streams at once
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    server = EmbeddedServer(engine, options, api_socket)
    urls = [_url(listener) for listener in (api_socket, dcgm_socket)]
    asyncio.run(_serve(server, api_socket, dcgm_socket))
    return {"base_url": urls[0], "dcgm_url": urls[1], **server.metrics.totals(server.realtime),
            "passport": engine.passport()}


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(server: EmbeddedServer, api_socket: socket.socket, dcgm_socket: socket.socket) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(server.realtime.run()), asyncio.create_task(server.dcgm.run())]
    for task in tasks:
        task.add_done_callback(lambda _task: stop.set())
    urls = [_url(listener) for listener in (api_socket, dcgm_socket)]
    runners = []
    for app, listener in ((server.application(), api_socket), (server.dcgm_application(), dcgm_socket)):
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listener).start()
        runners.append(runner)
    gc.collect()
    gc.freeze()  # nothing of the start-up is garbage: keep the collector away from it
    gc.set_threshold(50_000, 20, 50)
    if server.options.ready_file:
        write_json(server.options.ready_file, {"base_url": urls[0], "dcgm_url": urls[1], "pid": os.getpid()})
    print(f"spoc engine: {server.model} (simulated) at {urls[0]}, GPU counters at {urls[1]}/metrics", flush=True)
    await stop.wait()
    for runner in runners:
        await runner.cleanup()
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task  # an error in a step ends the server, loudly
