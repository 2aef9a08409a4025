"""The endpoint before the clock starts: is it there, does it serve the model, what can it do? One sentence if not.

Runs in the parent, on the standard library's blocking client, once a rung.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass

import orjson

from spoc_lib.config.access import root_url
from spoc_lib.core.errors import InputError
from spoc_lib.load.plan import LoadPlan

#: A firewall that swallows packets must not hold a rung for minutes.
TIMEOUT_S = 10.0


#: A page that never ends must not either.
MAX_BYTES = 1 << 20


class _NoAnswer(Exception):
    """Somebody accepts connections but does not answer this page; a server may have no model list."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the probe saw. `max_model_len` and `notes` (sentences) are what a non-vLLM server may lack."""

    models: tuple[str, ...]
    max_model_len: int | None
    notes: tuple[str, ...]


def probe(plan: LoadPlan) -> Endpoint:
    """Ask `/v1/models`; InputError with one sentence when nobody answers or the model is not served.

    A server without that page is taken as it is: the note says so.
    """
    try:
        status, body = _get(plan, f"{plan.api_url}/models")
    except _NoAnswer as error:
        return Endpoint((), None, (f"{plan.api_url}/models gives no answer ({error}): the name is not checked",))
    if status in (401, 403):
        raise InputError("unauthorised", f"{plan.base_url} refuses the API key (HTTP {status}): name the environment"
                         " variable that holds it in 'api_key_env' (--api-key-env)")
    if status != 200:
        return Endpoint((), None, (f"{plan.api_url}/models answers HTTP {status}: the model's name is not checked",))
    try:
        data = orjson.loads(body)["data"]
        cards = {str(card["id"]): card for card in data}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return Endpoint((), None, (f"{plan.api_url}/models is not an OpenAI model list: the name is not checked",))
    if cards and plan.model not in cards:
        raise InputError("unknown-model", f"{plan.base_url} does not serve the model '{plan.model}': it serves "
                         + ", ".join(sorted(cards)))
    length = cards.get(plan.model, {}).get("max_model_len")
    return Endpoint(tuple(cards), int(length) if length else None, ())


def first_model(plan: LoadPlan) -> str:
    """The name of the only or first model that the plan's server has; for a command line without `--model`."""
    try:
        status, body = _get(plan, f"{plan.api_url}/models")
        if status == 200:
            return str(orjson.loads(body)["data"][0]["id"])
    except (_NoAnswer, orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        pass  # the sentence below says what to do
    raise InputError("no-model", f"{plan.base_url} does not list its models: name one with --model")


def reset_prefix_cache(plan: LoadPlan) -> None:
    """Empty the server's prefix cache; InputError when it has no such page, or is not allowed to now."""
    try:
        status, _ = _get(plan, f"{root_url(plan.base_url)}/reset_prefix_cache", "POST")
    except _NoAnswer:
        status = 0
    if status != 200:
        raise InputError("no-cache-reset", f"{plan.base_url} does not empty its prefix cache (HTTP {status} from "
                         "/reset_prefix_cache): choose cache 'salt' with another salt each rung, or start vLLM with "
                         "VLLM_SERVER_DEV_MODE=1")


def _get(plan: LoadPlan, url: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers=dict(plan.headers), method=method)
    for name, value in plan.credential().items():
        request.add_unredirected_header(name, value)
    tls = [urllib.request.HTTPSHandler(context=plan.tls())] if url.startswith("https:") else []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *tls)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read(MAX_BYTES)
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except urllib.error.URLError as error:
        why = getattr(error.reason, "strerror", None) or str(error.reason)
        raise InputError("unreachable", f"no server answers at {plan.base_url}: {why}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _NoAnswer(str(error) or type(error).__name__) from error
    except ValueError as error:
        raise InputError("bad-url", f"'{plan.base_url}' is not a usable address: {error}") from error

