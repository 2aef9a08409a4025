"""What must hold on any traffic, whoever wrote the rules: tokens, blocks, budgets, time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.engine.flags import EngineFlags, parse_flags
from spoc_lib.engine.memory import block_bytes, kv_windows, layer_groups, num_kv_blocks
from spoc_lib.engine.scheduling.content import Piece, SymbolicContent, TokenContent
from spoc_lib.engine.scheduling.core import EngineCore, EngineLoop
from spoc_lib.engine.scheduling.kv_cache import KVCache
from spoc_lib.engine.scheduling.request import ContextLengthError, QueueFullError, Status
from spoc_lib.engine.steptime.model import step_time_model

GPU = GpuSpec(name="test-gpu", title="test", source="made up", memory_gib=8, dram_bytes_per_s=1e12,
              bf16_flops_per_s=1e14, link_bytes_per_s=1e11)


def model(window: int | None = None, sliding_layers: int = 0, layers: int = 2, **changes) -> ModelSpec:
    return ModelSpec(name="test-model", source="made up", layers=layers, hidden=64, heads=4, kv_heads=2, head_dim=16,
                     d_ff=128, vocabulary=512, max_model_len=640, sliding_window=window,
                     sliding_layers=sliding_layers, weight_gib=0.01).model_copy(update=changes)


def core_of(shape: ModelSpec | None = None, blocks: int = 200, **flags) -> EngineCore:
    shape = shape or model()
    settings_ = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "num_gpu_blocks_override": blocks, **flags}
    return EngineCore(EngineFlags(**settings_), shape, blocks, step_time_model(shape, GPU, 1))


@st.composite
def engines(draw) -> EngineCore:
    window, sliding = draw(st.sampled_from([(None, 0), (40, 1), (33, 2)]))
    groups = 2 if sliding == 1 else 1
    return core_of(
        model(window, sliding), blocks=groups * 44 + draw(st.integers(2, 80)),
        max_num_batched_tokens=draw(st.sampled_from([16, 64, 256])), max_num_seqs=draw(st.sampled_from([1, 4, 16])),
        max_num_active_seqs=draw(st.sampled_from([None, 1])),
        enable_prefix_caching=draw(st.booleans()), watermark=draw(st.sampled_from([0.0, 0.05])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 20])), async_scheduling=draw(st.booleans()),
        scheduler_reserve_full_isl=draw(st.booleans()),
        prefix_cache_retention_interval=draw(st.sampled_from([0, None, 64])) if sliding else 0)


class Watch:
    """Plays random traffic with aborts on a core and checks every step."""

    def __init__(self, core: EngineCore, seed: int) -> None:
        self.core, self.loop, self.random = core, EngineLoop(core), random.Random(seed)
        self.pool = core.scheduler.cache.pool
        self.computed: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.cached: dict[str, int] = {}
        self.requests = {}
        self.aborted: set[str] = set()
        self.finished: set[str] = set()
        self.roots = [[self.random.randrange(99) for _ in range(150)] for _ in range(2)]

    def arrive(self, name: str) -> None:
        draw = self.random
        shared = draw.choice(self.roots)[: draw.randint(0, 150)]
        prompt = shared + [draw.randrange(99) for _ in range(draw.randint(1, 200))]
        self.requests[name] = self.core.add_request(name, prompt, draw.randint(1, 60),
                                                    output=lambda index: 1000 + index)

    def play(self, arrivals: int) -> None:
        now = number = 0
        while number < arrivals or not self.loop.idle:
            while number < arrivals and self.random.random() < 0.3:
                self.arrive(f"r{number}")
                number += 1
            live = [name for name in self.requests if name not in self.finished | self.aborted]
            if live and self.random.random() < 0.03:
                victim = self.random.choice(live)
                assert self.core.abort(victim) and not self.core.abort(victim)
                self.aborted.add(victim)
                assert not self.requests[victim].blocks, "an aborted request's blocks are free at once"
            end = self.loop.start(now)
            self.check_pool()
            if end is None:
                continue
            assert end >= now, "time only goes forward"
            now = end
            self.check_step(self.loop.finish())

    def check_step(self, result) -> None:
        core, output = self.core, result.scheduled
        assert sum(output.scheduled.values()) == result.batch.tokens <= core.flags.max_num_batched_tokens
        assert output.running <= (core.flags.max_num_active_seqs or core.flags.max_num_seqs)
        assert all(tokens > 0 for tokens in output.scheduled.values())
        assert result.batch.decodes + result.batch.prefills == len(output.scheduled)
        assert result.batch.logits == len(output.sampling)
        if result.batch.tokens:
            floor = 2 * core.model.layers * 3 * core.model.hidden * core.model.d_ff * result.batch.tokens
            assert result.end_s - result.start_s > floor / GPU.bf16_flops_per_s, "faster than the roofline"
        for request in output.preempted:
            self.computed[request.id] = 0
        self.cached.update(output.admitted)
        for one in result.outputs:
            self.delivered[one.request_id] += len(one.new_token_ids)
            assert one.num_output == self.delivered[one.request_id]
            if one.finish_reason:
                assert one.finish_reason == "length"
                self.finished.add(one.request_id)
                request = self.requests[one.request_id]
                assert one.num_output == min(request.max_tokens, core.max_model_len - request.num_prompt)
                assert one.num_cached < request.num_prompt
                if not request.num_preemptions:
                    # every token but the last one sampled was computed once or found
                    assert request.num_computed == request.num_tokens - 1 + (request.num_placeholders > 0)

    def check_pool(self) -> None:
        pool = self.pool
        held: Counter[int] = Counter()
        blocks = {}
        for request in self.core.requests.values():
            for group, line in enumerate(request.blocks):
                for index, block in enumerate(line):
                    if block is not None:
                        held[id(block)] += 1
                        blocks[id(block)] = block
                        assert block.group == group
                        if block.key is not None:
                            assert block.key == request.content.key(index), "shared by unequal content"
        assert all(blocks[name].users == count for name, count in held.items()), "users are counted exactly"
        assert len(blocks) + pool.free == pool.size, "blocks are conserved"
        assert all(block.users == 0 and block.key is not None for block in pool.lru)
        indexed = {id(block) for index in pool.index for copies in index.values() for block in copies}
        hashed = {name for name, block in blocks.items() if block.key is not None} | {id(b) for b in pool.lru}
        assert indexed == hashed, "findable are exactly the hashed blocks"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(engines(), st.integers(0, 10**6))
def test_invariants_on_random_traffic(core, seed):
    watch = Watch(core, seed)
    watch.play(25)
    assert watch.finished | watch.aborted == set(watch.requests), "no request starves"
    assert core.scheduler.cache.pool.free == core.scheduler.cache.pool.size, "all blocks come back"
    stats = core.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.generation_tokens == sum(watch.delivered.values())
    assert stats.prefix_hits <= stats.prefix_queries
    assert sum(watch.cached.values()) >= stats.prefix_hits


def run_out(loop: EngineLoop, now: float = 0.0) -> list:
    """All results until the engine is idle."""
    results = []
    while (end := loop.start(now)) is not None:
        now = end
        results.append(loop.finish())
    return results


@pytest.mark.parametrize("asynchronous", [True, False])
def test_computed_plus_cached_is_prompt(asynchronous):
    core = core_of(async_scheduling=asynchronous)
    loop = EngineLoop(core)
    for name in ("first", "second"):
        core.add_request(name, list(range(100)), 4)
        results = run_out(loop)
        computed = sum(result.batch.prefill_tokens for result in results)
        cached = [one.num_cached for result in results for one in result.outputs if one.finish_reason]
        assert computed + cached[0] == 100
    assert cached == [96]  # whole blocks of 16, at least one token left to compute


def test_a_fully_cached_prompt_computes_its_last_block():
    core = core_of()
    loop = EngineLoop(core)
    for _ in range(2):
        core.add_request("same", list(range(96)), 1)
        cached = [one.num_cached for result in run_out(loop) for one in result.outputs]
    assert cached == [80]


def test_queue_limit_and_context_limit_refuse():
    core = core_of(max_num_queued_reqs=2)
    core.add_request("a", [1, 2], 4)
    core.add_request("b", [1, 2], 4)
    with pytest.raises(QueueFullError, match="max_num_queued_reqs is 2"):
        core.add_request("c", [1, 2], 4)
    assert core.abort("a")
    core.add_request("c", [1, 2], 4)
    core = core_of(max_num_queued_tokens=90)
    loop = EngineLoop(core)
    core.add_request("a", [1] * 60, 4)
    core.add_request("b", [2] * 60, 4)
    with pytest.raises(QueueFullError, match="120 tokens wait for their first token, and max_num_queued_tokens is 90"):
        core.add_request("c", [3] * 60, 4)
    while not all(one.num_output for one in core.requests.values()):
        loop.start(0.0)
        loop.finish()
    core.add_request("c", [3] * 60, 4)  # the others decode: they no longer count
    with pytest.raises(ContextLengthError, match="640"):
        core_of().add_request("long", [1] * 640, 1)
    with pytest.raises(ValueError, match="there already"):
        core.add_request("b", [1], 1)


def test_the_context_limit_ends_a_reply():
    core = core_of()
    loop = EngineLoop(core)
    core.add_request("a", [1] * 630, 100)
    outputs = [one for result in run_out(loop) for one in result.outputs]
    assert len(outputs) == 10 and outputs[-1].finish_reason == "length"


def test_stop_tokens_end_a_reply_after_min_tokens():
    core = core_of()
    loop = EngineLoop(core)
    core.add_request("a", [1] * 20, 50, output=[7, 8, 7, 9, 7], min_tokens=2, stop_token_ids=[7])
    outputs = [one for result in run_out(loop) for one in result.outputs]
    assert [one.new_token_ids[0] for one in outputs] == [7, 8, 7]
    assert outputs[-1].finish_reason == "stop"


def test_asynchronous_scheduling_plans_a_step_ahead():
    """A request that comes during a step starts two steps later, not one."""
    starts = {}
    for asynchronous in (True, False):
        core = core_of(async_scheduling=asynchronous)
        loop = EngineLoop(core)
        core.add_request("running", [1] * 20, 50)
        first = loop.start(0.0)
        core.add_request("late", [2] * 20, 2)
        now, steps = first, 0
        while "late" not in loop.finish().scheduled.admitted:
            steps += 1
            now = loop.start(now)
        starts[asynchronous] = steps
    assert starts == {True: 2, False: 1}


def test_reset_of_the_prefix_cache():
    core = core_of()
    loop = EngineLoop(core)
    core.add_request("a", list(range(64)), 30)
    now = loop.start(0.0)
    assert not core.reset_prefix_cache()
    while now is not None:
        loop.finish()
        now = loop.start(now)
    assert core.reset_prefix_cache()
    assert not core.scheduler.cache.pool.index[0]


def test_content_keys_agree_for_equal_tokens_only():
    one, two = TokenContent(range(64), 16), TokenContent([*range(32), 99, *range(33, 64)], 16)
    assert [one.key(i) == two.key(i) for i in range(4)] == [True, True, False, False]
    pieces = [Piece(5, 0, 20), Piece(6, 0, 44)]
    a = SymbolicContent(pieces, 16)
    b = SymbolicContent([Piece(5, 0, 9), Piece(5, 9, 11), Piece(6, 0, 13), Piece(7, 0, 31)], 16)
    assert [a.key(i) == b.key(i) for i in range(4)] == [True, True, False, False]
    c = a.fork()
    c.extend([Piece(8, 0, 16)])
    assert c.key(4) and c.key(3) == a.key(3)
    with pytest.raises(IndexError):
        a.key(4)


def test_retention_keeps_what_the_rule_says():
    """Window 33, block 16: a hit needs two blocks. Interval 0 keeps the two before the prompt's last token."""
    def kept(retention) -> list[bool]:
        cache = KVCache(num_blocks=100, block_size=16, windows=[33], caching=True, max_model_len=640,
                        in_flight_tokens=640, retention=retention)
        core = core_of(model(33, 2))
        request = core.add_request("a", list(range(100)), 1)
        request.status = Status.RUNNING
        assert cache.allocate(request, 100)
        return [block.key is not None for block in request.blocks[0]]

    assert kept(0) == [False] * 4 + [True, True, False]
    assert kept(None) == [True] * 6 + [False]
    assert kept(64) == [False, False, True, True, True, True, False]


def test_memory_and_groups():
    alternating = model(128, 18, layers=36)
    assert layer_groups(alternating) == ([128, 0], 18)
    assert layer_groups(model(128, 30, layers=36)) == ([128] * 5 + [0], 6)
    assert kv_windows(model()) == [0] and kv_windows(model(64, 2)) == [64]
    flags = EngineFlags(max_model_len=640)
    assert block_bytes(flags, alternating, 1) == 2 * 2 * 16 * 16 * 18 * 2
    assert block_bytes(flags, alternating, 2) == block_bytes(flags, alternating, 1) // 2
    assert block_bytes(EngineFlags(kv_cache_dtype="fp8"), alternating, 1) == 2 * 2 * 16 * 16 * 18
    some, more = (num_kv_blocks(EngineFlags(gpu_memory_utilization=u), model(), GPU, 1) for u in (0.6, 0.9))
    assert more > some > 640 // 16
    with pytest.raises(InputError, match="take more than"):
        num_kv_blocks(flags, model(weight_gib=8.0), GPU, 1)
    with pytest.raises(InputError, match="max_model_len needs"):
        num_kv_blocks(EngineFlags(max_num_batched_tokens=1024, gpu_memory_utilization=0.29),
                      model(max_model_len=131072 * 64), GPU, 1)


def test_flags_that_contradict_the_model_are_refused():
    with pytest.raises(InputError, match="max_model_len"):
        core_of(max_model_len=641)
    with pytest.raises(InputError, match=r"exceeds max_model_len \(640\)"):
        core_of(long_prefill_token_threshold=641)
    with pytest.raises(InputError, match=r"max_model_len \(640\), which needs enable_chunked_prefill"):
        core_of(enable_chunked_prefill=False)
    with pytest.raises(InputError, match=r"first come, first served \(fcfs\) only"):
        parse_flags({"scheduling-policy": "priority"})
    with pytest.raises(InputError, match="no sliding-window layers"):
        core_of(prefix_cache_retention_interval=64)
    with pytest.raises(InputError, match="multiple of block_size"):
        core_of(model(40, 1), prefix_cache_retention_interval=40)
