"""One HTTP reader for metrics pages: keeps its connection, and never takes longer than it was told."""

from __future__ import annotations

import http.client
import time
import zlib
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from spoc_lib.config.access import Access

#: A page larger than this is no metrics page.
LARGEST_BYTES = 64 * 2**20
REDIRECTS, MOST_REDIRECTS = (301, 302, 303, 307, 308), 4


class ScrapeError(Exception):
    """A scrape that gave no page; the message is the reason in a few words."""


class Page(NamedTuple):
    """`time_s`: monotonic, the middle between asking and the first byte of the answer (the server takes its
    snapshot in between); `error_s`: half of that span, the alignment error; `seconds`: the whole scrape."""

    text: str
    time_s: float
    error_s: float
    seconds: float


class PageReader:
    """Reads one URL again and again, reached as `access` says, `headers` besides. A redirect within the host is
    followed, and kept. Not for use from several threads."""

    def __init__(self, url: str, timeout_s: float, access: Access | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        self.timeout_s, access = timeout_s, access or Access()
        self._connection = access.connection(url, timeout_s)
        self._headers = {**access.request_headers(), "Accept": "text/plain; version=0.0.4", **(headers or {})}
        self._moved(url)

    def read(self) -> Page:
        """The page now; ScrapeError after `timeout_s` at the latest."""
        began = time.monotonic()
        try:
            return self._read(began)
        except TimeoutError as error:
            self.close()
            raise ScrapeError(f"no answer within {self.timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ScrapeError(f"{getattr(error, 'strerror', None) or error or type(error).__name__}") from error

    def _read(self, began: float) -> Page:
        for _ in range(MOST_REDIRECTS):
            response, body, answered = self._asked(began)
            where = response.getheader("Location") if response.status in REDIRECTS else None
            if where is None:
                break
            target = urljoin(self.url, where)
            if _origin(target) != _origin(self.url):  # its key, if it has one, is not for another host
                raise http.client.HTTPException(f"HTTP status {response.status}: the page is at {target}: give that "
                                                f"address (telemetry.metrics_url in a cluster file)")
            self._moved(target)
        if response.status != 200:
            raise http.client.HTTPException(f"HTTP status {response.status}" + (
                f" (redirects to {response.getheader('Location')})" if response.status in REDIRECTS else ""))
        ended = time.monotonic()
        text = _unpacked(body, response.getheader("Content-Encoding", "")).decode("utf-8", "replace")
        return Page(text, (began + answered) / 2, (answered - began) / 2, ended - began)

    def _moved(self, url: str) -> None:
        parts = urlsplit(url)
        self.url, self._path = url, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _asked(self, began: float) -> tuple[http.client.HTTPResponse, bytes, float]:
        """(the answer's head, its body, when its first byte came)."""
        fresh = self._connection.sock is None
        if not fresh:
            self._connection.sock.settimeout(self.timeout_s)
        try:
            self._connection.request("GET", self._path, headers=self._headers)
            response = self._connection.getresponse()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            if fresh:
                raise
            self._connection.close()  # an idle connection that the server has closed: once more on a new one
            self._connection.request("GET", self._path, headers=self._headers)
            response = self._connection.getresponse()
        answered = time.monotonic()
        body = bytearray()
        while block := self._block(response, began):
            body += block
            if len(body) > LARGEST_BYTES:
                raise http.client.HTTPException("the page is larger than 64 MiB")
        response.close()  # `read1` leaves a fully read response open, and the connection with it
        return response, bytes(body), answered

    def _block(self, response: http.client.HTTPResponse, began: float) -> bytes:
        """The next bytes; TimeoutError when the scrape as a whole has taken too long (a page that
        trickles)."""
        left = self.timeout_s - (time.monotonic() - began)
        if left <= 0:
            raise TimeoutError
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)
        return response.read1(65536)

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _unpacked(body: bytes, encoding: str) -> bytes:
    """The page as text; a proxy may pack it although nobody asked."""
    if encoding.strip().lower() in ("", "identity"):
        return body
    if encoding.strip().lower() not in ("gzip", "x-gzip", "deflate"):
        raise http.client.HTTPException(f"the page is packed as '{encoding}', which nobody asked for")
    try:
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
        text = unpacker.decompress(body, LARGEST_BYTES)
    except zlib.error as error:
        raise http.client.HTTPException("the page says that it is packed, and cannot be unpacked") from error
    if unpacker.unconsumed_tail:
        raise http.client.HTTPException("the page is larger than 64 MiB")
    return text
