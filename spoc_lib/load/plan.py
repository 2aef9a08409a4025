"""What one rung of load is: the whole of it, as JSON, so that a child process and a reader a year later agree."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from spoc_lib.core.yamlfile import Positive, PositiveInt, Strict

NotNegative = Annotated[float, Field(ge=0)]
#: A header with one of these in its name is a credential, and a plan is written to disk.
SECRET_WORDS = ("authorization", "api-key", "apikey", "token", "secret", "cookie", "password", "credential")
SECRET_NAMES = re.compile(r"(.*[-_ ])?(auth|key)")
SECRET_FIELDS = ("api_key", "apikey", "api-key", "access_token", "authorization", "password", "secret")
#: What a header may be made of (RFC 9110, section 5).
HEADER_NAME, HEADER_VALUE = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"), re.compile(r"[\t\x20-\x7e\x80-\xff]*")
OWN_HEADERS = ("content-type", "content-length", "transfer-encoding", "accept", "accept-encoding")
#: One streamed answer is asked each time, and the script says for what and how long.
OWN_FIELDS = ("messages", "prompt", "stream", "n", "max_completion_tokens")
VERSION = re.compile(r"v\d+((alpha|beta)\d*)?")


class FixedTurns(Strict):
    """Users without personas, for measuring the client: each request has one size, each pause one length.

    Exactly what a paced server can be held against; no corpus and no tokenizer are needed.
    """

    prompt_tokens: PositiveInt = 16
    output_tokens: PositiveInt = 128
    think_time_s: NotNegative = 0.0


class Arrivals(Strict):
    """Conversations that come by themselves (an open loop): so many a second, or when a recording says (`rate_per_s`
    null). Each is one user who plays one conversation and goes. cv: burstiness, 1 is Poisson, above 1 gamma bursts."""

    rate_per_s: Positive | None
    cv: Positive = 1.0


class LoadPlan(Strict):
    """One rung: who (personas, users, seed, salt) asks whom (endpoint, model) for how long.

    `warmup_s` counts from the end of the ramp and is never part of the steady window. `scale` multiplies the personas'
    token sizes. `cache` says what the rung finds in the server's prefix cache: `salt` (default) relies on another
    `salt` each rung, which changes every text without changing a size; `reset` empties the cache through the
    endpoint first (vLLM in development mode, the embedded engine); `warm` wants what earlier rungs left.
    `extra_body` is merged into each request; null leaves a field out, and a null `max_tokens` sends the budget as
    `max_completion_tokens`.
    `tokenizer` says whose tokens the sizes are: `offline` (o200k with this workbench's template), or `target`: text,
    the template's overhead and the context limit are measured through the server's `/tokenize`.
    The API key is read from the environment variable named by `api_key_env`; it stands nowhere else. `verify_tls`: a
    certificate must come from an authority that the system knows, or that the file named by SSL_CERT_FILE holds.
    """

    base_url: str
    model: str
    users: PositiveInt
    duration_s: Positive
    personas: str = "spoc"
    fixed: FixedTurns | None = None
    corpus: str | None = Field(None, description="folder of text; default: Python's installed standard library")
    tokenizer: Literal["offline", "target"] = "offline"
    warmup_s: NotNegative = 0.0
    ramp_s: NotNegative = 0.0
    seed: int = 0
    salt: int = 0
    gap_cap_s: Positive = 60.0
    start: Literal["cold", "stationary"] = "stationary"
    cache: Literal["salt", "reset", "warm"] = "salt"
    context_limit: PositiveInt | None = None
    scale: Positive = 1.0
    api: Literal["chat", "completions"] = "chat"
    api_key_env: str | None = None
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}
    verify_tls: bool = True
    request_timeout_s: Positive = 600.0
    idle_timeout_s: Positive = 120.0
    stop_timeout_s: NotNegative = 30.0
    arrivals: Arrivals | None = Field(None, description="an open loop: 'users' are then arrivals; null = closed loop")
    processes: PositiveInt = Field(1, description="client processes that share the users; with `master`: workers")
    master: str | None = Field(None, description="HOST:PORT where workers on other machines join; null = all"
                               " client processes run on this machine")
    join_timeout_s: Positive = Field(60.0, description="how long the master waits for its workers")
    ui_port: int | None = Field(None, gt=0, lt=65536,
                                description="port of Locust's own web page on 127.0.0.1; null = no page")

    @field_validator("base_url")
    @classmethod
    def _http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must start with http:// or https://, for example http://127.0.0.1:8000")
        secret = secret_given(value, {}, {})
        if secret:
            raise ValueError(secret)
        address = urlsplit(value)
        if not address.hostname or address.query or address.fragment or re.search(r"[\x00-\x20\x7f]", value):
            raise ValueError("must be scheme, host and path, for example http://127.0.0.1:8000/proxy: no spaces, no '?'"
                             " and no '#'")
        _ = address.port  # raises a sentence when there is no such port
        return value.rstrip("/")

    @field_validator("headers")
    @classmethod
    def _headers(cls, value: dict[str, str]) -> dict[str, str]:
        secret = secret_given("", value, {})
        if secret:
            raise ValueError(secret)
        for name, text in value.items():
            if not HEADER_NAME.fullmatch(name) or not HEADER_VALUE.fullmatch(text):
                raise ValueError(f"the header {name!r} holds characters that HTTP does not carry")
            if name.lower() in OWN_HEADERS:
                raise ValueError(f"the header {name} is the client's own: leave it out")
        return value

    @field_validator("extra_body")
    @classmethod
    def _body(cls, value: dict[str, Any]) -> dict[str, Any]:
        secret = secret_given("", {}, value)
        if secret:
            raise ValueError(secret)
        own = [name for name in OWN_FIELDS if name in value] + ["max_tokens"] * (value.get("max_tokens") is not None)
        if own:
            raise ValueError(f"may not hold {own[0]!r}: the script says what is asked, one streamed answer each time")
        return value

    @field_validator("master")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            host_and_port(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> LoadPlan:
        if self.warmup_s + self.ramp_s >= self.duration_s:
            raise ValueError("'duration_s' must be longer than 'ramp_s' + 'warmup_s'")
        if self.arrivals and (self.ramp_s or self.fixed):
            raise ValueError("'arrivals' say when users come: leave out 'ramp_s' and 'fixed'")
        return self

    @property
    def api_url(self) -> str:
        """The base of the OpenAI API: `base_url` with `/v1` added when its path has no version."""
        return api_url(self.base_url)


def secret_given(base_url: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """A sentence when an address, headers or body fields hold a credential, which a plan would write to disk; it
    repeats none."""
    named = [name for name, value in headers.items() if SECRET_NAMES.fullmatch(name.lower())
             or any(word in name.lower() for word in SECRET_WORDS) or value.lower().startswith(("bearer ", "basic "))]
    fields = [name for name in body if name.lower() in SECRET_FIELDS]
    if "@" in base_url.partition("//")[2].partition("/")[0]:
        found = "'base_url' holds a user or password"
    elif named:
        found = f"the header {named[0]} is a credential"
    elif fields:
        found = f"the body field {fields[0]} is a credential"
    else:
        return None
    return f"{found}: credentials come from an environment variable, named in 'api_key_env' (--api-key-env)"


def host_and_port(address: str) -> tuple[str, int]:
    """('host', port) of 'HOST:PORT'; ValueError with a sentence when it is not that."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"must be HOST:PORT, for example 127.0.0.1:5557, not '{address}'")
    return host, int(port)


def api_url(base_url: str) -> str:
    """`http://host/v1` from `http://host` or `http://host/v1`. A path is kept, `/v1` appended where it names no version
    (`https://host/v1beta/openai` names one)."""
    base = base_url.rstrip("/")
    return base if _version(base) is not None else base + "/v1"


def root_url(base_url: str) -> str:
    """Where `/health`, `/tokenize` and `/metrics` live: the base URL up to its `/v1`."""
    base = api_url(base_url)
    return "/".join(base.split("/")[:_version(base)])


def _version(base: str) -> int | None:
    """Which part between slashes is the version of the API: the last that looks like one."""
    parts = base.split("/")
    return next((k for k in range(len(parts) - 1, 2, -1) if VERSION.fullmatch(parts[k])), None)
