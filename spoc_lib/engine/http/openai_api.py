"""Requests to the embedded server: their bodies parsed, and the error bodies that vLLM 0.32 answers.

A wrong request becomes an `ApiError` that carries vLLM's status, message, type and parameter. What is well formed is
held against the model next (`checks`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
        """The body of the answer."""
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
TokenIds = list[Annotated[int, Field(ge=0)]]


class StreamOptions(_Body):
    """`stream_options` of the OpenAI API."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerateRequest(_Body):
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
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])

    @property
    def include_usage(self) -> bool:
        """Whether a last chunk with the usage is asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk shall carry the usage so far."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def output_limit(self) -> int | None:
        """Tokens of one choice at most; None: as many as the context holds."""
        return self.max_tokens


class ChatRequest(GenerateRequest):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(GenerateRequest):
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
            raise validation_error([{"type": "missing", "loc": ("body", name), "msg": "Field required", "input": data}
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
        raise validation_error([{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
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
        raise validation_error([fault]) from error
    except (UnicodeError, RecursionError) as error:
        raise ApiError(400, "There was an error parsing the body", "Bad Request") from error


def validation_error(errors: list[dict]) -> ApiError:
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
