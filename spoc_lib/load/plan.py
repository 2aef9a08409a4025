"""What one rung of load is: the whole of it, as JSON, so that a child process and a reader a year later agree."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from spoc_lib.config.access import Access, api_url, server_address
from spoc_lib.core.yamlfile import Positive, PositiveInt, Strict

NotNegative = Annotated[float, Field(ge=0)]

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


class LoadPlan(Access):
    """One rung: who (personas, users, seed, salt) asks whom (endpoint, model) for how long.

    `warmup_s` counts from the end of the ramp and is never part of the steady window. `scale` multiplies the personas'
    token sizes. `cache` says what the rung finds in the server's prefix cache: `salt` (default) relies on another
    `salt` each rung, which changes every text without changing a size; `reset` empties the cache through the
    endpoint first (vLLM in development mode, the embedded engine); `warm` wants what earlier rungs left.
    `tokenizer` says whose tokens the sizes are: `offline` (o200k with this workbench's template), or `target`: text,
    the template's overhead and the context limit are measured through the server's `/tokenize`.
    How the server is reached is `Access`'s.
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
    def _http(cls, value: str, info: ValidationInfo) -> str:
        return server_address(value, info.data.get("api", "chat"))

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


def host_and_port(address: str) -> tuple[str, int]:
    """('host', port) of 'HOST:PORT'; ValueError with a sentence when it is not that."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"must be HOST:PORT, for example 127.0.0.1:5557, not '{address}'")
    return host, int(port)
