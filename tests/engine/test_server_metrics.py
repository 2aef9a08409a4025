"""The pages of the embedded server: names, types, labels and buckets of a recorded page, meanings by known answers."""

from __future__ import annotations

import re

import pytest

from spoc_lib.config import load_gpu, load_model
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.flags import EngineFlags
from spoc_lib.engine.gpu_counters import Throttle
from spoc_lib.engine.http.dcgm_page import DcgmPage
from spoc_lib.engine.http.metrics_page import MetricsPage, token_buckets
from spoc_lib.engine.http.prometheus_text import Registry
from spoc_lib.engine.http.realtime import Generation, RealtimeEngine
from spoc_lib.engine.scheduling.core import EngineCore, EngineLoop

SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")


def engine(**flags) -> EmbeddedEngine:
    return EmbeddedEngine.build(EngineFlags(max_num_seqs=64, **flags), load_model("tiny-moe"), load_gpu("h100-sxm"), 1)


class Words:
    def __init__(self, length):
        self.length, self.finish_reason, self.stop_reason = length, "length", None


def parse(page: str) -> tuple[dict[str, str], dict[str, set], dict[str, float]]:
    """({name: type}, {name: label sets}, {sample: value}); label values other than `le` and `reason` are left out."""
    types, labels, values = {}, {}, {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
        elif not line.startswith("#"):
            name, given, value = SAMPLE.match(line).groups()
            pairs = dict(re.findall(r'(\w+)="([^"]*)"', given or ""))
            fixed = {"le", "reason", "source", "finished_reason", "sleep_state", "generation"}
            labels.setdefault(name, set()).add(tuple(sorted(
                (key, text if key in fixed else "") for key, text in pairs.items())))
            values[line.rpartition(" ")[0]] = float(value)
    return types, labels, values


def page_of(page: MetricsPage, realtime: RealtimeEngine) -> str:
    return page.render(realtime).decode()


def run_requests(flags: dict, requests: list[tuple[int, int]]) -> tuple[MetricsPage, RealtimeEngine, list[Generation]]:
    """Steps the core without waiting; requests are (prompt tokens, output tokens), all there at time 0."""
    twin = engine(**flags)
    page = MetricsPage(twin, "tiny")
    realtime = RealtimeEngine(twin, page)
    generations = []
    for number, (prompt, output) in enumerate(requests):
        one = Generation(str(number), None, prompt, Words(output), output, lambda *_: None, 0.0)
        realtime._live[one.id] = one
        realtime.core.add_request(one.id, [number + 1] * prompt, output)
        generations.append(one)
    loop, now = realtime._loop, 0.0
    assert isinstance(loop, EngineLoop) and isinstance(realtime.core, EngineCore)
    while (end := loop.start(now)) is not None:
        now = end
        realtime._deliver(loop.finish())
    return page, realtime, generations


def test_page_has_what_the_recorded_page_has(shared):
    recorded = parse(shared("data/vllm_metrics_0.32.txt").read_text())
    twin = engine()
    page = MetricsPage(twin, "tiny")
    page.http("/v1/chat/completions", "POST", 200, 10, 20, 0.1)
    ours = parse(page_of(page, RealtimeEngine(twin, page)))
    assert [name for name in recorded[0] if name not in ours[0]] == []
    assert {name: ours[0][name] for name in recorded[0]} == recorded[0]
    assert [name for name in ours[0] if not name.startswith("spoc:")] == list(recorded[0])  # and in its order
    for name, sets in recorded[1].items():
        if name.endswith("tokens_bucket"):  # the recording's server had another context: see the next test
            continue
        assert ours[1].get(name) == sets, name


def test_token_buckets_end_at_the_context():
    assert token_buckets(16384) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000]
    assert token_buckets(100) == [1, 2, 5, 10, 20, 50, 100]


def test_counts_have_vllms_meaning():
    page, realtime, generations = run_requests({"enable_prefix_caching": True}, [(40, 5), (7, 1), (300, 20)])
    _, _, values = parse(page_of(page, realtime))

    def value(name, labels='{engine="0",model_name="tiny"}'):
        return values[name + labels]

    assert value("vllm:prompt_tokens_total") == 347
    assert value("vllm:generation_tokens_total") == 26
    computed = value("vllm:prompt_tokens_by_source_total", '{engine="0",model_name="tiny",source="local_compute"}')
    assert computed + value("vllm:prompt_tokens_cached_total") == 347
    assert value("vllm:request_success_total", '{engine="0",finished_reason="length",model_name="tiny"}') == 3
    assert value("vllm:time_to_first_token_seconds_count") == 3
    assert value("vllm:inter_token_latency_seconds_count") == 26 - 3
    assert value("vllm:request_generation_tokens_sum") == 26
    assert value("vllm:iteration_tokens_total_sum") == 347 + 26
    assert value("vllm:num_requests_running") == 0 == value("vllm:kv_cache_usage_perc")
    assert value("vllm:e2e_request_latency_seconds_sum") == pytest.approx(
        sum(one.last_token_s for one in generations))
    decode = value("vllm:request_decode_time_seconds_sum") + value("vllm:request_prefill_time_seconds_sum")
    assert decode == pytest.approx(value("vllm:request_inference_time_seconds_sum"))
    assert value("vllm:request_queue_time_seconds_sum") + decode == pytest.approx(
        value("vllm:e2e_request_latency_seconds_sum"))
    assert value("vllm:estimated_flops_per_gpu_total") > 0


def test_histograms_are_cumulative_and_labels_escaped():
    registry = Registry()
    histogram = registry.family("h", "histogram", "text", buckets=(1, 2.5)).child(a='x"\\\n')
    for seconds in (0.5, 1, 2, 3):
        histogram.observe(seconds)
    lines = registry.render().decode().splitlines()
    assert 'h_bucket{a="x\\"\\\\\\n",le="1.0"} 2.0' in lines
    assert 'h_bucket{a="x\\"\\\\\\n",le="2.5"} 3.0' in lines
    assert 'h_bucket{a="x\\"\\\\\\n",le="+Inf"} 4.0' in lines
    assert 'h_sum{a="x\\"\\\\\\n"} 6.5' in lines


def test_gpu_page_agrees_with_the_steps_and_shows_a_throttled_gpu():
    flags = EngineFlags(tensor_parallel_size=4)
    twin = EmbeddedEngine.build(flags, load_model("gpt-oss-120b"), load_gpu("h100-sxm"), 4)
    page = MetricsPage(twin, "m")
    gpus = DcgmPage(twin, page.activity, Throttle(1, 0.0, 0.7), started_s=0.0)
    core = twin.core()
    core.add_request("a", range(20_000), 50)
    loop, now = EngineLoop(core), 0.0
    while (end := loop.start(now)) is not None:
        now = end
        page.activity.add(loop.finish())
    page.activity._taken_s = 0.0
    gpus.sample(now)
    _, _, values = parse(gpus.render().decode())

    def per_gpu(name):
        return [value for key, value in sorted(values.items()) if key.startswith(name + "{")]

    assert len(per_gpu("DCGM_FI_PROF_SM_ACTIVE")) == 4
    for name in ("SM_ACTIVE", "DRAM_ACTIVE", "PIPE_TENSOR_ACTIVE"):
        assert all(0 < value <= 1 for value in per_gpu(f"DCGM_FI_PROF_{name}"))
    assert sorted(per_gpu("DCGM_FI_DEV_SM_CLOCK")) == pytest.approx([0.7 * 1980, 1980, 1980, 1980])
    assert sorted(per_gpu("DCGM_FI_DEV_THERMAL_VIOLATION")) == pytest.approx([0, 0, 0, now * 1e9])
    clocks = [one for one in values if one.startswith("DCGM_FI_DEV_SM_CLOCK") and values[one] < 1900]
    assert 'gpu="1"' in clocks[0]
    total = sum(per_gpu("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"))
    assert total == pytest.approx(sum(per_gpu("DCGM_FI_DEV_POWER_USAGE")) * now * 1000)
