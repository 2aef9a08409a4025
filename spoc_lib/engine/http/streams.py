"""How an answer of the embedded server reaches the client: collected into one body, or streamed chunk by chunk.

Streams write their chunks straight to the connection, one system call a token, from inside the engine's step: a
hundred streams cost about 2 ms a step. A client that reads too slowly gets several tokens in one chunk (as vLLM
merges outputs that nobody has taken yet), so what waits for it stays below `BACKLOG_BYTES` and a chunk.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import HttpVersion11, web

from spoc_lib.engine.http.answers import DONE, Answer, Choice, ChunkWriter, Usage
from spoc_lib.engine.http.realtime import Generation
from spoc_lib.engine.http.text import Reply

BACKLOG_BYTES = 64 * 1024
#: Called with the output tokens so far, and the reason when the choice is done.
Receiver = Callable[[int, str | None], None]


@dataclass(frozen=True, slots=True)
class Style:
    """How this answer is to look. interval: tokens a chunk; reasoning_tokens: how many first tokens of a reply
    are reasoning; block_size: 0 where prefix caching is off or the answer has no created_cache_tokens."""

    usage: bool = False
    continuous_usage: bool = False
    interval: int = 1
    reasoning_tokens: int = 0
    block_size: int | None = None


class Job(ABC):
    """An answer in the making: one `Generation` a choice, each reporting to its `receiver`."""

    def __init__(self, answer: Answer, style: Style) -> None:
        self.answer, self.style = answer, style
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._generations: list[Generation] = []
        self._open_choices = 0

    @abstractmethod
    def receiver(self, index: int, reply: Reply) -> Receiver:
        """What choice `index` is to call at each of its steps."""

    @abstractmethod
    async def open(self, http: web.Request) -> None:
        """Begin to answer."""

    @abstractmethod
    async def close(self) -> web.StreamResponse:
        """The answer, whole or at its end, when all choices are done."""

    def expect(self, generations: list[Generation]) -> None:
        """The generations whose end is the end of the answer."""
        self._generations = generations
        self._open_choices = len(generations)

    def choice_done(self) -> None:
        """One choice has ended; with the last one the answer is complete."""
        self._open_choices -= 1
        if self._open_choices == 0:
            self.complete()
            if not self.finished.done():
                self.finished.set_result(None)

    def complete(self) -> None:  # noqa: B027 - a collected answer has nothing to add
        """All choices are done."""

    def usage(self) -> Usage:
        """Counts over all choices; a prompt counts once for its n choices."""
        prompts = self._generations[::self._generations[0].params_n]
        cached = sum(one.cached_tokens for one in prompts)
        created = None
        if self.style.block_size is not None:
            size = self.style.block_size
            whole = [one.prompt_tokens // size * size if size else 0 for one in prompts]
            created = sum(max(0, tokens - one.cached_tokens) for tokens, one in zip(whole, prompts, strict=True))
        return Usage(sum(one.prompt_tokens for one in prompts), sum(one.tokens for one in self._generations),
                     cached, created)


class Collected(Job):
    """The whole answer in one body."""

    def receiver(self, index: int, reply: Reply) -> Receiver:
        """What the engine calls for choice `index`."""

        def deliver(_tokens: int, finish_reason: str | None) -> None:
            if finish_reason is not None:
                self.choice_done()

        return deliver

    async def open(self, http: web.Request) -> None:
        """Nothing is sent before the end."""

    async def close(self) -> web.StreamResponse:
        """The whole answer."""
        choices = []
        for index, one in enumerate(self._generations):
            split = min(self.style.reasoning_tokens, one.tokens)
            reasoning = one.reply.text(0, split) if split else None
            choices.append(Choice(index, one.reply.text(split, one.tokens), one.finish_reason,
                                  one.reply.stop_reason if one.finish_reason == "stop" else None, reasoning))
        return web.Response(body=self.answer.whole(choices, self.usage()), content_type="application/json")


class Streamed(Job):
    """Server-sent events."""

    def __init__(self, answer: Answer, style: Style) -> None:
        super().__init__(answer, style)
        self._choices: list[_StreamedChoice] = []
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._transport: asyncio.Transport  # from `open` on
        self.opened = False
        self._framed = True

    def receiver(self, index: int, reply: Reply) -> Receiver:
        """What the engine calls for choice `index`."""
        choice = _StreamedChoice(self, index, reply)
        self._choices.append(choice)
        return choice.deliver

    def expect(self, generations: list[Generation]) -> None:
        """Learn which generations give the choices."""
        super().expect(generations)
        for choice, generation in zip(self._choices, generations, strict=True):
            choice.writer = ChunkWriter(
                self.answer, choice.index, fingerprint=not self.style.usage,
                prompt_tokens=generation.prompt_tokens if self.style.continuous_usage else None)

    async def open(self, http: web.Request) -> None:
        """Send the headers, and what the engine has given meanwhile."""
        self._framed = http.version >= HttpVersion11
        if self._framed:
            self._response.enable_chunked_encoding()
        await self._response.prepare(http)
        if http.transport is None:
            raise ConnectionResetError("the client has gone")
        self._transport, self.opened = http.transport, True
        for choice in self._choices:
            choice.resume()

    @property
    def congested(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self._transport.get_write_buffer_size() > BACKLOG_BYTES

    def write(self, event: bytes) -> None:
        """Send an event, unless the client is gone."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self._framed else event)

    def complete(self) -> None:
        """Send the usage where it was asked for, and the end of the stream."""
        if self.style.usage:
            self.write(self.answer.usage_chunk(self.usage()))
        self.write(DONE)

    async def close(self) -> web.StreamResponse:
        """End the response."""
        await self._response.write_eof()
        return self._response


class _StreamedChoice:
    """One choice of a stream: how much of its reply was sent."""

    __slots__ = ("_stream", "index", "_reply", "_sent", "_waiting", "writer")

    def __init__(self, stream: Streamed, index: int, reply: Reply) -> None:
        self._stream, self.index, self._reply = stream, index, reply
        self._sent = 0
        self._waiting: tuple[int, str | None] | None = None
        self.writer: ChunkWriter  # from `Streamed.expect` on

    def deliver(self, tokens: int, finish_reason: str | None) -> None:
        stream, sent = self._stream, self._sent
        if not stream.opened:
            self._waiting = (tokens, finish_reason)
            return
        if finish_reason is None and sent and (tokens - sent < stream.style.interval or stream.congested):
            return
        self._send(sent, tokens, finish_reason)
        self._sent = tokens
        if finish_reason is not None:
            stream.choice_done()

    def resume(self) -> None:
        if self._waiting:
            self.deliver(*self._waiting)

    def _send(self, sent: int, tokens: int, finish_reason: str | None) -> None:
        stream, reply, writer = self._stream, self._reply, self.writer
        if sent == 0 and stream.answer.chat:
            stream.write(writer.role())
        split = stream.style.reasoning_tokens
        if sent < split:
            thought = min(tokens, split)
            if finish_reason is not None and thought == tokens:
                stream.write(self._last(reply.piece(sent, tokens), tokens, finish_reason, True))
                return
            stream.write(writer.text(reply.piece(sent, thought), thought, True))
            if thought == tokens:
                return
            sent = thought
        text = reply.piece(sent, tokens)
        if finish_reason is not None:
            stream.write(self._last(text, tokens, finish_reason, False))
        elif text:  # nothing yet while a stop string may have begun
            stream.write(writer.text(text, tokens))

    def _last(self, text: bytes, tokens: int, finish_reason: str, reasoning: bool) -> bytes:
        stop = self._reply.stop_reason if finish_reason == "stop" else None
        return self.writer.last(text, tokens, finish_reason, stop, reasoning)
