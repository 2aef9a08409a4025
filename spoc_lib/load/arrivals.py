"""When the bytes came, told by the kernel: the client's own lateness leaves no mark on a measurement.

With 300 streams a batch of tokens arrives at once and Python reads the last of them milliseconds later. Linux stamps
every packet on arrival (SO_TIMESTAMPNS, on TCP the stamp of the last byte read); `ArrivalSocket` asks for that stamp
with each read. Where there is none (TLS, other systems) the stamp is taken right after the read.

Imported in the load child only: gevent's sockets, geventhttpclient's pools.
"""

from __future__ import annotations

import contextlib
import socket as plain_socket
import ssl
import struct
import sys
import time
from typing import Any

import gevent
import gevent.socket
import geventhttpclient.client
from geventhttpclient.client import HTTPClient, HTTPClientPool
from geventhttpclient.connectionpool import ConnectionPool, SSLConnectionPool
from geventhttpclient.response import HTTPSocketPoolResponse
from geventhttpclient.url import URL

SO_TIMESTAMPNS = 35  # Linux, asm-generic; Python's socket module does not name it
KERNEL_STAMPS = sys.platform == "linux"
_STAMP = struct.Struct("qq")
_ANCILLARY_BYTES = 64
#: Servers drop idle connections (uvicorn after 5 s); a request must not race with that.
IDLE_LIMIT_S = 4.0
#: Readings of both clocks at a refresh: the quickest counts, for whoever loses the processor between two readings is
#: milliseconds off.
READINGS = 5
#: A wall clock that moves by more than this between two refreshes was set, not disciplined.
STEP_S = 0.01


class WallOffset:
    """Monotonic minus wall time, in parts that keep the precision of a nanosecond; `refresh` now and then.

    stepped_s: the furthest that the wall clock was set between two refreshes; stamps in between are as wrong."""

    base_s = 0
    offset_s = 0.0
    stepped_s = 0.0

    @classmethod
    def refresh(cls) -> None:
        """Measure the offset anew; a step of the wall clock since the last time is kept in `stepped_s`."""
        readings = [(time.monotonic(), time.time_ns(), time.monotonic()) for _ in range(READINGS)]
        before, wall_ns, after = min(readings, key=lambda reading: reading[2] - reading[0])
        base_s, offset_s = cls.base_s, cls.offset_s
        cls.base_s = wall_ns // 1_000_000_000
        cls.offset_s = (before + after) / 2 - (wall_ns - cls.base_s * 1_000_000_000) * 1e-9
        moved_s = abs((cls.offset_s - offset_s) - (cls.base_s - base_s))
        if base_s and moved_s > max(STEP_S, cls.stepped_s):
            cls.stepped_s = moved_s


class ArrivalSocket(gevent.socket.socket):
    """A socket that knows when the bytes it last gave had arrived (`arrival_s`) and when it read them (`read_s`),
    monotonic seconds."""

    arrival_s = 0.0
    read_s = 0.0
    idle_since_s = 0.0
    patience_s = 0.0
    given_up = False
    kernel_stamps = False

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Wait, then read: gevent would try first, and with one token at a time that read fails every time."""
        while True:
            self._wait(self._read_event)
            try:
                data, ancillary, _, _ = self._sock.recvmsg(size, _ANCILLARY_BYTES, flags)
                break
            except BlockingIOError:
                continue
        self.read_s = now = time.monotonic()
        if ancillary:
            seconds, nanoseconds = _STAMP.unpack(ancillary[0][2])
            stamp = seconds - WallOffset.base_s + nanoseconds * 1e-9 + WallOffset.offset_s
            if now - 60.0 < stamp <= now:  # else the wall clock was set meanwhile
                self.kernel_stamps = True
                self.arrival_s = stamp
                return data
        self.arrival_s = now
        return data


class IdleWatch:
    """Ends streams that have been silent for longer than their `patience_s`: one timer for all of them, where gevent's
    socket timeout would make and drop a timer a token. A silent stream is shut down and `given_up`; its reader wakes
    with an end of stream."""

    EVERY_S = 0.2

    def __init__(self) -> None:
        self._streams: set[ArrivalSocket] = set()
        self._greenlet = None

    def add(self, sock: ArrivalSocket, patience_s: float | None) -> None:
        """Watch a stream: `patience_s` without data, and it is given up (None: never)."""
        sock.settimeout(None)
        sock.given_up = False
        sock.read_s = time.monotonic()
        sock.patience_s = float("inf") if patience_s is None else patience_s
        self._streams.add(sock)
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._watch)

    def remove(self, sock: ArrivalSocket, timeout_s: float | None) -> None:
        """Watch it no longer; its own timeout holds again."""
        self._streams.discard(sock)
        sock.settimeout(timeout_s)  # it may already be back in the pool

    def _watch(self) -> None:
        while True:
            gevent.sleep(self.EVERY_S)
            now = time.monotonic()
            for sock in [sock for sock in self._streams if now - sock.read_s > sock.patience_s]:
                sock.given_up = True
                with contextlib.suppress(OSError):  # the server may have closed it this instant
                    sock.shutdown(plain_socket.SHUT_RDWR)


class Answer(HTTPSocketPoolResponse):
    """An answer that an interim one (1xx) may precede. The library would then give the socket back to the pool under
    the answer itself, and to another user."""

    def release(self) -> None:
        """Give the socket back to the pool, unless only an interim answer has ended."""
        if not (self.message_complete and self.get_code() < 200):
            super().release()


geventhttpclient.client.HTTPSocketPoolResponse = Answer  # type: ignore[misc]  # it offers no other way


class Reserving(ConnectionPool):
    """Connections made ahead: a user may open its own shortly before it sends, so that making it is no part of its time
    to first token. One that was idle for longer than `IDLE_LIMIT_S` is not used again."""

    def reserve(self) -> None:
        """Take a connection for the current greenlet's next request. A failure is left to that request to meet."""
        with contextlib.suppress(OSError):
            self._reserved()[gevent.getcurrent()] = super().get_socket()

    def get_socket(self) -> gevent.socket.socket:
        """The connection reserved for this greenlet, else the pool's next."""
        sock = self._reserved().pop(gevent.getcurrent(), None)
        if sock is None:
            return super().get_socket()
        if self._is_socket_alive(sock):
            return sock
        self.release_socket(sock)
        return super().get_socket()

    def return_socket(self, sock: Any) -> None:
        """Give a connection back, noting since when it is idle."""
        sock.idle_since_s = time.monotonic()
        super().return_socket(sock)

    def _fresh(self, sock: Any) -> bool:
        """Open, and not idle for longer than `IDLE_LIMIT_S`."""
        idle_since_s = getattr(sock, "idle_since_s", 0.0)
        return sock.fileno() >= 0 and not (idle_since_s and time.monotonic() - idle_since_s > IDLE_LIMIT_S)

    def _reserved(self) -> dict[object, gevent.socket.socket]:
        return self.__dict__.setdefault("_reservations", {})


class TlsPool(Reserving, SSLConnectionPool):
    """TLS connections; their stamps are the client's own."""

    def _is_socket_alive(self, sock: Any) -> bool:
        """Fresh, and nothing to read but what TLS itself sends: after a handshake session tickets come, and a
        connection made ahead would be thrown away for them."""
        if not self._fresh(sock):
            return False
        kept_s = sock.gettimeout()
        sock.settimeout(0.0)
        try:
            sock.recv(1)
        except ssl.SSLWantReadError:
            return True
        except OSError:
            return False
        finally:
            sock.settimeout(kept_s)
        return False


class ArrivalPool(Reserving):
    """Connections of `ArrivalSocket`s."""

    def _create_tcp_socket(self, family: int, socktype: int, protocol: int) -> ArrivalSocket:
        sock = ArrivalSocket(family, socktype, protocol)
        sock.setsockopt(plain_socket.IPPROTO_TCP, plain_socket.TCP_NODELAY, 1)
        if KERNEL_STAMPS:
            with contextlib.suppress(OSError):  # the summary says which stamps were used
                sock.setsockopt(plain_socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        return sock

    def _is_socket_alive(self, sock: Any) -> bool:
        """Fresh, and nothing to read (neither an end nor leftovers); without giving other users the turn, which
        would come between the stamp of a request and its sending."""
        if not self._fresh(sock):
            return False
        try:
            sock._sock.recv(1, plain_socket.MSG_PEEK | plain_socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False


class ArrivalClientPool(HTTPClientPool):
    """geventhttpclient's pool of clients, with connections made ahead and, on plain HTTP, stamped by the kernel."""

    def get_client(self, url: str | URL) -> HTTPClient:
        """The client of the address, its connections stamping what arrives."""
        client = super().get_client(url)
        old = client._connection_pool
        if not isinstance(old, Reserving):
            common: dict[str, Any] = {"size": old.size, "network_timeout": old.network_timeout,
                                      "connection_timeout": old.connection_timeout}
            where = (old._connection_host, old._connection_port, old._request_host, old._request_port)
            if isinstance(old, SSLConnectionPool):
                context = old.ssl_context
                client._connection_pool = TlsPool(*where, insecure=old.insecure, ssl_options=old.ssl_options,
                                                  ssl_context_factory=lambda **_: context, **common)
            else:
                client._connection_pool = ArrivalPool(*where, **common)
        return client

    def reserve(self, url: str) -> None:
        """Open a connection to `url`'s server for the current greenlet's next request."""
        pool = self.get_client(url)._connection_pool
        assert isinstance(pool, Reserving)  # `get_client` sees to it
        pool.reserve()
