"""Is an engine ready? Health, the model's name, one real completion; and what it says about itself."""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spoc_lib.config.access import Access, api_url, root_url
from spoc_lib.core.errors import InputError, SpocError

PROBE_TIMEOUT_S = 5.0
#: How a server says that it does not have a page: not found, not allowed, not built.
NO_SUCH_PAGE = (404, 405, 501)
NO_ACCESS = (401, 403)
#: As nginx, Go and Apache answer plain HTTP where they speak TLS, and as a TLS alert begins.
TLS_WANTED, TLS_ALERT = re.compile(rb"HTTPS (port|server)|SSL-enabled"), ("'\\x15\\x03", "\x15\x03")
#: What OpenSSL calls an answer that is no TLS.
PLAIN_HTTP = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
#: No page that is asked for is longer.
MAX_BYTES = 1 << 24


class NotReadyError(SpocError):
    """The engine does not answer as a ready one does (yet)."""


class UnreachableError(NotReadyError):
    """Nobody listens there."""


class NoAccessError(NotReadyError):
    """The engine is there and wants another key: waiting does not help."""


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
    """Requests to one server, reached as `access` says; its key is never shown. InputError when that names none."""

    def __init__(self, base_url: str, access: Access | None = None) -> None:
        self._base_url, self._access = base_url, access or Access()
        self._host = urlsplit(base_url).netloc
        self._root, self._api = urlsplit(root_url(base_url)).path, urlsplit(api_url(base_url)).path
        self._headers = self._access.request_headers()

    def ask(self, method: str, path: str, body: dict | None = None, timeout_s: float = PROBE_TIMEOUT_S
            ) -> tuple[int, bytes]:
        """(status, body) of a page beside the API; NotReadyError when nothing answers in time, InputError where the
        server speaks the other scheme."""
        return self._ask(method, self._root + path, body, timeout_s)

    def models(self, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[int, bytes]:
        """`ask` of the API's list of models."""
        return self._ask("GET", f"{self._api}/models", None, timeout_s)

    def _ask(self, method: str, path: str, body: dict | None, timeout_s: float) -> tuple[int, bytes]:
        connection = self._access.connection(self._base_url, timeout_s)
        payload = None if body is None else json.dumps(body)
        headers = self._headers | ({"Content-Type": "application/json"} if payload else {})
        try:
            try:
                connection.request(method, path, payload, headers)
            except OSError as error:
                if isinstance(error, ssl.SSLError) and error.reason in PLAIN_HTTP:
                    raise self._other_scheme("http") from error
                raise UnreachableError("no-answer", f"no answer from {self._host}{path}: {error.strerror or error}"
                                       ) from error
            answer = connection.getresponse()
            status, said = answer.status, answer.read(MAX_BYTES)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, http.client.BadStatusLine) and str(error).startswith(TLS_ALERT):
                raise self._other_scheme("https") from error
            raise NotReadyError("no-answer", f"no answer from {self._host}{path}: {error or type(error).__name__}"
                                ) from error
        finally:
            connection.close()
        if status == 400 and TLS_WANTED.search(said):
            raise self._other_scheme("https")
        return status, said

    def _other_scheme(self, scheme: str) -> InputError:
        spoken = {"http": "plain HTTP", "https": "TLS"}[scheme]
        return InputError("wrong-scheme", f"{self._base_url} speaks {spoken} there: write {scheme}://"
                          + self._base_url.partition("://")[2])

    def healthy(self) -> None:
        """NotReadyError unless /health answers 200, or there is no such page: not every server has one."""
        status, _ = self.ask("GET", "/health")
        if status not in (200, *NO_SUCH_PAGE):
            raise NotReadyError("unhealthy", f"{self._host}{self._root}/health answers {status}{_why(status)}")

    def identify(self, model: str | None = None) -> Identity:
        """Who serves here. A `model` that the server does not list (an alias, an adapter, a gateway's wildcard), or
        whose list it does not show, must answer with one token."""
        status, body = self.models()
        if model is not None and status in (*NO_SUCH_PAGE, *NO_ACCESS):
            cards: list[dict[str, Any]] = []
        else:
            cards = self._models(status, body)
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            card = {"id": model}
            if status not in NO_SUCH_PAGE:
                self.takes(str(model), [card["id"] for card in cards])
        length = card.get("max_model_len")
        passport = self._page("/spoc/passport")
        return Identity(card["id"], length if isinstance(length, int) else None,
                        str(self._page("/version").get("version", "unknown")), passport or None)

    def _models(self, status: int, body: bytes) -> list[dict[str, Any]]:
        where = f"{self._host}{self._api}/models"
        if status != 200:
            raise _refusal(status, f"{where} answers {status}{_why(status)}")
        try:
            cards = [{**card, "id": str(card["id"])} for card in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise NotReadyError("bad-answer", f"{where} is no OpenAI model list: name the model in "
                                "engine.served_model and correct base_url") from error
        if not cards:
            raise NotReadyError("no-model", f"{where} lists no model")
        return cards

    def _page(self, path: str) -> dict[str, Any]:
        """A page of facts that only some servers have; {} where it is not there."""
        status, body = self.ask("GET", path)
        try:
            facts = json.loads(body) if status == 200 else {}
        except ValueError:  # a gateway may answer any address with a page of its own
            return {}
        return facts if isinstance(facts, dict) else {}

    def takes(self, model: str, listed: Sequence[str]) -> None:
        """NotReadyError unless the server answers one token as `model`, which is not among those that it `listed`."""
        try:
            self.complete(model, tokens=1)
        except NoAccessError:
            raise
        except NotReadyError as error:
            raise NotReadyError("wrong-model", f"{self._host} serves {', '.join(sorted(listed)) or 'no listed model'}, "
                                f"not {model}: {error.message}") from error

    def complete(self, model: str, *, prompt: str = "def f(x):", tokens: int = 2, timeout_s: float = 60) -> None:
        """One real answer of the kind that a rung asks for; NotReadyError when it fails."""
        chat = self._access.api == "chat"
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        fields, budget = self._access.body({"model": model, **asked})
        route = f"{self._api}/{self._access.route}"
        status, body = self._ask("POST", route, {**fields, budget: tokens}, timeout_s)
        if status != 200:
            other = f" (engine.api: {'completions' if chat else 'chat'} asks the other route)"
            why = other if status in NO_SUCH_PAGE else _why(status)
            said = self._access.redacted(body[:500].decode("utf-8", "replace"))
            raise _refusal(status, f"{self._host}{route} answers {status}{why}: {said[:200]}"
                           + self._access.remedy(said))
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):  # some stream what was not asked to be streamed
            answer = {"choices": b'"choices"' in body}
        if not isinstance(answer, dict) or not answer.get("choices") or answer.get("error"):
            said = self._access.redacted(body[:200].decode("utf-8", "replace"))
            raise NotReadyError("no-completion", f"{self._host}{route} answers 200 and no completion: {said}")


def _refusal(status: int, message: str) -> NotReadyError:
    return (NoAccessError if status in NO_ACCESS else NotReadyError)("refused", message)


def _why(status: int) -> str:
    """What a refusal asks for."""
    return " (name the variable that holds the API key in api_key_env)" if status in NO_ACCESS else ""
