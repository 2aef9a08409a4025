"""When a request came: the kernel's time stamp of its last bytes, not the moment the event loop got round to them.

While the loop writes a step's tokens to its streams, a request waits in the kernel, up to milliseconds on a busy
machine. Linux stamps every packet on arrival (SO_TIMESTAMPNS; on TCP, of the last byte read); elsewhere the moment of
the read has to do.
"""

from __future__ import annotations

import socket
import struct
import sys
import time

SO_TIMESTAMPNS = 35  # Linux, asm-generic; Python's socket module does not name it
_STAMP = struct.Struct("@qq")
_SPACE = socket.CMSG_SPACE(_STAMP.size) if hasattr(socket, "CMSG_SPACE") else 0
#: An older stamp is no stamp: the wall clock, which it is in, was set meanwhile.
OLDEST_S = 5.0


class StampedSocket(socket.socket):
    """A connection that notes in `stamps`, by descriptor, when what it read last had arrived (CLOCK_MONOTONIC, s)."""

    stamps: dict[int, float]

    def recv(self, size: int, flags: int = 0) -> bytes:
        """As a socket's; also notes when the kernel received the data."""
        data, ancillary, _, _ = self.recvmsg(size, _SPACE, flags)
        now = time.monotonic()
        self.stamps[self.fileno()] = now - _age_s(ancillary)
        return data


def _age_s(ancillary: list[tuple[int, int, bytes]]) -> float:
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(content) >= _STAMP.size:
            seconds, nanoseconds = _STAMP.unpack_from(content)
            age = time.time() - (seconds + nanoseconds * 1e-9)
            return age if 0 <= age < OLDEST_S else 0.0
    return 0.0


class StampingListener(socket.socket):
    """A listening socket whose connections are stamped, on Linux."""

    def __init__(self, family: int, kind: int) -> None:
        super().__init__(family, kind)
        self.stamps: dict[int, float] = {}

    def accept(self) -> tuple[socket.socket, object]:
        """As a socket's; the connection stamps what it receives (Linux)."""
        plain, address = super().accept()
        if sys.platform != "linux":
            return plain, address
        plain.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        connection = StampedSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        connection.stamps = self.stamps
        self.stamps.pop(connection.fileno(), None)  # of an earlier connection with this number
        return connection, address

    def arrived_s(self, descriptor: int) -> float:
        """When the last bytes of this connection arrived; now where that is unknown."""
        return self.stamps.get(descriptor) or time.monotonic()
