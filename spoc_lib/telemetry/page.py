"""One HTTP reader for metrics pages: keeps its connection, and never takes longer than it was told."""

from __future__ import annotations

import http.client
import time
from typing import NamedTuple
from urllib.parse import urlsplit

from spoc_lib.config.access import Access

#: A page larger than this is no metrics page.
LARGEST_BYTES = 64 * 2**20


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
    """Reads one URL again and again, reached as `access` says. Not for use from several threads."""

    def __init__(self, url: str, timeout_s: float, access: Access | None = None) -> None:
        self.url, self.timeout_s, access = url, timeout_s, access or Access()
        self._connection, parts = access.connection(url, timeout_s), urlsplit(url)
        self._headers = {**access.request_headers(), "Accept": "text/plain; version=0.0.4"}
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

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
        if response.status != 200:
            raise http.client.HTTPException(f"HTTP status {response.status}")
        ended = time.monotonic()
        return Page(body.decode("utf-8", "replace"), (began + answered) / 2, (answered - began) / 2, ended - began)

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
