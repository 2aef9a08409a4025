"""Server-sent events: bytes in, events out (WHATWG: lines end in LF, CRLF or CR; `data:` lines join with LF; an empty
line ends the event; one without data is none; comments and other fields are ignored). Any split of the bytes gives the
same events."""

from __future__ import annotations

BOM = b"\xef\xbb\xbf"


class NamedEvent(bytes):
    """The data of an event that bears a name (its `event:` line)."""

    name = ""


def event_name(data: bytes) -> str:
    """The name of an event, in small letters; empty for one without."""
    return data.name if isinstance(data, NamedEvent) else ""


class EventParser:
    """Incremental cutter of server-sent events.

    `feed(piece)` returns the `data` of every event that `piece` completed, in order, one with a name as NamedEvent. An
    event whose data is empty is none. `close()` returns the data of an event that the end of the stream cut before its
    empty line: the standard discards it, but several servers end like that, so the caller decides.
    """

    __slots__ = ("_buffer", "_data", "_first", "_more", "_name", "_skip_lf")

    def __init__(self) -> None:
        self._buffer = b""
        self._more: list[bytes] = []  # what came of the same line since, joined once when it ends
        self._data: list[bytes] = []
        self._name = b""
        self._first = True
        self._skip_lf = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in `piece`."""
        if not piece:
            return []
        if self._first:
            started = self._without_bom(piece)
            if started is None:
                return []
            piece = started
        if not self._buffer and not self._data and not self._skip_lf and not self._name and piece[:6] == b"data: " \
                and piece[-2:] == b"\n\n" and b"\r" not in piece:
            return self._whole_events(piece)
        return self._lines(piece)

    def _without_bom(self, piece: bytes) -> bytes | None:
        """Drop a byte-order mark at the very start, even when it arrives byte by byte; None: wait for more."""
        piece, self._buffer = self._buffer + piece, b""
        if len(piece) < 3 and BOM.startswith(piece):
            self._buffer = piece
            return None
        self._first = False
        return piece[3:] if piece.startswith(BOM) else piece

    def _whole_events(self, piece: bytes) -> list[bytes]:
        """The usual case, cheaply: `piece` is whole events of one `data: ` line each."""
        events = piece[:-2].split(b"\n\n")
        for event in events:
            if event[:6] != b"data: " or b"\n" in event:
                return self._lines(piece)
        return [data for event in events if (data := event[6:])]

    def _lines(self, piece: bytes) -> list[bytes]:
        if self._skip_lf:
            self._skip_lf = False
            if piece[:1] == b"\n":
                piece = piece[1:]
        if self._buffer and b"\n" not in piece and b"\r" not in piece:
            self._more.append(piece)
            return []
        data = self.leftover + piece
        self._more.clear()
        if data[-1:] == b"\r":  # the LF of a CRLF may come in the next piece
            self._skip_lf = True
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._buffer = data.split(b"\n")
        events = []
        for line in lines:
            if line:
                self._field(line)
            elif data := self._dispatched():
                events.append(data)
        return events

    def _dispatched(self) -> bytes:
        """The data of the event that ends here."""
        data, name = b"\n".join(self._data), self._name
        self._data, self._name = [], b""
        if name and data:
            data = NamedEvent(data)
            data.name = name.decode("utf-8", "replace").lower()
        return data

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value[1:] if value[:1] == b" " else value)
        elif name == b"event":
            self._name = value.strip()

    def close(self) -> bytes | None:
        """The data of an event that the stream's end cut short; None where there is none."""
        if self._buffer:
            self._field(self.leftover)
            self._buffer = b""
            self._more.clear()
        return self._dispatched() or None

    @property
    def leftover(self) -> bytes:
        """Bytes of the line that has not ended."""
        return b"".join((self._buffer, *self._more)) if self._more else self._buffer
