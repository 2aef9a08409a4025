"""One request and its streamed answer: send, stamp, read to the end, say what happened. Child process only."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import errno
import socket
import ssl
import time
import zlib
from dataclasses import dataclass, field
from typing import Any, cast

import gevent
import orjson
from geventhttpclient.response import HTTPParseError, HTTPResponse, HTTPSocketResponse
from locust.contrib.fasthttp import ErrorResponse, FastHttpSession, FastResponse

from spoc_lib.load.arrivals import ArrivalSocket, IdleWatch
from spoc_lib.load.reader import StreamReader, classify_error

#: A token is some 250 bytes; Python allocates what it is asked for, each time.
READ_BYTES = 8192
#: Pieces that may wait unparsed, and for how long: stamp first, parse later, but never a long block at the end, nor
#: chunks that a kill would lose.
PARSE_EVERY = 32
PARSE_WITHIN_S = 0.5
#: After [DONE] the stream must end; a server that forgets to gets this long.
AFTER_DONE_S = 2.0
EVENT_STREAM = "text/event-stream"
#: Of an answer that is no stream, so much is read.
ERROR_BYTES = 1 << 20
IDLE = IdleWatch()


@dataclass(slots=True)
class Exchange:
    """What became of one request. Times are monotonic seconds; `reader` holds chunks, usage and reply.

    `handled_late_s`: how long the bytes lay in the kernel before this process read them, the longest of the stream.
    """

    send_s: float
    end_s: float = 0.0
    status: int | None = None
    error_class: str | None = None
    error_message: str | None = None
    retry_after_s: float | None = None
    kernel_stamps: bool = False
    handled_late_s: float = 0.0
    reader: StreamReader = field(default_factory=StreamReader)


def exchange(session: FastHttpSession, url: str, body: bytes, headers: dict[str, str], timeout_s: float,
             result: Exchange) -> None:
    """Fill `result`; raises only GreenletExit (the rung cut the user off). `result.send_s` is set here."""
    result.send_s = time.monotonic()
    limit = gevent.Timeout(timeout_s)
    limit.start()
    response: FastResponse | None = None
    try:
        # Locust annotates `data` as text, and what is used as a context manager there: bytes are passed on as they are
        response = cast(FastResponse, session.post(url, data=cast(str, body), headers=headers, stream=True, name=url))
        if isinstance(response, ErrorResponse):
            _failed(result, response.error)
        else:
            result.status = response.status_code
            if 200 <= response.status_code < 300:
                _read_stream(response, result)
            else:
                _name_error(response, result, _body(response))
    except gevent.Timeout as timeout:
        if timeout is not limit:
            raise
        result.error_class, result.error_message = "timeout", f"no end after {timeout_s:g} s"
    except (OSError, HTTPParseError) as error:
        _failed(result, error)
    finally:
        limit.close()
        if response is not None and response.status_code:
            response.stream.release()
        result.end_s = result.end_s or time.monotonic()


def _read_stream(response: FastResponse, result: Exchange) -> None:
    """Read an answer that may be a stream, whatever its content type says; without any event it is read as an error."""
    stream, reader = response.stream, result.reader
    kind = _header(response, "content-type", EVENT_STREAM).lower()
    packed = _header(response, "content-encoding", "identity")
    if packed.lower() != "identity" and EVENT_STREAM not in kind:
        _name_error(response, result, _body(response))
        return
    if packed.lower() != "identity":
        result.error_class = "bad_event"
        result.error_message = f"the stream is packed ({packed}), which was not asked for: its tokens come in lumps"
        return
    beginning = _pump(stream, result, 0 if EVENT_STREAM in kind else ERROR_BYTES)
    now = time.monotonic()
    if reader.error_class is None and result.error_class is None:
        reader.close(now)
    if beginning and not reader.events and result.error_class is None:
        _name_error(response, result, beginning)
        return
    fault = reader.fault
    if fault is None and not reader.times_s:
        fault = "empty", "the answer carries no token"
    if fault is None:
        result.error_class = result.error_message = None  # whole; how the connection ended afterwards is no matter
        result.end_s = max(reader.times_s[-1], reader.finish_s or 0.0)
    elif result.error_class is None or fault[0] not in ("cut", "unfinished"):
        result.error_class, result.error_message = fault


def _header(response: FastResponse, name: str, otherwise: str = "") -> str:
    return otherwise if response.headers is None else str(response.headers.get(name, otherwise))


def _pump(stream: HTTPSocketResponse, result: Exchange, keep: int) -> bytes:
    """Read what is there as it comes, stamp it, parse in small batches; returns the first `keep` bytes.

    `read(n)` of the library would wait for n bytes and smear the stamps; so the socket is read here and the
    library's parser fed. A first piece may have come with the headers.
    """
    reader, buffer = result.reader, stream._body_buffer
    sock: Any = stream._sock
    pieces: list[tuple[float, bytes]] = []
    kept = bytearray()
    stamped = isinstance(sock, ArrivalSocket)
    if buffer:
        pieces.append((sock.arrival_s if stamped else time.monotonic(), bytes(buffer)))
        kept += buffer[:keep]
        buffer.clear()
    parse_s, late = time.monotonic() + PARSE_WITHIN_S, 0.0
    feed = super(HTTPResponse, stream).feed  # the C parser itself
    timeout_s = sock.gettimeout() if sock is not None else None
    if stamped:
        IDLE.add(sock, timeout_s)
    try:
        while not stream.message_complete and sock is not None:
            data = sock.recv(READ_BYTES)
            if stamped:
                now, arrival = sock.read_s, sock.arrival_s
                if now - arrival > late:
                    late = now - arrival
            else:
                now = arrival = time.monotonic()
            feed(data)
            if buffer:
                pieces.append((arrival, bytes(buffer)))
                if len(kept) < keep:
                    kept += buffer
                buffer.clear()
            if not data:
                if stamped and sock.given_up:
                    result.error_class, result.error_message = "timeout", f"silent for {sock.patience_s:g} s"
                elif not stream.message_complete:
                    result.error_class, result.error_message = "cut", "the connection closed in mid-answer"
                break
            if len(pieces) >= PARSE_EVERY or now > parse_s:
                _parse(reader, pieces)
                parse_s = now + PARSE_WITHIN_S
                if reader.error_class or len(kept) >= keep > 0 == reader.events:
                    break
            if b"[DONE]" in data and not stream.message_complete:
                _parse(reader, pieces)
                if not reader.done:
                    continue  # the model itself wrote it
                if stamped:
                    sock.patience_s = AFTER_DONE_S
                else:
                    sock.settimeout(AFTER_DONE_S)
    except (OSError, HTTPParseError) as error:
        _failed(result, error)
    finally:
        if stamped:
            IDLE.remove(sock, timeout_s)
        elif sock is not None:
            sock.settimeout(timeout_s)
        result.handled_late_s = late
        result.kernel_stamps = bool(stamped and sock.kernel_stamps)
        _parse(reader, pieces)
    return bytes(kept)


def _parse(reader: StreamReader, pieces: list[tuple[float, bytes]]) -> None:
    for arrival, piece in pieces:
        reader.feed(arrival, piece)
    pieces.clear()


def _name_error(response: FastResponse, result: Exchange, text: bytes) -> None:
    """Name the class of an answer that is no stream: an error with JSON or text, or a server that does not stream."""
    status = result.status or 0
    try:
        said = orjson.loads(text)
    except orjson.JSONDecodeError:
        said = text[:300].decode("utf-8", "replace")
    if 200 <= status < 300:
        if isinstance(said, dict) and said.get("choices"):
            result.error_class, result.error_message = "not_streamed", "the server answered without streaming"
        else:
            result.error_class, told = classify_error(said, "not_streamed")
            kind = _header(response, "content-type", "no content type")
            result.error_message = f"HTTP {status} with {kind}, not a {EVENT_STREAM}: {told}"
    else:
        result.error_class, result.error_message = classify_error(said, f"http_{status}")
        if 300 <= status < 400 and _header(response, "location"):
            result.error_message = (f"the server sends its clients on to {_header(response, 'location')[:200]}: give "
                                    "that address, or a request measures both")
    result.retry_after_s = retry_after(_header(response, "retry-after"), _header(response, "date"))


def _body(response: FastResponse) -> bytes:
    """The beginning of an answer, unpacked where a server packed it unasked. The library's own unpacking fails in many
    ways, and on bytes that are no archive."""
    text = bytes(response.stream.read(ERROR_BYTES))
    if text[:2] == b"\x1f\x8b":
        with contextlib.suppress(zlib.error):
            text = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(text, ERROR_BYTES)
    return text


def retry_after(value: str, date: str = "") -> float | None:
    """Seconds that a Retry-After header asks for, given as such or as a moment, then by the server's own clock (its
    `Date` header; else ours); None when it says neither."""
    try:
        seconds = float(value)
    except ValueError:
        until = _moment(value)
        if until is None:
            return None
        seconds = max(0.0, until - (_moment(date) or time.time()))
    return seconds if 0 <= seconds < 1e6 else None


def _moment(value: str) -> float | None:
    """Seconds since 1970 of an HTTP date."""
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


def _failed(result: Exchange, error: BaseException | None) -> None:
    """Name the error class of a connection that failed."""
    result.error_message = f"{type(error).__name__}: {error}"[:300]
    while error is not None and not isinstance(error, (OSError, HTTPParseError, gevent.Timeout)):
        error = error.__cause__ or error.__context__
    if error is not None:
        result.error_message = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, ConnectionRefusedError):
        result.error_class = "refused"
    elif isinstance(error, (TimeoutError, gevent.Timeout)):
        result.error_class = "timeout"
    elif isinstance(error, socket.gaierror):
        result.error_class = "dns"
    elif isinstance(error, ssl.SSLError):
        result.error_class = "tls"
    elif isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        result.error_class = "unreachable"
    else:
        result.error_class = "cut"
