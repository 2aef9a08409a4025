"""The real clock: drives `EngineCore` so that steps end when the step-time model says, not when Python is ready.

Deadlines are absolute. A step that begins at the end of the one before it ends at that end plus its modelled
duration, however late the loop woke up, so lateness never adds up; it only shows in when a token is written,
and the observer hears of it. Where the machine falls behind by more than `LAG_LIMIT_S` (suspended, overloaded), the
clock restarts from now and `lag_resets` counts it: figures of such a run are not the engine's.

A request reaches the scheduler when the modelled front end is done with it (`StepTimeModel.frontend_seconds`: HTTP,
tokenizer, queues between processes), which hides the time that this server's own front end takes, and a step holds
the requests that were due when it began. Both are as on the virtual clock, so that the two agree. Where encoding a
prompt takes longer than the model says, the next step is planned when the prompt is there, at most `HOLD_LIMIT_S`
late, and still ends at its deadline: other streams see one token late, not another schedule.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from spoc_lib.engine.batch import Batch, StepTime
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.gpu_counters import Throttle
from spoc_lib.engine.http.marks import mark, profiled
from spoc_lib.engine.http.text import HashedContent, Reply
from spoc_lib.engine.http.timer import Timer
from spoc_lib.engine.kerneltrace import step_text
from spoc_lib.engine.scheduling.core import EngineCore, EngineLoop, StepResult

LAG_LIMIT_S = 1.0
HOLD_LIMIT_S = 0.25
#: Only to foresee when a prompt in encoding is due; real code has about four characters a token.
CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class Generation:
    """One choice on its way through the engine. Times: seconds, CLOCK_MONOTONIC; None until it happened.

    deliver(tokens, finish_reason): called at each of its steps with the output tokens so far.
    """

    id: str
    content: HashedContent
    prompt_tokens: int
    reply: Reply
    max_tokens: int
    deliver: Callable[[int, str | None], None]
    arrived_s: float
    params_n: int = 1
    tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: str | None = None


class StepObserver:
    """Hears what the clock does; the metrics pages derive from it. All methods may be overridden."""

    def step(self, result: StepResult, delivered: list[tuple[Generation, int]]) -> None:
        """A step ended; `delivered`: each generation that got tokens in it, and how many."""

    def finished(self, generation: Generation, now: float) -> None:
        """A generation finished (finish_reason stop | length) or was aborted (abort)."""

    def late(self, seconds: float) -> None:
        """How long after its end a step is delivered."""


@dataclass(slots=True)
class _Throttled:
    """A step-time model with one GPU that slows down at a moment of this server's life."""

    model: StepTime
    throttle: Throttle
    started_s: float

    def seconds(self, batch: Batch) -> float:
        extra = self.throttle.extra_s(self.model.components(batch), time.monotonic() - self.started_s)
        return self.model.seconds(batch) + float(extra)

    def components(self, batch: Batch) -> dict[str, float]:
        return self.model.components(batch)

    def components_of(self, batches: Batch) -> dict[str, np.ndarray]:
        return self.model.components_of(batches)

    def passport(self) -> dict:
        return self.model.passport()


@dataclass(slots=True)
class RealtimeEngine:
    """`EngineCore` on the real clock, for one event loop.

    `submit` and `abort` may be called at any moment from the loop's thread; `run` is the task that steps.
    """

    engine: EmbeddedEngine
    observer: StepObserver = field(default_factory=StepObserver)
    throttle: Throttle | None = None
    started_s: float = field(default_factory=time.monotonic)
    lag_resets: int = 0
    core: EngineCore = field(init=False)
    _loop: EngineLoop = field(init=False)
    _live: dict[str, Generation] = field(init=False, default_factory=dict)
    _due: list[tuple[float, int, Generation]] = field(init=False, default_factory=list)
    _order: int = field(init=False, default=0)
    _encoding: dict[int, float] = field(init=False, default_factory=dict)
    _sleeper: Timer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        step_time: StepTime = self.engine.step_time
        if self.throttle:
            step_time = _Throttled(step_time, self.throttle, self.started_s)
        self.core = EngineCore(self.engine.flags, self.engine.model, self.engine.num_blocks, step_time)
        self._loop = EngineLoop(self.core)

    @property
    def unfinished(self) -> int:
        """Generations that have not ended."""
        return len(self._live)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the generations that wait for their first token (see `EngineCore.check_admission`)."""
        return sum(one.prompt_tokens for one in self._live.values() if not one.tokens)

    def submit(self, generation: Generation) -> None:
        """Hand it to the scheduler when its front end is over; at once where that has passed. The caller has checked
        lengths and the queue limit."""
        due = generation.arrived_s + self._frontend(generation.prompt_tokens)
        self._order += 1
        heapq.heappush(self._due, (due, self._order, generation))
        self._live[generation.id] = generation
        if self._sleeper:
            self._sleeper.wake()

    @contextmanager
    def encoding(self, arrived_s: float, characters: int) -> Iterator[None]:
        """While the block runs, a prompt of `characters` characters is being encoded that will be submitted."""
        self._order += 1
        number = self._order
        self._encoding[number] = arrived_s + self._frontend(characters // CHARACTERS_PER_TOKEN)
        try:
            yield
        finally:
            del self._encoding[number]
            if self._sleeper:
                self._sleeper.wake()

    def _frontend(self, prompt_tokens: int) -> float:
        model = getattr(self.engine.step_time, "frontend_seconds", None)
        return model(prompt_tokens) if model else 0.0

    def _admit(self, now: float) -> None:
        """Put what is due into the scheduler's queue."""
        while self._due and self._due[0][0] <= now:
            generation = heapq.heappop(self._due)[2]
            if generation.id in self._live:
                self.core.add_request(generation.id, generation.content, generation.reply.length,
                                      num_prompt=generation.prompt_tokens, checked=True)

    def abort(self, generation: Generation) -> None:
        """Drop it and free its blocks at once; nothing happens when it has finished."""
        if self._live.pop(generation.id, None) is not None:
            self.core.abort(generation.id)
            generation.finish_reason = "abort"
            self.observer.finished(generation, time.monotonic())
            if self._sleeper:
                self._sleeper.wake()

    async def run(self) -> None:
        """Step for ever. Where a profiler listens, each step is an NVTX range, as in a trace of the twin."""
        marked, number = profiled(), 0
        with Timer() as timer:
            begin = time.monotonic()
            while True:
                if self._encoding and self.core.has_requests:
                    await self._hold(timer, begin)
                self._admit(begin)
                end = self._loop.start(begin)
                if end is None:
                    begin = await self._idle(timer, begin)
                    continue
                if marked:
                    with mark(step_text(number, self._loop.batch)):
                        await timer.until(end)
                else:
                    await timer.until(end)
                number += 1
                begin = self._keep_time(end)
                self._deliver(self._loop.finish())

    async def _hold(self, timer: Timer, begin: float) -> None:
        """Wait for prompts that should have been encoded by `begin`."""
        limit = begin + HOLD_LIMIT_S
        self._sleeper = timer
        while self._encoding and min(self._encoding.values()) <= begin and time.monotonic() < limit:
            await timer.until(limit)
        self._sleeper = None

    async def _idle(self, timer: Timer, begin: float) -> float:
        """Wait until a request is due, or one goes away; the moment from which on to schedule, not before `begin`.
        A request that its own encoding made late starts when it was due, as if the encoding had kept to the model."""
        self._sleeper = timer
        while not self._due or self._due[0][0] > time.monotonic():
            await timer.until(self._due[0][0] if self._due else None)
            if self.core.has_requests:  # the one that was in the way may have been aborted
                break
        self._sleeper = None
        due = self._due[0][0] if self._due else time.monotonic()
        return max(begin, min(due, time.monotonic()), time.monotonic() - LAG_LIMIT_S)

    def _keep_time(self, end: float) -> float:
        """When the next step begins: at `end`, unless the machine has fallen far behind."""
        lag_s = time.monotonic() - end
        self.observer.late(lag_s)
        if lag_s < LAG_LIMIT_S:
            return end
        self.lag_resets += 1
        return end + lag_s

    def _deliver(self, result: StepResult) -> None:
        for request_id in result.scheduled.admitted:
            if (generation := self._live.get(request_id)) is not None:
                generation.scheduled_s = result.start_s
        for request in result.scheduled.preempted:
            if (generation := self._live.get(request.id)) is not None:
                generation.preemptions += 1
        delivered = []
        done = []
        # first tokens first: they would wait for a write to every stream that is older
        for output in sorted(result.outputs, key=lambda one: one.num_output > len(one.new_token_ids)):
            generation = self._live.get(output.request_id)
            if generation is None:
                continue
            new = output.num_output - generation.tokens
            generation.tokens = output.num_output
            if output.finish_reason:
                # the core only counts; why a reply of this length ends is the reply's own knowledge
                complete = output.num_output == generation.reply.length
                generation.finish_reason = generation.reply.finish_reason if complete else "length"
                del self._live[output.request_id]
                done.append(generation)
            if generation.first_token_s is None:
                generation.cached_tokens = output.num_cached
            generation.deliver(output.num_output, generation.finish_reason)
            delivered.append((generation, new))
        self.observer.step(result, delivered)
        for generation in done:
            self.observer.finished(generation, result.end_s)
