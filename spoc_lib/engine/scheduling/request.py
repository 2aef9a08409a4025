"""A request inside the engine, and what the engine says about it after a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from spoc_lib.core.errors import SpocError
from spoc_lib.engine.scheduling.content import Content

FinishReason = Literal["stop", "length", "abort"]
#: Gives output token number `i` (0 = first).
OutputTokens = Callable[[int], int] | Sequence[int]


class QueueFullError(SpocError):
    """`max_num_queued_reqs` or `max_num_queued_tokens` is reached: HTTP 503."""


class ContextLengthError(SpocError):
    """The prompt leaves no room for an output token within max_model_len: HTTP 400."""


class Status(IntEnum):
    """Where a request stands in the scheduler."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """One request and its scheduling state. Counts are tokens.

    num_tokens: prompt plus output tokens that are known (sampled and delivered);
    num_computed: tokens whose KV is computed, or will be by the steps scheduled so far;
    num_placeholders: output tokens that scheduled steps will sample (asynchronous scheduling);
    num_in_flight: tokens of scheduled steps whose output is not applied yet;
    num_stale: the part of them that was scheduled before the last preemption;
    junction: where the prefix that others cached in the full-attention group ends, fixed at look-up (0 = none);
    num_cached: cached tokens at first admission, None before it;
    stop_at: output tokens after which the model ends its reply by itself (an end token), None: it does not.
    blocks, num_hashed: see `kv_cache`.
    """

    id: str
    content: Content
    num_prompt: int
    max_tokens: int
    output: OutputTokens | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    stop_at: int | None = None
    status: Status = Status.WAITING
    num_tokens: int = 0
    num_computed: int = 0
    num_placeholders: int = 0
    num_in_flight: int = 0
    num_stale: int = 0
    num_preemptions: int = 0
    num_cached: int | None = None
    junction: int = 0
    blocks: list[list] = field(default_factory=list)
    num_hashed: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    def output_token(self, index: int) -> int:
        """The token that sampling number `index` gives (0 where tokens have no meaning)."""
        if self.output is None:
            return 0
        return self.output(index) if callable(self.output) else self.output[index]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one applied step gave one request: new token ids, and the reason when it finished with them.

    num_cached: tokens that the prefix cache gave at first admission (usage.prompt_tokens_details.cached_tokens).
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_prompt: int
    num_output: int
    num_cached: int
