"""The engine's core: scheduler, KV cache and step time as one object, for any clock.

A driver (the HTTP server on real time, the virtual clock, a replay) uses it like this:

    core = EngineCore(flags, model, num_blocks, step_time)
    loop = EngineLoop(core)
    core.add_request("r1", prompt_token_ids, max_tokens=100)      # at any time
    core.abort("r1")                                              # at any time; blocks are free at once
    while (end := loop.start(now)) is not None:                   # None: idle, wait for an arrival
        ...wait until `end`; requests may come and go meanwhile...
        for output in loop.finish().outputs:                      # tokens become visible at `end`
            ...

`EngineLoop` keeps vLLM's order of events: with asynchronous scheduling the next step is planned at the moment the
current one starts, so a request that arrives during a step waits for the end of the step after it. `core.schedule()`
and `core.update(output)` are there for a driver that keeps that order itself.

`Request.output` gives the sampled tokens: a sequence or a function of the index; without one they are all 0.
Nothing here knows HTTP, threads or time; one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spoc_lib.config import ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch, StepTime
from spoc_lib.engine.flags import EngineFlags
from spoc_lib.engine.memory import kv_windows
from spoc_lib.engine.scheduling.content import Content, TokenContent
from spoc_lib.engine.scheduling.kv_cache import KVCache
from spoc_lib.engine.scheduling.request import (
    ContextLengthError,
    OutputTokens,
    QueueFullError,
    Request,
    RequestOutput,
)
from spoc_lib.engine.scheduling.scheduler import Scheduler, SchedulerOutput


@dataclass(frozen=True, slots=True)
class CoreStats:
    """What telemetry reads. Counters run from the start; the first three are gauges.

    running, waiting: requests (vllm:num_requests_running/waiting); kv_usage: ratio (vllm:kv_cache_usage_perc);
    prefix_queries, prefix_hits: tokens (vllm:prefix_cache_queries/hits_total); preemptions
    (vllm:num_preemptions_total); prompt_tokens: prompt tokens of requests that got their first token
    (vllm:prompt_tokens_total); generation_tokens (vllm:generation_tokens_total).
    """

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int


class EngineCore:
    """The plain, exact core: every decision as vLLM V1 takes it (see `scheduler` and `kv_cache`).

    num_blocks: blocks of the KV pool, the null block included (`memory.num_kv_blocks`).
    InputError when flags do not fit the model or the pool cannot hold one request of max_model_len.
    """

    def __init__(self, flags: EngineFlags, model: ModelSpec, num_blocks: int,
                 step_time: StepTime | None = None) -> None:
        self.flags = flags
        self.model = model
        self.num_blocks = num_blocks
        self.step_time = step_time
        self.max_model_len = max_model_len(flags, model)
        self.concurrent_batches = 2 if flags.async_scheduling else 1
        check_retention(flags, model)
        cache = KVCache(
            num_blocks=num_blocks, block_size=flags.block_size, windows=kv_windows(model),
            caching=flags.enable_prefix_caching, max_model_len=self.max_model_len,
            in_flight_tokens=flags.max_num_batched_tokens * self.concurrent_batches,
            watermark=flags.watermark, retention=flags.prefix_cache_retention_interval)
        self.scheduler = Scheduler(
            cache, max_num_batched_tokens=flags.max_num_batched_tokens, max_num_seqs=flags.active_seqs,
            max_model_len=self.max_model_len,
            long_prefill_token_threshold=flags.long_prefill_token_threshold,
            adaptive_threshold=flags.long_prefill_token_threshold_adaptive,
            chunked_prefill=flags.enable_chunked_prefill, reserve_full_isl=flags.scheduler_reserve_full_isl,
            asynchronous=flags.async_scheduling, sliding_window=model.sliding_window)
        self.requests: dict[str, Request] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0

    # requests

    def add_request(self, request_id: str, prompt: Sequence[int] | Content, max_tokens: int, *,
                    num_prompt: int | None = None, output: OutputTokens | None = None, min_tokens: int = 0,
                    stop_token_ids: Iterable[int] = (), stop_at: int | None = None,
                    checked: bool = False) -> Request:
        """Queue a request.

        prompt: token ids, or a `Content` together with `num_prompt`, its length in tokens;
        max_tokens: output tokens; the context limit may end it earlier (finish_reason "length" both times);
        output: the tokens that sampling will give; stop_token_ids, or the stop_at-th token, end it with "stop" after
        min_tokens; checked: the caller has asked `check_admission` itself, when the request arrived.
        Raises QueueFullError (HTTP 503), ContextLengthError (HTTP 400), ValueError for a repeated id.
        """
        if request_id in self.requests:
            raise ValueError(f"request {request_id} is there already")
        content: Content
        if isinstance(prompt, Sequence):
            num_prompt, content = len(prompt), TokenContent(prompt, self.flags.block_size)
        elif num_prompt is not None:
            content = prompt
        else:
            raise ValueError("a prompt that is no sequence of token ids needs num_prompt, its length in tokens")
        if num_prompt < 1 or max_tokens < 1:
            raise ValueError("a request needs at least one prompt token and one output token")
        if not checked:
            self.check_admission(num_prompt)
        request = Request(request_id, content, num_prompt, max_tokens, output, min_tokens,
                          frozenset(stop_token_ids), stop_at)
        self.requests[request_id] = request
        self.scheduler.waiting.append(request)
        return request

    def check_admission(self, num_prompt: int) -> None:
        """Refuse what the API server refuses: a full queue, a prompt that fills the context.

        max_num_queued_tokens counts the whole prompts of the requests that wait for their first token, as vLLM does:
        its API server does not hear how far a prefill has come.
        """
        limit = self.flags.max_num_queued_reqs
        if limit is not None and len(self.requests) + 1 > limit:
            raise QueueFullError("queue-full", f"{len(self.requests)} requests are unfinished, and "
                                 f"max_num_queued_reqs is {limit}: try again later")
        limit = self.flags.max_num_queued_tokens
        if limit is not None:
            queued = sum(one.num_prompt for one in self.requests.values() if not one.num_output)
            if queued >= limit:
                raise QueueFullError("queue-tokens-full", f"prompts of {queued} tokens wait for their first "
                                     f"token, and max_num_queued_tokens is {limit}: try again later")
        if num_prompt >= self.max_model_len:
            raise ContextLengthError("context-length", f"the prompt has {num_prompt} tokens, and max_model_len is "
                                     f"{self.max_model_len}: shorten the prompt")

    def abort(self, request_id: str) -> bool:
        """Drop a request at once and free its blocks; False when it is not there (any more)."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        self.scheduler.finish([request])
        return True

    @property
    def has_requests(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # steps

    def schedule(self) -> SchedulerOutput:
        """Plan one step; it may be empty (`output.batch.tokens == 0`)."""
        return self.scheduler.schedule()

    def update(self, output: SchedulerOutput) -> list[RequestOutput]:
        """Apply the output of a planned step, oldest first: new tokens and finishes."""
        outputs = self.scheduler.update(output)
        for result in outputs:
            self._generation_tokens += len(result.new_token_ids)
            if result.num_output == len(result.new_token_ids):
                self._prompt_tokens += result.num_prompt
            if result.finish_reason:
                self.requests.pop(result.request_id, None)
        return outputs

    def seconds(self, batch: Batch) -> float:
        """Duration of a step, 0 for an empty one. ValueError without a step-time model."""
        if batch.tokens == 0:
            return 0.0
        if self.step_time is None:
            raise ValueError("this core was made without a step-time model")
        return self.step_time.seconds(batch)

    def reset_prefix_cache(self) -> bool:
        """Forget the prefix cache; False while blocks are in use."""
        return self.scheduler.cache.pool.reset()

    def stats(self) -> CoreStats:
        """Queues, KV usage and counters as they stand."""
        counters = self.scheduler.counters
        return CoreStats(len(self.scheduler.running), len(self.scheduler.waiting), self.scheduler.cache.usage,
                         counters.prefix_queries, counters.prefix_hits, counters.preemptions,
                         self._prompt_tokens, self._generation_tokens)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that ended: when it ran (seconds on the driver's clock), what it computed, what it gave."""

    start_s: float
    end_s: float
    batch: Batch
    outputs: list[RequestOutput]
    scheduled: SchedulerOutput


@dataclass(slots=True)
class _Planned:
    output: SchedulerOutput
    start_s: float | None = None
    end_s: float | None = None


class EngineLoop:
    """vLLM's step loop: up to two steps planned under asynchronous scheduling, one without."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._planned: deque[_Planned] = deque()

    @property
    def idle(self) -> bool:
        """Whether nothing is planned and no request is there."""
        return not self._planned and not self.core.has_requests

    @property
    def batch(self) -> Batch:
        """What the step that `start` began computes."""
        return self._planned[0].output.batch

    def start(self, now: float) -> float | None:
        """Plan as far ahead as the engine does and begin the oldest planned step.

        Returns when that step ends, or None when there is nothing to do until the next arrival or abort.
        """
        core = self.core
        while len(self._planned) < core.concurrent_batches and core.has_requests:
            output = core.schedule()
            if output.batch.tokens == 0 and not self._planned:
                return None
            self._planned.append(_Planned(output))
        if not self._planned:
            return None
        head = self._planned[0]
        if head.end_s is None:
            head.start_s = now
            head.end_s = now + core.seconds(head.output.batch)
        return head.end_s

    def finish(self) -> StepResult:
        """End the step that `start` began: its tokens are visible at `end_s`."""
        head = self._planned.popleft()
        if head.start_s is None or head.end_s is None:
            raise RuntimeError("finish() without start()")
        outputs = self.core.update(head.output)
        return StepResult(head.start_s, head.end_s, head.output.batch, outputs, head.output)


def max_model_len(flags: EngineFlags, model: ModelSpec) -> int:
    """The context limit in force; InputError when the flag exceeds the model's own, or other flags contradict it."""
    if flags.max_model_len is not None and flags.max_model_len > model.max_model_len:
        raise InputError("bad-field", f"flags: field 'max_model_len': {flags.max_model_len} exceeds the "
                         f"{model.max_model_len} tokens of {model.name}")
    limit = flags.max_model_len or model.max_model_len
    if flags.long_prefill_token_threshold > limit:
        raise InputError("bad-field", "flags: field 'long_prefill_token_threshold': "
                         f"{flags.long_prefill_token_threshold} exceeds max_model_len ({limit}); lower it, 0 is none")
    if not flags.enable_chunked_prefill and flags.max_num_batched_tokens < limit:
        raise InputError("bad-field", f"flags: field 'max_num_batched_tokens': {flags.max_num_batched_tokens} is below "
                         f"max_model_len ({limit}), which needs enable_chunked_prefill; raise it or turn that on")
    return limit


def check_retention(flags: EngineFlags, model: ModelSpec) -> None:
    """vLLM's rule: a positive interval needs a sliding-window group and whole blocks."""
    interval = flags.prefix_cache_retention_interval
    if not interval:
        return
    if not any(kv_windows(model)):
        raise InputError("bad-field", "flags: field 'prefix_cache_retention_interval': it has no effect on "
                         f"{model.name}, which has no sliding-window layers; leave it at 0")
    if interval % flags.block_size:
        raise InputError("bad-field", f"flags: field 'prefix_cache_retention_interval': {interval} must be a "
                         f"multiple of block_size ({flags.block_size})")
