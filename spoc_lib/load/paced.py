"""A server whose answers are known to the millisecond: it measures the client, and stands in for a server in tests.

Plain asyncio on raw sockets, no framework. Each request is answered with `max_tokens` chunks of vLLM's shape: the
first `ttft_s` after the request came in whole, then one every `itl_s`; deadlines are absolute, so lateness never
adds up. `GET /paced` tells how late and how busy the server itself was; with `--log`, `GET /paced/writes` tells when it
truly wrote each token of each labelled request (the first 16 hexadecimal digits of a prompt are its label).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import select
import selectors
import time
from dataclasses import dataclass, field

import orjson

CHUNK = ('{"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1750000000,'
         '"model":"paced","choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,'
         '"token_ids":null}],"usage":null}')
TEXT = CHUNK.replace("chat.completion.chunk", "text_completion").replace('{"content":" word"}', '" word"') \
    .replace('"delta"', '"text"')
ROLE = CHUNK.replace('{"content":" word"}', '{"role":"assistant","content":""}')
LAST = CHUNK.replace('"content":" word"', '').replace('"finish_reason":null', '"finish_reason":"length"')
HEAD = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n")


#: Within a JSON string the quotes would be escaped, so a prompt cannot match.
BUDGET = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
LABEL = re.compile(rb'"(?:content|prompt)":"([0-9a-f]{16})')


def framed(data: str | bytes) -> bytes:
    """One event in one HTTP chunk."""
    event = b"data: " + (data.encode() if isinstance(data, str) else data) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


@dataclass
class Pacer:
    """Writes the tokens of all open streams, each by its own timer.

    `late_s` are the server's own delays (true write minus deadline), sampled; they bound what a client can show.
    `stream_seconds` is the integral of open streams over time: two reports give the mean that was in flight.
    `writes`: label to the times of its tokens, kept only with `log`.
    """

    ttft_s: float
    itl_s: float
    log: bool = False
    streams: int = 0
    peak: int = 0
    served: int = 0
    tokens: int = 0
    stream_seconds: float = 0.0
    changed_s: float = field(default_factory=time.monotonic)
    late_s: list[float] = field(default_factory=list)
    writes: dict[str, list[float]] = field(default_factory=dict)

    async def stream(self, writer: asyncio.StreamWriter, arrived_s: float, body: bytes, chat: bool = True) -> None:
        """Answer one request: each token at its own time from the arrival on, however late the one before was."""
        loop = asyncio.get_running_loop()
        asked, prompt_tokens = BUDGET.search(body), max(1, len(body) // 4)
        count = int(asked[1]) if asked else 16
        label = LABEL.search(body) if self.log else None
        times = self.writes.setdefault(label[1].decode(), []) if label else None
        token, finished = framed(CHUNK if chat else TEXT), loop.create_future()
        self._change(1)
        writer.write(HEAD)

        def write(index: int) -> None:
            if writer.transport.is_closing():
                if not finished.done():
                    finished.set_result(None)
                return
            deadline = arrived_s + self.ttft_s + index * self.itl_s
            now = loop.time()
            if chat and index == 0:
                writer.write(framed(ROLE))  # as vLLM has it: with the first token, not when the request arrives
            writer.write(token)
            self.tokens += 1
            if times is not None:
                times.append(now)
            if index % 16 == 0:
                self.late_s.append(now - deadline)
            if index + 1 < count:
                loop.call_at(deadline + self.itl_s, write, index + 1)
            elif not finished.done():
                finished.set_result(None)

        loop.call_at(arrived_s + self.ttft_s, write, 0)
        try:
            await finished
        finally:
            self._change(-1)
        usage = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "choices": [],
                 "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count,
                           "total_tokens": prompt_tokens + count}}
        writer.write(framed(LAST) + framed(orjson.dumps(usage)) + framed("[DONE]") + b"0\r\n\r\n")
        self.served += 1
        await writer.drain()

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self.stream_seconds += self.streams * (now - self.changed_s)
        self.changed_s = now
        self.streams += by
        self.peak = max(self.peak, self.streams)

    def report(self) -> dict:
        """What was served, at most how many at once, how late and at what cost in processor time."""
        self._change(0)
        use = resource.getrusage(resource.RUSAGE_SELF)
        late = sorted(self.late_s) or [0.0]
        return {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "streams": self.streams, "peak_streams": self.peak,
                "served": self.served, "tokens": self.tokens, "stream_seconds": self.stream_seconds,
                "time_s": self.changed_s, "cpu_s": use.ru_utime + use.ru_stime,
                "late_p50_s": late[len(late) // 2], "late_p99_s": late[int(len(late) * 0.99)],
                "late_max_s": late[-1]}


async def handle(pacer: Pacer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: requests in turn, keep-alive."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path = head.split(b" ", 2)[:2]
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            body = await reader.readexactly(length) if length else b""
            arrived = asyncio.get_running_loop().time()
            if method == b"POST" and path.endswith(b"/completions"):
                await pacer.stream(writer, arrived, body, path.endswith(b"/chat/completions"))
            else:
                _reply(writer, pacer, path)
                await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def _reply(writer: asyncio.StreamWriter, pacer: Pacer, path: bytes) -> None:
    pages = {b"/v1/models": {"object": "list", "data": [{"id": "paced", "object": "model",
                                                         "max_model_len": 1 << 30}]},
             b"/paced": pacer.report(), b"/paced/writes": pacer.writes, b"/health": {}}
    status, page = ("200 OK", pages[path]) if path in pages else ("404 Not Found", {"detail": "Not Found"})
    body = orjson.dumps(page)
    writer.write(f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                 .encode() + body)


class FineSelector(selectors.DefaultSelector):
    """epoll rounds a wait up to whole milliseconds; `select` on the epoll descriptor itself keeps microseconds."""

    def select(self, timeout: float | None = None) -> list:
        """As a selector's; timeouts to the microsecond rather than epoll's millisecond."""
        if hasattr(selectors, "EpollSelector") and timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


async def serve(host: str, port: int, ttft_s: float, itl_s: float, log: bool = False) -> None:
    """Serve on `host` until the parent goes away; print one JSON line with the URL when ready."""
    pacer = Pacer(ttft_s, itl_s, log)
    server = await asyncio.start_server(lambda r, w: handle(pacer, r, w), host, port, limit=1 << 24,
                                        backlog=4096)
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.sockets[0].getsockname()[1]}"
    print(orjson.dumps({"base_url": url, "pid": os.getpid(), "started_s": time.monotonic()}).decode(), flush=True)
    parent = os.getppid()
    async with server:
        while os.getppid() == parent:
            await asyncio.sleep(0.5)


def main() -> None:
    """`python -m spoc_lib.load.paced`: a server of known pace, until it is told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.2, help="seconds")
    parser.add_argument("--itl", type=float, default=0.02, help="seconds")
    parser.add_argument("--log", action="store_true", help="keep the time of every token written")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FineSelector())) as runner:
        runner.run(serve(arguments.host, arguments.port, arguments.ttft, arguments.itl, arguments.log))


if __name__ == "__main__":
    main()
