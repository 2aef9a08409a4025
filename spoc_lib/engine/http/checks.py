"""Well-formed requests held against the served model: messages, lengths, sampling parameters, in vLLM 0.32's words.

The order of all checks (body, model, lengths, sampling parameters) is vLLM's, so a request with several faults gets the
same answer.
"""

from __future__ import annotations

from array import array
from typing import Any

from spoc_lib.engine.http.openai_api import ApiError, GenerateRequest, invalid, validation_error

MAX_SEQUENCES = 16384
GREEDY_BELOW = 1e-5


def check_model(asked: str | None, served: str) -> None:
    """ApiError 404, as vLLM words it, when another model is asked for."""
    if asked and asked != served:
        raise ApiError(404, f"The model `{asked}` does not exist. Valid aliases: {served}.", "NotFoundError",
                       "model")


def check_messages(messages: list[dict[str, Any]], model: str) -> None:
    """Every message needs a role that is a text, and a content that is a text, a list of text parts, or absent."""
    if not messages:
        raise invalid("Cannot apply chat template to an empty conversation. Provide at least one message.")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise validation_error([{"type": "missing", "loc": ("body", "messages", number, "role"),
                                      "msg": "Field required", "input": message}])
        if not isinstance(message.get("content"), (str, list)) and not _may_be_silent(message):
            raise validation_error([{"type": "string_type", "loc": ("body", "messages", number, "content"),
                                      "msg": "Input should be a valid string", "input": message.get("content")}])
        if isinstance(message.get("content"), list):
            for part in message["content"]:
                if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise invalid(f"{model} is not a multimodal model")


def _may_be_silent(message: dict[str, Any]) -> bool:
    """Whether the message may do without a content: what an assistant said, or none named at all."""
    return message.get("content") is None and (message["role"] == "assistant" or "content" not in message)


def token_array(ids: list[int], vocabulary: int) -> array:
    """Token ids of a prompt given as numbers; ApiError when one is no token."""
    if ids and max(ids) >= vocabulary:
        raise invalid(f"Token id {max(ids)} is out of vocabulary")
    return array("i", ids)


def check_output_limit(limit: int | None, max_model_len: int) -> None:
    """The check that needs no prompt; it comes before tokenisation."""
    if limit is not None and limit > max_model_len:
        raise invalid(f"max_tokens={limit} cannot be greater than max_model_len={max_model_len}. "
                      "Please request fewer output tokens.", "max_tokens", limit)


def output_tokens(request: GenerateRequest, prompt_tokens: int, max_model_len: int) -> int:
    """The budget of one choice: what was asked for, cut to the room that the prompt leaves; ApiError when the
    prompt leaves none or a sampling parameter is out of range."""
    if prompt_tokens > max_model_len:
        # vLLM's tokenizer stops one token past the limit, so that is the number that it reports
        raise invalid(f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
                      f"contains at least {max_model_len + 1} input tokens, which exceeds this limit even "
                      "without any output tokens. Please reduce the length of the input prompt.",
                      "input_tokens", max_model_len + 1)
    room = max_model_len - prompt_tokens
    limit = room if request.output_limit is None else min(request.output_limit, room)
    _check_sampling(request, limit)
    return limit


def _check_sampling(request: GenerateRequest, limit: int) -> None:
    n = 1 if request.n is None else request.n
    if n < 1:
        raise invalid(f"n must be at least 1, got {n}.")
    if n > MAX_SEQUENCES:
        raise invalid(f"n must be at most {MAX_SEQUENCES}, got {n}. To increase this limit, set the "
                      "VLLM_MAX_N_SEQUENCES environment variable.")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(request, name)
        if value is not None and not -2 <= value <= 2:
            raise invalid(f"{name} must be in [-2, 2], got {value}.")
    if request.repetition_penalty is not None and request.repetition_penalty <= 0:
        raise invalid(f"repetition_penalty must be greater than zero, got {request.repetition_penalty}.")
    if request.temperature is not None and request.temperature < 0:
        raise invalid(f"temperature must be non-negative, got {request.temperature}.", "temperature",
                      request.temperature)
    if request.temperature is not None and request.temperature > 2:
        raise invalid(f"temperature must be in [0, 2], got {request.temperature}.", "temperature",
                      request.temperature)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise invalid(f"top_p must be in (0, 1], got {request.top_p}.", "top_p", request.top_p)
    if request.top_k is not None and request.top_k < -1:
        raise invalid(f"top_k must be 0 (disable), or at least 1, got {request.top_k}.")
    if request.min_p is not None and not 0 <= request.min_p <= 1:
        raise invalid(f"min_p must be in [0, 1], got {request.min_p}.")
    if limit < 1:
        raise invalid(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if request.min_tokens < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {request.min_tokens}.")
    if request.min_tokens > limit:
        raise invalid("min_tokens must be less than or equal to "
                      f"max_tokens={limit}, got {request.min_tokens}.")
    if any(not stop for stop in request.stops):
        raise invalid("stop cannot contain an empty string.")
    if n > 1 and request.temperature is not None and request.temperature < GREEDY_BELOW:
        raise invalid(f"n must be 1 when using greedy sampling, got {n}.")
