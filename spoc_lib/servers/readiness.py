"""Is an engine ready? Health, the model's name, one real completion; and what it says about itself."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spoc_lib.core.errors import SpocError

PROBE_TIMEOUT_S = 5.0


class NotReadyError(SpocError):
    """The engine does not answer as a ready one does (yet)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a ready engine is: the model's name on its API, its version, its passport when it is simulated."""

    model: str
    max_model_len: int | None
    version: str
    passport: dict[str, Any] | None

    @property
    def simulated(self) -> bool:
        """Whether it is the twin that answers."""
        return self.passport is not None


class Endpoint:
    """Requests to one server. api_key: sent as a bearer token, never shown."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpocError("bad-url", f"'{base_url}' is not an http(s) address such as http://127.0.0.1:8000")
        self._parts, self._host = parts, parts.hostname
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(self, method: str, path: str, body: dict | None = None, timeout_s: float = PROBE_TIMEOUT_S
            ) -> tuple[int, bytes]:
        """(status, body); NotReadyError when nothing answers in time."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._host, self._parts.port, timeout=timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            headers = self._headers | ({"Content-Type": "application/json"} if payload else {})
            connection.request(method, self._prefix + path, payload, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise NotReadyError("no-answer", f"no answer from {self._parts.netloc}{path}: {error}") from error
        finally:
            connection.close()

    def healthy(self) -> None:
        """NotReadyError unless /health answers 200."""
        status, _ = self.ask("GET", "/health")
        if status != 200:
            raise NotReadyError("unhealthy", f"{self._parts.netloc}/health answers {status}")

    def identify(self, model: str | None = None) -> Identity:
        """Who serves here; `model` must be among its models where given."""
        cards = self._json("/v1/models").get("data") or []
        names = [card.get("id") for card in cards]
        if not names:
            raise NotReadyError("no-model", f"{self._parts.netloc}/v1/models lists no model")
        if model is not None and model not in names:
            raise NotReadyError("wrong-model", f"{self._parts.netloc} serves {', '.join(names)}, not {model}")
        card = cards[names.index(model)] if model else cards[0]
        status, body = self.ask("GET", "/version")
        version = json.loads(body).get("version", "unknown") if status == 200 else "unknown"
        status, body = self.ask("GET", "/spoc/passport")
        return Identity(card["id"], card.get("max_model_len"), version, json.loads(body) if status == 200 else None)

    def complete(self, model: str, *, prompt: str = "def f(x):", tokens: int = 2, timeout_s: float = 60) -> None:
        """One real completion; NotReadyError when it fails. Servers without /v1/completions are asked by chat."""
        status, body = self.ask("POST", "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": tokens},
                                timeout_s)
        if status == 404:
            messages = [{"role": "user", "content": prompt}]
            status, body = self.ask("POST", "/v1/chat/completions",
                                    {"model": model, "messages": messages, "max_tokens": tokens}, timeout_s)
        if status != 200:
            raise NotReadyError("no-completion", f"{self._parts.netloc} answers a completion with {status}: "
                                f"{body[:200].decode('utf-8', 'replace')}")

    def _json(self, path: str) -> dict:
        status, body = self.ask("GET", path)
        try:
            if status == 200:
                return json.loads(body)
        except ValueError as error:
            raise NotReadyError("bad-answer", f"{self._parts.netloc}{path} does not answer with JSON") from error
        raise NotReadyError("bad-answer", f"{self._parts.netloc}{path} answers {status}")
