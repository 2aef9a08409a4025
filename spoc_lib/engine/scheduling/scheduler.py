"""The scheduler of vLLM V1, decision for decision (first-come-first-served).

Rules, each held to recordings of the real engine:

- A step has a budget of `max_num_batched_tokens`. Running requests come first, in order. A request's new tokens are
  its tokens plus those being sampled, minus computed, capped by the long-prefill threshold (only while running plus
  waiting exceed one), by the budget, and by max_model_len - 1 - computed.
  With `adaptive_threshold` the threshold is at least the budget divided by running plus waiting.
- Blocks lack: the last running request is preempted, loses its blocks and its progress and goes to the head of the
  queue; then try again. A request that preempts itself ends the running part.
- Waiting requests are admitted only in a step without preemption, while budget and `max_num_seqs` last. The whole
  prompt (and, after a preemption, its output so far) must fit; the first that does not fit stops the line. Without
  `chunked_prefill` one whose tokens exceed what is left of the budget stops it as well.
- The computed count advances when a chunk is scheduled.
- Asynchronous scheduling plans a step before the previous one's output is known: the token to come is a placeholder.
  A request whose last token is already being sampled is passed over. A preempted request whose old output is still
  to come is passed over (not head of line) until that output is applied; the token counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from spoc_lib.engine.batch import Batch
from spoc_lib.engine.scheduling.kv_cache import KVCache
from spoc_lib.engine.scheduling.request import Request, RequestOutput, Status


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One planned step.

    scheduled: tokens by request, in order of scheduling; `sampling`: those of them that sample a token;
    admitted: first admissions with their cached tokens (not re-admissions after a preemption);
    preempted: requests thrown out in this step; batch: what a step-time model needs to know;
    running, waiting, kv_usage: the state right after scheduling; prefix_queries, prefix_hits: tokens looked up and
    found by the first admissions of this step.
    """

    scheduled: dict[Request, int]
    sampling: list[Request]
    admitted: dict[str, int]
    preempted: list[Request]
    batch: Batch
    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int


@dataclass(slots=True)
class CacheCounters:
    """Running totals, tokens for the prefix cache (as vllm:prefix_cache_queries/hits: first admissions only)."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class Scheduler:
    """Waiting and running requests of one engine over one `KVCache`."""

    def __init__(self, cache: KVCache, *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int,
                 long_prefill_token_threshold: int = 0, adaptive_threshold: bool = False, chunked_prefill: bool = True,
                 reserve_full_isl: bool = True, asynchronous: bool = False,
                 sliding_window: int | None = None) -> None:
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.adaptive_threshold = adaptive_threshold
        self.chunked_prefill = chunked_prefill
        self.reserve_full_isl = reserve_full_isl
        self.asynchronous = asynchronous
        self.sliding_window = sliding_window
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters = CacheCounters()

    def schedule(self) -> SchedulerOutput:
        """Plan the next step and advance the computed counts."""
        scheduled: dict[Request, int] = {}
        admitted: dict[str, int] = {}
        threshold = self._threshold(len(self.running) + len(self.waiting))
        queries, hits = self.counters.prefix_queries, self.counters.prefix_hits
        budget, preempted = self._schedule_running(scheduled, threshold)
        if not preempted:
            self._schedule_waiting(scheduled, admitted, budget, threshold)
        batch, sampling = self._advance(scheduled)
        return SchedulerOutput(scheduled, sampling, admitted, preempted, batch, len(self.running), len(self.waiting),
                               self.cache.usage, self.counters.prefix_queries - queries,
                               self.counters.prefix_hits - hits)

    def _threshold(self, requests: int) -> int:
        """Most tokens of a prompt in this step, 0 for no such limit."""
        threshold = self.long_prefill_token_threshold if requests > 1 else 0
        if threshold and self.adaptive_threshold:
            return max(threshold, self.max_num_batched_tokens // requests)
        return threshold

    def _schedule_running(self, scheduled: dict[Request, int], threshold: int) -> tuple[int, list[Request]]:
        budget = self.max_num_batched_tokens
        preempted: list[Request] = []
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = 0 if self._last_token_is_coming(request) else min(
                self._chunk(request.num_tokens + request.num_placeholders - request.num_computed, threshold),
                budget, self.max_model_len - 1 - request.num_computed)
            if tokens == 0:
                index += 1
                continue
            while not (fits := self.cache.allocate(request, tokens)):
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            if not fits:
                break
            scheduled[request] = tokens
            budget -= tokens
            index += 1
        return budget, preempted

    def _schedule_waiting(self, scheduled: dict[Request, int], admitted: dict[str, int], budget: int,
                          threshold: int) -> None:
        skipped: list[Request] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if request.num_stale:
                skipped.append(self.waiting.popleft())
                continue
            hit = self.cache.look_up(request)
            request.junction = hit.junction
            tokens = self._chunk(request.num_tokens - hit.tokens, threshold)
            if tokens > budget and not self.chunked_prefill:
                break
            tokens = min(tokens, budget)
            if not self.cache.allocate(request, tokens, hit, whole_prompt=self.reserve_full_isl,
                                       watermark=bool(self.running)):
                break
            self.waiting.popleft()
            self.running.append(request)
            self._count_hit(request, hit.tokens)
            if request.num_cached is None:
                request.num_cached = hit.tokens
                admitted[request.id] = hit.tokens
            request.status = Status.RUNNING
            request.num_computed = hit.tokens
            scheduled[request] = tokens
            budget -= tokens
        self.waiting.extendleft(reversed(skipped))

    def _advance(self, scheduled: dict[Request, int]) -> tuple[Batch, list[Request]]:
        """Count the chunks as computed; which requests sample, and the sums of the batch."""
        sampling: list[Request] = []
        decodes = decode_context = decode_window = 0
        prefills = prefill_tokens = prefill_context = 0
        pairs = window_pairs = 0.0
        window = self.sliding_window or self.max_model_len
        for request, tokens in scheduled.items():
            before = request.num_computed
            if tokens == 1 and before >= request.num_prompt:
                decodes += 1
                decode_context += before + 1
                decode_window += min(before + 1, window)
            else:
                prefills += 1
                prefill_tokens += tokens
                prefill_context += before
                pairs += tokens * (before + (tokens + 1) / 2)
                window_pairs += _window_pairs(before, tokens, window)
            request.num_computed = before + tokens
            request.num_in_flight += tokens
            if request.num_computed >= request.num_tokens + request.num_placeholders:
                sampling.append(request)
                if self.asynchronous:
                    request.num_placeholders += 1
        batch = Batch(prefill_tokens + decodes, decodes, decode_context, decode_window, prefills, prefill_tokens,
                      pairs, window_pairs, prefill_context, len(sampling))
        return batch, sampling

    def _chunk(self, tokens: int, threshold: int) -> int:
        return min(tokens, threshold) if threshold else tokens

    def _last_token_is_coming(self, request: Request) -> bool:
        return (request.num_placeholders > 0 and request.num_computed + 2 - request.num_placeholders
                >= request.num_prompt + request.max_tokens)

    def _preempt(self, request: Request) -> None:
        self.cache.free(request)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        request.num_stale = request.num_in_flight
        request.num_placeholders = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(request)

    def _count_hit(self, request: Request, tokens: int) -> None:
        if self.cache.pool.caching and request.num_preemptions == 0:
            self.counters.prefix_queries += request.num_tokens
            self.counters.prefix_hits += tokens

    # the output of a step

    def update(self, output: SchedulerOutput) -> list[RequestOutput]:
        """Apply the output of a planned step: one token for each request that sampled."""
        outputs: list[RequestOutput] = []
        sampling = set(output.sampling)
        gone: set[Request] = set()
        for request, tokens in output.scheduled.items():
            stale = request.num_stale > 0
            request.num_in_flight -= tokens
            if stale:
                request.num_stale -= tokens
            if request.status == Status.FINISHED or request not in sampling:
                continue
            outputs.append(self._deliver(request, stale))
            if request.status == Status.FINISHED:
                gone.add(request)
        self._remove(gone)
        return outputs

    def _deliver(self, request: Request, stale: bool) -> RequestOutput:
        token = request.output_token(request.num_output)
        request.content.append(token)
        request.num_tokens += 1
        status = request.status
        self._check_stop(request, token)
        if self.asynchronous and not stale:
            request.num_placeholders -= 1
        if self.asynchronous and status == Status.RUNNING:
            self.cache.publish(request, request.num_computed - request.num_placeholders)
        if request.status == Status.FINISHED:
            self.cache.free(request)
        return RequestOutput(request.id, (token,), request.finish_reason, request.num_prompt, request.num_output,
                             request.num_cached or 0)

    def _check_stop(self, request: Request, token: int) -> None:
        stops = token in request.stop_token_ids or request.num_output == request.stop_at
        if stops and request.num_output > request.min_tokens:
            request.finish_reason = "stop"
        elif request.num_tokens >= self.max_model_len or request.num_output >= request.max_tokens:
            request.finish_reason = "length"
        else:
            return
        request.status = Status.FINISHED

    def _remove(self, gone: set[Request]) -> None:
        if gone:
            self.running = [request for request in self.running if request not in gone]
            self.waiting = deque(request for request in self.waiting if request not in gone)

    def finish(self, requests: Iterable[Request]) -> None:
        """Abort: out of the queues at once, blocks freed; steps in flight drop their tokens."""
        gone = [request for request in requests if request.status != Status.FINISHED]
        self._remove(set(gone))
        for request in gone:
            request.status = Status.FINISHED
            request.finish_reason = "abort"
            self.cache.free(request)


def _window_pairs(before: int, tokens: int, window: int) -> float:
    """Sum over the new positions p = before + 1 … before + tokens of min(p, window)."""
    growing = max(0, min(before + tokens, window) - before)
    return growing * (before + (growing + 1) / 2) + (tokens - growing) * window
