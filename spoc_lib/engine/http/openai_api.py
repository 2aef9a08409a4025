"""Requests to the embedded server: parsing, validation, and the error bodies that vLLM 0.32 answers.

A wrong request becomes an `ApiError` that carries vLLM's status, message, type and parameter; the order of
the checks (body, model, lengths, sampling parameters) is vLLM's, so a request with several faults gets the
same answer.
"""

from __future__ import annotations

import json
from array import array
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_SEQUENCES = 16384
MAX_REPORTED_ERRORS = 10
MAX_ECHOED_CHARACTERS = 200
#: Names that pydantic puts into the location of a union's branch; a client knows only the field's name.
UNION_BRANCHES = {"str", "int", "float", "bool"}


class ApiError(Exception):
    """An answer with an error body: HTTP `status`, OpenAI's `type` (`BadRequestError`), the faulty
    `param`."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError",
                 param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param = status, message, kind, param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})


def invalid(message: str, param: str | None = None, value: object = None) -> ApiError:
    """400 as vLLM words it: the parameter and its value stand in brackets behind the sentence."""
    about = [f"parameter={param}"] if param else []
    if value is not None:
        about.append(f"value={value}")
    return ApiError(400, f"{message} ({', '.join(about)})" if about else message, param=param)


def busy(reason: str) -> ApiError:
    """503 for `reason`, the flag whose limit is reached."""
    what = {"max_num_queued_reqs": "is currently busy and cannot accept new requests",
            "max_num_queued_tokens": "has reached its prefill token backlog limit"}[reason]
    return ApiError(503, f"The engine {what}. Please try again later or on a different instance.",
                    "Service Unavailable")


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


#: Parameters that would change prompt or answer in ways that the embedded engine does not follow, each with the values
#: that change nothing. Refused rather than ignored.
UNSUPPORTED: dict[str, tuple] = dict.fromkeys((
    "echo", "suffix", "prompt_embeds", "logprobs", "top_logprobs", "prompt_logprobs", "logit_bias", "functions",
    "structured_outputs", "use_beam_search", "truncate_prompt_tokens", "return_token_ids", "continue_final_message",
    "stop_token_ids", "allowed_token_ids", "bad_words", "audio"), (None, False, 0, {}, ""))
UNSUPPORTED |= {"response_format": (None, {"type": "text"}), "add_generation_prompt": (None, True),
                "cache_salt": (None,), "stop_token_ids": (None, []), "bad_words": (None, [])}
GREEDY_BELOW = 1e-5
TokenIds = list[Annotated[int, Field(ge=0)]]


class StreamOptions(_Body):
    """`stream_options` of the OpenAI API."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Generate(_Body):
    """What chat and completion requests have in common. Sampling parameters are checked, then without effect:
    the embedded engine's replies depend on the prompt and `seed` alone."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    ignore_eos: bool = False
    stop: str | Annotated[list[str], Field(max_length=4)] | None = []
    include_stop_str_in_output: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens


class ChatRequest(_Generate):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(_Generate):
    """The body of /v1/completions."""

    prompt: TokenIds | list[TokenIds] | str | list[str] | None = None
    max_tokens: int | None = 16

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, each a text or token ids."""
        if self.prompt is None or isinstance(self.prompt, str):
            return [self.prompt or ""]
        several: list[str | list[int]] = [one for one in self.prompt if not isinstance(one, int)]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else several


class TokenizeRequest(_Body):
    """The body of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: TokenIds


def parse_body(kind: type[BaseModel], body: bytes, content_type: str) -> Any:
    """`body` as a request of `kind`; ApiError 400 for a wrong media type, malformed JSON or a wrong field."""
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is "
                            "allowed", "Bad Request")
    data = _json(body)
    if isinstance(data, dict):
        if data.get("stream_options") and not data.get("stream"):
            raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
        if kind is CompletionRequest and data.get("prompt") in (None, ""):
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if kind is TokenizeRequest and data.get("prompt") is None and data.get("messages") is None:
            raise _validation_error([{"type": "missing", "loc": ("body", name), "msg": "Field required", "input": data}
                                     for name in ("prompt", "messages")])
        if kind is CompletionRequest and type(data.get("logprobs")) is int:  # here 0 asks for the sampled tokens'
            raise invalid("logprobs is not supported by the embedded engine.", "logprobs")
        _check_chat_extras(data)
        for name, harmless in UNSUPPORTED.items():
            if data.get(name) not in harmless:
                raise invalid(f"{name} is not supported by the embedded engine.", name)
    try:
        return kind.model_validate(data, from_attributes=True)
    except ValidationError as error:
        raise _validation_error([{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
                                ) from error


def _check_chat_extras(data: dict) -> None:
    """Tools and templates, refused as a server refuses them that was not started with a parser for them."""
    tools, choice = data.get("tools"), data.get("tool_choice")
    if tools is not None and not tools:
        raise invalid("`tools` must not be an empty array. Either provide at least one tool or omit the field "
                      "entirely.", "tools")
    if choice not in (None, "none") and not tools:
        raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if tools and choice in (None, "auto"):
        raise invalid('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if tools:
        raise invalid("tools is not supported by the embedded engine.", "tools")
    if data.get("chat_template"):
        raise invalid("Chat template is passed with request, but --trust-request-chat-template is not set. Refused "
                      "request with untrusted chat template.")


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:  # the standard parser takes what it takes in vLLM (NaN), and words the fault
        data = json.loads(body)
        json.dumps(data, ensure_ascii=False).encode()  # it lets halves of surrogate pairs through
        return data
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {},
                 "ctx": {"error": error.msg}}
        raise _validation_error([fault]) from error
    except (UnicodeError, RecursionError) as error:
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from error


def _validation_error(errors: list[dict]) -> ApiError:
    """vLLM's rendering of a failed validation: one line a fault, inputs shortened so that nothing is
    amplified."""
    lines = []
    for fault in errors[:MAX_REPORTED_ERRORS]:
        loc = ".".join(str(part) for part in fault["loc"]
                       if str(part) not in UNION_BRANCHES and not set(str(part)) & set("[](){}"))
        lines.append(f"  {({**fault, 'loc': loc, 'input': _summary(fault['input'])})}")
        fault["loc"] = loc
    label = "error" if len(errors) == 1 else "errors"
    if len(errors) > MAX_REPORTED_ERRORS:
        lines.append(f"  ...and {len(errors) - MAX_REPORTED_ERRORS} more {label}")
    message = "\n".join([f"{len(errors)} validation {label}:", *lines])
    return ApiError(400, message, "Bad Request", errors[0]["loc"])


def _summary(value: object) -> object:
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = value if isinstance(value, str) else str(value)
    return text[:MAX_ECHOED_CHARACTERS] + "...[truncated]" if len(text) > MAX_ECHOED_CHARACTERS else text


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
            raise _validation_error([{"type": "missing", "loc": ("body", "messages", number, "role"),
                                      "msg": "Field required", "input": message}])
        if not isinstance(message.get("content"), (str, list)) and not _may_be_silent(message):
            raise _validation_error([{"type": "string_type", "loc": ("body", "messages", number, "content"),
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


def output_tokens(request: _Generate, prompt_tokens: int, max_model_len: int) -> int:
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


def _check_sampling(request: _Generate, limit: int) -> None:
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
