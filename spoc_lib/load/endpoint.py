"""The endpoint before the clock starts: is it there, does it serve the model, what can it do? One sentence if not.

Runs in the parent, once a rung.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from spoc_lib.core.errors import InputError
from spoc_lib.load.plan import LoadPlan
from spoc_lib.servers import readiness
from spoc_lib.servers.readiness import NO_ACCESS

#: A firewall that swallows packets must not hold a rung for minutes.
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What the probe saw. `max_model_len` and `notes` (sentences) are what a non-vLLM server may lack."""

    models: tuple[str, ...]
    max_model_len: int | None
    notes: tuple[str, ...]


def probe(plan: LoadPlan) -> Endpoint:
    """Ask `/v1/models`; InputError with one sentence when nobody answers or the model is not served.

    A model that is not listed, or a list that is not shown, is asked for one token: gateways, adapters and servers of
    one model list other names than they take. A server without that page is taken as it is. The notes say so.
    """
    try:
        status, body = _models(plan)
    except readiness.NotReadyError as error:
        return Endpoint((), None, (f"{plan.api_url}/models gives no answer ({error.message}): the name is not checked",
                                   ))
    if status in NO_ACCESS:
        _one_token(plan, ())
        return Endpoint((), None, (f"{plan.api_url}/models is not shown (HTTP {status}); the server answers as "
                                   f"'{plan.model}'",))
    if status != 200:
        return Endpoint((), None, (f"{plan.api_url}/models answers HTTP {status}: the model's name is not checked",))
    try:
        cards = {str(card["id"]): card for card in json.loads(body)["data"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return Endpoint((), None, (f"{plan.api_url}/models is not an OpenAI model list: the name is not checked",))
    listed = ", ".join(sorted(cards)) or "no model"
    if plan.model not in cards:
        _one_token(plan, tuple(cards))
        return Endpoint(tuple(cards), None, (f"{plan.base_url} lists {listed}, and answers as '{plan.model}', which is "
                                             "what was asked",))
    length = cards[plan.model].get("max_model_len")
    return Endpoint(tuple(cards), length if isinstance(length, int) and length > 0 else None, ())


def _models(plan: LoadPlan) -> tuple[int, bytes]:
    """The plan's list of models; InputError where nobody listens."""
    try:
        return readiness.Endpoint(plan.base_url, plan).models(TIMEOUT_S)
    except readiness.UnreachableError as error:
        why = error.message.partition(": ")[2]
        raise InputError("unreachable", f"no server answers at {plan.base_url}: {why}") from error


def _one_token(plan: LoadPlan, listed: tuple[str, ...]) -> None:
    """InputError unless the server answers with a token as the plan's model, which is not among those `listed`."""
    try:
        readiness.Endpoint(plan.base_url, plan).complete(plan.model, tokens=1)
    except readiness.NoAccessError as error:
        raise InputError("unauthorised", f"{plan.base_url} refuses the API key: name the environment variable that "
                         f"holds it in 'api_key_env' (--api-key-env); {error.message}") from error
    except readiness.NotReadyError as error:
        raise InputError("unknown-model", f"{plan.base_url} does not serve the model '{plan.model}': it serves "
                         f"{', '.join(sorted(listed)) or 'none that it lists'}; asked for one token, {error.message}"
                         ) from error


def first_model(plan: LoadPlan) -> str:
    """The name of the only or first model that the plan's server has; for a command line without `--model`."""
    try:
        status, body = _models(plan)
        if status == 200:
            return str(json.loads(body)["data"][0]["id"])
    except (readiness.NotReadyError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        pass  # the sentence below says what to do
    raise InputError("no-model", f"{plan.base_url} does not list its models: name one with --model")


def reset_prefix_cache(plan: LoadPlan) -> None:
    """Empty the server's prefix cache; InputError when it has no such page, or is not allowed to now."""
    try:
        status, _ = readiness.Endpoint(plan.base_url, plan).ask("POST", "/reset_prefix_cache", timeout_s=TIMEOUT_S)
    except readiness.NotReadyError:
        status = 0
    if status != 200:
        raise InputError("no-cache-reset", f"{plan.base_url} does not empty its prefix cache (HTTP {status} from "
                         "/reset_prefix_cache): choose cache 'salt' with another salt each rung, or start vLLM with "
                         "VLLM_SERVER_DEV_MODE=1")
