"""Is an engine ready? Health, the model's name, one real completion; and what it says about itself."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spoc_lib.config.access import Access, api_url, root_url
from spoc_lib.core.errors import SpocError

PROBE_TIMEOUT_S = 5.0
#: How a server says that it does not have a page: not found, not allowed, not built.
NO_SUCH_PAGE = (404, 405, 501)
NO_ACCESS = (401, 403)


class NotReadyError(SpocError):
    """The engine does not answer as a ready one does (yet)."""


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
        """(status, body) of a page beside the API; NotReadyError when nothing answers in time."""
        return self._ask(method, self._root + path, body, timeout_s)

    def _ask(self, method: str, path: str, body: dict | None, timeout_s: float) -> tuple[int, bytes]:
        connection = self._access.connection(self._base_url, timeout_s)
        try:
            payload = None if body is None else json.dumps(body)
            headers = self._headers | ({"Content-Type": "application/json"} if payload else {})
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise NotReadyError("no-answer", f"no answer from {self._host}{path}: {error}") from error
        finally:
            connection.close()

    def healthy(self) -> None:
        """NotReadyError unless /health answers 200, or there is no such page: not every server has one."""
        status, _ = self.ask("GET", "/health")
        if status not in (200, *NO_SUCH_PAGE):
            raise NotReadyError("unhealthy", f"{self._host}{self._root}/health answers {status}{_why(status)}")

    def identify(self, model: str | None = None) -> Identity:
        """Who serves here. A `model` that the server does not list (an alias, an adapter, a gateway's wildcard), or
        whose list it does not show, must answer with one token."""
        status, body = self._ask("GET", f"{self._api}/models", None, PROBE_TIMEOUT_S)
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
