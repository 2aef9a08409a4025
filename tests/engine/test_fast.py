"""The fast core decides as the plain one, step by step, on random closed-loop traffic."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core import schemas, tables
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.fast import play as fast
from spoc_lib.engine.flags import EngineFlags
from spoc_lib.engine.runlog import DONE, REFUSED
from spoc_lib.engine.steptime.model import step_time_model
from spoc_lib.engine.virtual import VirtualRun, play
from spoc_lib.workload.script import Segment, Turn

GPU = GpuSpec(name="test-gpu", title="test", source="made up", memory_gib=8, dram_bytes_per_s=1e12,
              bf16_flops_per_s=1e14, link_bytes_per_s=1e11)
EXAMPLES = int(os.environ.get("SPOC_FUZZ", "60"))


def model(window: int | None, sliding_layers: int, max_model_len: int) -> ModelSpec:
    return ModelSpec(name="test-model", source="made up", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16,
                     d_ff=128, vocabulary=512, max_model_len=max_model_len, sliding_window=window,
                     sliding_layers=sliding_layers, weight_gib=0.01)


class RandomUser:
    """Turns of random size over shared roots; some pass the context limit, some restart, some resend nothing."""

    persona = "random"

    def __init__(self, traffic: RandomTraffic, number: int) -> None:
        self.user = number
        self._traffic = traffic
        self._random = random.Random(f"{traffic.seed}/{number}")
        self._conversation = -1
        self._turn = 0
        self._messages = 0

    def _segment(self, layer: str, low: int, high: int) -> Segment:
        return Segment(self._random.getrandbits(60) + 1, self._random.randint(low, high), layer)

    def next(self, history_tokens: int) -> Turn:
        draw, traffic = self._random, self._traffic
        append = self._segment("turn", 1, traffic.append)
        output = draw.randint(1, traffic.output)
        think = draw.choice([0.0, 0.0, draw.random() * traffic.think])
        overhead = traffic.per_message * (self._messages + 2) + traffic.per_prompt
        long = history_tokens + append.tokens + overhead + output > traffic.limit and draw.random() < 0.9
        if self._conversation < 0 or long or draw.random() < 0.1:
            return self._begin(output, think)
        self._turn += 1
        self._messages += 2
        return Turn(self.persona, self.user, self._conversation, self._turn, "agent", False, (append,),
                    history_tokens + append.tokens + overhead, output, think)

    def _begin(self, output: int, think: float) -> Turn:
        draw, traffic = self._random, self._traffic
        self._conversation += 1
        self._turn = 0
        depth = draw.randint(0, len(traffic.roots))
        shared = [Segment(stream, draw.choice([size, draw.randint(1, size)]), layer)
                  for (stream, size), layer in zip(traffic.roots[:depth], ("organisation", "repository"), strict=False)]
        if shared and len(shared) < 2 and draw.random() < 0.5:
            shared[-1] = Segment(shared[-1].stream, traffic.roots[0][1], "organisation")
        own = self._segment("session", 33, 33 + traffic.append)
        history = ()
        append = (*shared, own)
        pairs = 0
        if draw.random() < 0.3:
            history = tuple((segment, 0) for segment in shared) + ((own, draw.randint(1, 20)),)
            append = (self._segment("turn", 1, traffic.append),)
            pairs = 1
        self._messages = (2 if shared else 1) + 2 * pairs
        content = sum(one.tokens + reply for one, reply in history) + sum(one.tokens for one in append)
        return Turn(self.persona, self.user, self._conversation, 0, "start", True, append,
                    content + traffic.per_message * self._messages + traffic.per_prompt, output, think, history)


@dataclasses.dataclass(frozen=True)
class RandomTraffic:
    seed: int
    roots: tuple[tuple[int, int], ...]
    append: int
    output: int
    think: float
    limit: int
    per_message: int
    per_prompt: int
    salt: int = 0

    def user(self, number: int) -> RandomUser:
        return RandomUser(self, number)

    def users(self, count: int) -> Iterator[RandomUser]:
        return (self.user(number) for number in range(count))


@st.composite
def cases(draw) -> tuple[RandomTraffic, EmbeddedEngine, int]:
    block = draw(st.sampled_from([4, 16]))
    window, sliding = draw(st.sampled_from([(None, 0), (24, 1), (33, 1), (129, 1), (32, 2)]))
    limit = draw(st.integers(20, 60)) * block
    users = draw(st.integers(1, 12))
    groups = 2 if sliding == 1 else 1
    batched = draw(st.sampled_from([64, 100, 256]))
    retention = draw(st.sampled_from([0, 0, 0, None, 4 * block]))
    caching = draw(st.sampled_from([True, True, True, False]))
    shape = model(window, sliding, limit)
    flags = EngineFlags(
        max_num_batched_tokens=batched, max_num_seqs=draw(st.sampled_from([2, 4, 64])), block_size=block,
        max_num_active_seqs=draw(st.sampled_from([None, None, 2])),
        enable_prefix_caching=caching, watermark=draw(st.sampled_from([0.0, 0.0, 0.05])),
        scheduler_reserve_full_isl=draw(st.sampled_from([True, True, False])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 30])),
        prefix_cache_retention_interval=retention if sliding else 0,
        long_prefill_token_threshold_adaptive=draw(st.booleans()),
        enable_chunked_prefill=batched < limit or draw(st.booleans()),
        async_scheduling=draw(st.booleans()), max_num_queued_reqs=draw(st.sampled_from([None, None, None, 3])),
        max_num_queued_tokens=draw(st.sampled_from([None, None, None, 200])),
        num_gpu_blocks_override=2 + groups * (limit // block + 2) + draw(st.integers(0, 60)) * draw(st.integers(1, 6)))
    engine = EmbeddedEngine(flags, shape, GPU, 1, flags.num_gpu_blocks_override, step_time_model(shape, GPU, 1))
    traffic = RandomTraffic(
        seed=draw(st.integers(0, 10**6)), roots=((7, draw(st.integers(1, limit // 2))), (9, draw(st.integers(1, 90)))),
        append=draw(st.sampled_from([10, 60, 150])), output=draw(st.sampled_from([3, 40, 120])),
        think=draw(st.sampled_from([0.01, 1.0])), limit=limit, per_message=draw(st.sampled_from([4, 4, 0, 1, 7])),
        per_prompt=draw(st.sampled_from([2, 2, 0])))
    return traffic, engine, users


def assert_equal_runs(fast_run: VirtualRun, plain_run: VirtualRun) -> None:
    mine, measure = fast_run.log, plain_run.log
    for name, column in measure.steps.items():
        np.testing.assert_array_equal(mine.steps[name], column, err_msg=name)
    for name in ("state", "token_request", "token_step"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(measure, name), err_msg=name)
    done = measure.state == DONE
    np.testing.assert_array_equal(mine.cached[done], measure.cached[done])
    np.testing.assert_array_equal(mine.admit_step[done], measure.admit_step[done])
    assert mine.send_s == measure.send_s
    assert mine.turns == measure.turns
    assert {k: v for k, v in mine.refusals.items()} == measure.refusals


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_fast_core_equals_plain_core(case):
    traffic, engine, users = case
    assert fast.supports(engine)
    duration_s = 600 * engine.step_time.seconds(_typical(engine))
    runs = [play(traffic, users, engine=engine, duration_s=duration_s, core=core) for core in ("fast", "plain")]
    assert_equal_runs(*runs)


def _typical(engine: EmbeddedEngine):
    from spoc_lib.engine.batch import Batch

    return Batch(16, 8, 800, 400, 1, 8, 100.0, 100.0, 0, 9)


def spoc_like(seed: int, *, blocks: int, users: int = 8, asynchronous: bool = True,
              **changes) -> tuple[RandomTraffic, EmbeddedEngine, int]:
    shape = model(33, 1, 800)
    flags = EngineFlags(max_num_batched_tokens=256, max_num_seqs=64, num_gpu_blocks_override=blocks,
                        async_scheduling=asynchronous, **changes)
    engine = EmbeddedEngine(flags, shape, GPU, 1, blocks, step_time_model(shape, GPU, 1))
    return RandomTraffic(seed, ((7, 300), (9, 90)), 60, 60, 0.2, 800, 4, 2), engine, users


@pytest.mark.parametrize("asynchronous", [True, False])
def test_traffic_reaches_the_hard_cases(asynchronous):
    """The random traffic is worth something: it preempts, evicts, hits, refuses and fills the queue."""
    preempted = hits = waiting = refused = 0
    for seed in range(4):
        traffic, engine, users = spoc_like(seed, blocks=130, asynchronous=asynchronous)
        runs = [play(traffic, users, engine=engine, duration_s=3, core=core) for core in ("fast", "plain")]
        assert_equal_runs(*runs)
        steps = runs[0].log.steps
        preempted += steps["preempted"].sum()
        hits += steps["prefix_hits"].sum()
        waiting = max(waiting, steps["waiting"].max())
        refused += (runs[0].log.state == REFUSED).sum()
    assert preempted > 3 and hits > 1000 and waiting > 2 and refused > 0


def test_tables_fit_their_schemas_and_the_script():
    traffic, engine, users = spoc_like(3, blocks=300)
    run = play(traffic, users, engine=engine, duration_s=5, warmup_s=1)
    tables.as_table(run.requests, schemas.REQUESTS)
    tables.as_table(run.chunks, schemas.CHUNKS)
    tables.as_table(run.metrics, schemas.METRICS)
    done = run.requests[run.requests["outcome"] == "completed"]
    assert len(done) > 50
    assert (done["prompt_tokens"] == done["intended_prompt_tokens"]).all()
    assert (done["cached_tokens"] < done["prompt_tokens"]).all()
    assert (done["first_token_s"] > done["send_s"]).all() and (done["end_s"] >= done["first_token_s"]).all()
    counted = run.chunks.groupby("request")["tokens"].sum().reindex(done["request"]).to_numpy()
    np.testing.assert_array_equal(counted, done["output_tokens"])
    assert run.window == (1.0, 5.0) and run.core == "fast"


def test_stream_interval_gathers_tokens():
    traffic, engine, users = spoc_like(3, blocks=300, stream_interval=5)
    run = play(traffic, users, engine=engine, duration_s=5)
    done = run.requests[run.requests["outcome"] == "completed"].set_index("request")
    chunks = run.chunks[run.chunks["request"].isin(done.index)]
    expected = 1 + np.ceil((done["output_tokens"] - 1) / 5)
    np.testing.assert_array_equal(chunks.groupby("request").size().reindex(done.index), expected)
    np.testing.assert_array_equal(done["chunks"], expected)
    np.testing.assert_array_equal(chunks.groupby("request")["tokens"].sum().reindex(done.index), done["output_tokens"])
    assert chunks.groupby("request")["tokens"].first().eq(1).all()
    assert chunks["tokens"].max() == 5


def test_same_seed_same_bytes():
    first, second = (play(*spoc_like(5, blocks=200)[::2], engine=spoc_like(5, blocks=200)[1], duration_s=4)
                     for _ in range(2))
    assert first.requests.to_csv() == second.requests.to_csv()
    assert first.chunks.to_numpy().tobytes() == second.chunks.to_numpy().tobytes()
    assert first.steps.to_numpy().tobytes() == second.steps.to_numpy().tobytes()


def test_models_with_more_groups_play_on_the_plain_core():
    shape = model(33, 1, 800).model_copy(update={"layers": 6, "sliding_layers": 4})
    traffic, engine, users = spoc_like(1, blocks=400)
    engine = dataclasses.replace(engine, model=shape, step_time=step_time_model(shape, GPU, 1))
    assert not fast.supports(engine)
    assert play(traffic, users, engine=engine, duration_s=0.5).core == "plain"
