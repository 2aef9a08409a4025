"""A scripted HTTP server on raw sockets: what it sends, byte by byte and pause by pause, is the test's to say."""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import orjson
import pytest

LABEL = re.compile(rb'"(?:content|prompt)":"([0-9a-f]{16})')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Request:
    """One POST: `user` and `number` are the fixed user's and its request's; helpers write the answer."""

    def __init__(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.head, self.body, self.writer = head, body, writer
        label = LABEL.search(body)
        self.user, self.number = divmod(int(label[1], 16), 1_000_003) if label else (0, 0)

    async def send(self, data: bytes, pause_s: float = 0.0) -> None:
        self.writer.write(data)
        await self.writer.drain()
        if pause_s:
            await asyncio.sleep(pause_s)

    async def piece(self, data: bytes, pause_s: float = 0.0) -> None:
        """One HTTP chunk."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data), pause_s)

    async def event(self, value: object, pause_s: float = 0.0) -> None:
        data = value if isinstance(value, bytes) else orjson.dumps(value)
        await self.piece(b"data: " + data + b"\n\n", pause_s)

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    async def json(self, status: str, value: object, headers: str = "") -> None:
        body = orjson.dumps(value)
        await self.send(f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}"
                        f"Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def answer(self, texts: list[str], *, usage: dict | None = None, pause_s: float = 0.0,
                     finish: str | None = "length", done: bool = True) -> None:
        """A whole ordinary answer."""
        await self.send(HEAD)
        await self.event(chunk({"role": "assistant", "content": ""}), pause_s)
        for text in texts:
            await self.event(chunk({"content": text}), pause_s)
        if finish:
            await self.event(chunk({}, finish))
        if usage:
            await self.event({"choices": [], "usage": usage})
        if done:
            await self.event(b"[DONE]")
        await self.end()

    def reset(self) -> None:
        self.writer.transport.abort()


def chunk(delta: dict, finish: str | None = None) -> dict:
    return {"id": "x", "object": "chat.completion.chunk", "choices": [
        {"index": 0, "delta": delta, "finish_reason": finish}]}


Handler = Callable[[Request], Awaitable[None]]


@contextmanager
def scripted(handler: Handler, models: dict | None = None, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve `handler` in a thread; yields the base URL."""
    loop = asyncio.new_event_loop()
    ready, address = threading.Event(), []

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                request = Request(head, body, writer)
                if head.startswith(b"GET"):
                    listed = models if models is not None else {"data": [{"id": "m"}]}
                    await request.json("200 OK" if listed else "404 Not Found", listed)
                else:
                    await handler(request)
                if writer.transport.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connection, "127.0.0.1", 0, ssl=tls)
        address.append(f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        async with server:
            await stop.wait()
            open_ones = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in open_ones:
                task.cancel()
            await asyncio.gather(*open_ones, return_exceptions=True)

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@pytest.fixture
def server():
    """`server(handler)`: context manager of the scripted server; `server.chunk` builds a chat chunk."""
    scripted.chunk = chunk
    scripted.head = HEAD
    return scripted
