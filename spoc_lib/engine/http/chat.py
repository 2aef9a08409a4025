"""/v1/chat/completions and /v1/completions of the embedded server: from a checked request to its generations."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from spoc_lib.engine.http import checks
from spoc_lib.engine.http import openai_api as api
from spoc_lib.engine.http.answers import Answer
from spoc_lib.engine.http.realtime import Generation, RealtimeEngine
from spoc_lib.engine.http.streams import Collected, Job, Streamed, Style
from spoc_lib.engine.http.text import HashedContent, PromptEncoder, Reply, Words, prompt_identity
from spoc_lib.workload.identity import mix

#: Shorter prompts are encoded on the event loop, longer ones in a thread, so that no stream waits for them.
INLINE_CHARACTERS = 4096


class Generator:
    """Prepares requests and runs them on the engine.

    model: its name on the API; reasoning_tokens: how many first tokens of a chat reply are reasoning;
    rejected: called with the flag's name when a queue limit refuses a request.
    """

    def __init__(self, engine: RealtimeEngine, encoder: PromptEncoder, words: Words, *, model: str,
                 reasoning_tokens: int = 0, rejected: Callable[[str], None] = lambda reason: None) -> None:
        self._engine, self._encoder, self._words = engine, encoder, words
        self._model, self._reasoning_tokens, self._rejected = model, reasoning_tokens, rejected
        self._flags = engine.engine.flags
        self._max_model_len = engine.core.max_model_len
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="encode")

    async def chat(self, http: web.Request, request: api.ChatRequest, arrived: float) -> web.StreamResponse:
        """Answer a chat request that was read at `arrived` (monotonic); ApiError where vLLM refuses it."""
        checks.check_model(request.model, self._model)
        checks.check_output_limit(request.output_limit, self._max_model_len)
        checks.check_messages(request.messages, self._model)
        size = self._flags.block_size if self._flags.enable_prefix_caching else 0
        style = self._style(request, self._reasoning_tokens if request.include_reasoning else 0, size)
        with self._engine.encoding(arrived, _characters(request.messages)):
            prompt = await self.encode_chat(request.messages)
            job, generations = await self._prepare(request, [prompt], arrived, style, chat=True)
            self._submit(generations)
        return await self._finish(http, job, generations)

    async def completion(self, http: web.Request, request: api.CompletionRequest,
                         arrived: float) -> web.StreamResponse:
        """Answer a plain completion request (a text, token ids, or a list of either)."""
        checks.check_model(request.model, self._model)
        checks.check_output_limit(request.output_limit, self._max_model_len)
        prompts = request.prompts
        if not prompts:
            raise api.invalid("You must pass at least one prompt")
        with self._engine.encoding(arrived, sum(len(one) for one in prompts)):
            encoded = [await self.encode_prompt(one) for one in prompts]
            job, generations = await self._prepare(request, encoded, arrived, self._style(request), chat=False)
            self._submit(generations)
        return await self._finish(http, job, generations)

    def warm_up(self) -> None:
        """Go once through what a request needs, without a request."""
        prompt = self._encoder.chat([{"role": "user", "content": "import os\n"}])
        self._plan(api.ChatRequest(messages=[]), prompt, 1, 0)

    def _style(self, request, reasoning_tokens: int = 0, block_size: int | None = None) -> Style:
        return Style(request.include_usage, request.continuous_usage,
                     max(self._flags.stream_interval, request.stream_interval or 1), reasoning_tokens, block_size)

    async def encode_chat(self, messages: list[dict]) -> array:
        """Token ids of a conversation."""
        return await self._off_loop(_characters(messages), self._encoder.chat, messages)

    async def encode_prompt(self, prompt: str | list[int]) -> array:
        """Token ids of a plain prompt."""
        if isinstance(prompt, list):
            ids = checks.token_array(prompt, self._engine.engine.model.vocabulary)
        else:
            ids = await self._off_loop(len(prompt), self._encoder.text, prompt)
        if not ids:
            raise api.invalid("The decoder prompt cannot be empty")
        return ids

    async def _off_loop(self, characters: int, work: Callable, *arguments: object):
        if characters < INLINE_CHARACTERS:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _prepare(self, request, prompts: list[array], arrived: float, style: Style, *,
                       chat: bool) -> tuple[Job, list[Generation]]:
        """The answer's job, and a generation for each choice of each prompt, not yet submitted."""
        answer = Answer(self._model, chat)
        job = Streamed(answer, style) if request.stream else Collected(answer, style)
        generations: list[Generation] = []
        for prompt in prompts:
            budget = checks.output_tokens(request, len(prompt), self._max_model_len)
            for _ in range(request.n or 1):
                generations.append(await self._generation(job, request, prompt, budget, arrived, len(generations)))
        job.expect(generations)
        return job, generations

    async def _finish(self, http: web.Request, job: Job, generations: list[Generation]) -> web.StreamResponse:
        try:
            await job.open(http)
            await job.finished
        finally:  # also when the client has gone: the handler is cancelled then
            for generation in generations:
                self._engine.abort(generation)
        return await job.close()

    async def _generation(self, job: Job, request, prompt: array, budget: int, arrived: float,
                          index: int) -> Generation:
        reply, content = await self._off_loop(4 * (len(prompt) + budget), self._plan, request, prompt, budget,
                                              index)
        return Generation(f"{job.answer.id}-{index}", content, len(prompt), reply, budget,
                          job.receiver(index, reply), arrived, request.n or 1)

    def _plan(self, request, prompt: array, budget: int, index: int) -> tuple[Reply, HashedContent]:
        identity = mix(prompt_identity(prompt), request.seed or 0, index)
        reply = Reply(self._words, identity, limit=budget, minimum=request.min_tokens,
                      ignore_eos=request.ignore_eos, stops=request.stops,
                      include_stop=request.include_stop_str_in_output)
        return reply, HashedContent(prompt, reply.token_ids, self._flags.block_size)

    def _submit(self, generations: list[Generation]) -> None:
        """All choices or none: over a queue limit the whole request is refused with 503."""
        requests, tokens = self._flags.max_num_queued_reqs, self._flags.max_num_queued_tokens
        reason = None
        if requests is not None and self._engine.unfinished + len(generations) > requests:
            reason = "max_num_queued_reqs"
        elif tokens is not None and self._engine.queued_tokens >= tokens:
            reason = "max_num_queued_tokens"
        if reason:
            self._rejected(reason)
            raise api.busy(reason)
        for generation in generations:
            self._engine.submit(generation)


def _characters(messages: list[dict]) -> int:
    return sum(len(one["content"]) for one in messages if isinstance(one.get("content"), str))
