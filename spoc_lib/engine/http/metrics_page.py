"""/metrics of the embedded server: the names, labels, buckets and meanings of vLLM 0.32, for a text model.

Times are the engine's (a token exists at the end of its step), so server-side latency holds no client. Beside
vLLM's own, `spoc:passport_info` says that everything here is simulated and by which calibration, and
`spoc:step_lag_seconds` and `spoc:clock_resets_total` how well the real clock kept up.
"""

from __future__ import annotations

import time
from typing import Any

from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.gpu_counters import NOTHING, Activity, activity
from spoc_lib.engine.http import process_metrics
from spoc_lib.engine.http.prometheus_text import Histogram, Registry
from spoc_lib.engine.http.realtime import Generation, RealtimeEngine, StepObserver
from spoc_lib.engine.scheduling.core import StepResult

REQUEST_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
                 160, 640, 2560)
TOKEN_LATENCY_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PARAMETER_N = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
HTTP_FINE_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
HTTP_COARSE_S = (0.1, 0.5, 1)
STEP_LAG_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
#: Routes that vLLM's HTTP metrics leave out.
UNCOUNTED_ROUTES = {"/metrics", "/health", "/load", "/ping", "/version", "/server_info"}


def token_buckets(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `most` (vLLM: max_model_len)."""
    buckets, decade = [], 1
    while decade <= most:
        buckets += [step * decade for step in (1, 2, 5) if step * decade <= most]
        decade *= 10
    return buckets


class MetricsPage(StepObserver):
    """Hears what the clock does and renders the page. `activity`: what the GPUs did, summed (`gpu_counters`)."""

    def __init__(self, engine: EmbeddedEngine, model_name: str) -> None:
        self.engine = engine
        self.activity = ActivitySum(engine)
        self._registry = Registry()
        self._labels = {"engine": "0", "model_name": model_name}
        self._process = process_metrics.ProcessMetrics(self._registry)
        self._make_engine_state()
        self._make_tokens(model_name)
        self._make_requests(engine.max_model_len)
        self._make_config()
        self._make_http()
        self._make_own()

    # what exists

    def _sample(self, name: str, kind: str, description: str, **labels: str):
        family = self._registry.family(name, kind, description, created=kind == "counter")
        return family.child(**self._labels, **labels)

    def _by(self, name: str, kind: str, description: str, label: str, values: tuple[str, ...]) -> dict:
        family = self._registry.family(name, kind, description, created=kind == "counter")
        return {value: family.child(**self._labels, **{label: value}) for value in values}

    def _histogram(self, name: str, description: str, buckets) -> Histogram:
        return self._registry.family(name, "histogram", description, created=True, buckets=buckets).child(
            **self._labels)

    def _make_engine_state(self) -> None:
        counter, gauge = "counter", "gauge"
        self._flops = self._sample("vllm:estimated_flops_per_gpu_total", counter,
                                   "Estimated floating point operations of one GPU.")
        self._read = self._sample("vllm:estimated_read_bytes_per_gpu_total", counter,
                                  "Estimated bytes that one GPU read from its memory.")
        self._written = self._sample("vllm:estimated_write_bytes_per_gpu_total", counter,
                                     "Estimated bytes that one GPU wrote to its memory.")
        self._running = self._sample("vllm:num_requests_running", gauge, "Requests in the running batch.")
        self._waiting = self._sample("vllm:num_requests_waiting", gauge, "Requests waiting to be scheduled.")
        self._waiting_by = self._by("vllm:num_requests_waiting_by_reason", gauge,
                                    "Waiting requests by reason: capacity or deferred.", "reason",
                                    ("capacity", "deferred"))
        self._by("vllm:engine_sleep_state", gauge, "Sleep state of the engine; awake = 1.", "sleep_state",
                 ("awake", "weights_offloaded", "discard_all"))["awake"].value = 1
        self._usage = self._sample("vllm:kv_cache_usage_perc", gauge, "KV cache usage; 1 means all blocks.")

    def _make_tokens(self, model_name: str) -> None:
        counter = "counter"
        self._queries = self._sample("vllm:prefix_cache_queries_total", counter, "Tokens looked up in the cache.")
        self._hits = self._sample("vllm:prefix_cache_hits_total", counter, "Tokens found in the cache.")
        for cache in ("external_prefix_cache", "mm_cache"):
            for what in ("queries", "hits"):
                self._sample(f"vllm:{cache}_{what}_total", counter, f"{cache} {what}: always 0 here.")
        self._preemptions = self._sample("vllm:num_preemptions_total", counter, "Preemptions.")
        self._prompt = self._sample("vllm:prompt_tokens_total", counter, "Prompt tokens, cached ones included.")
        self._prompt_by = self._by("vllm:prompt_tokens_by_source_total", counter, "Prompt tokens by source.", "source",
                                   ("local_compute", "local_cache_hit", "external_kv_transfer"))
        self._cached = self._sample("vllm:prompt_tokens_cached_total", counter, "Prompt tokens taken from a cache.")
        self._cached_by = self._by("vllm:prompt_tokens_cached_by_source_total", counter,
                                   "Prefix cache hits by tier, counted at admission.", "source",
                                   ("device", "host", "p2p", "disk", "external_unspecified"))
        self._generated = self._sample("vllm:generation_tokens_total", counter, "Tokens generated.")
        self._success = self._by("vllm:request_success_total", counter, "Finished requests by reason.",
                                 "finished_reason", FINISH_REASONS)
        rejections = self._registry.family("vllm:admission_rejections_total", counter,
                                           "Requests refused by a queue limit.", created=True)
        self._rejections = {reason: rejections.child(model_name=model_name, reason=reason)
                            for reason in ("max_num_queued_reqs", "max_num_queued_tokens")}

    def _make_requests(self, max_model_len: int) -> None:
        tokens, histogram = token_buckets(max_model_len), self._histogram
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._request_output = histogram("vllm:request_generation_tokens", "Generated tokens of a request.", tokens)
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens of an engine step.", STEP_TOKENS)
        self._request_longest = histogram("vllm:request_max_num_generation_tokens",
                                          "Generated tokens of a request's longest choice.", tokens)
        self._request_n = histogram("vllm:request_params_n", "The parameter n of a request.", PARAMETER_N)
        self._request_max = histogram("vllm:request_params_max_tokens", "The parameter max_tokens.", tokens)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Time between tokens.", TOKEN_LATENCY_S)
        self._tpot = histogram("vllm:request_time_per_output_token_seconds", "Mean time between a request's tokens.",
                               TOKEN_LATENCY_S)
        phases = (("e2e_request_latency", "Time from arrival to the last token."),
                  ("request_queue_time", "Time in the queue."),
                  ("request_inference_time", "Time from first scheduling to the last token."),
                  ("request_prefill_time", "Time from first scheduling to the first token."),
                  ("request_decode_time", "Time from the first token to the last."))
        self._phases = [histogram(f"vllm:{name}_seconds", text, REQUEST_LATENCY_S) for name, text in phases]
        self._request_preemptions = histogram("vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTIONS)
        self._request_computed = histogram("vllm:request_prefill_kv_computed_tokens",
                                           "Prompt tokens that a request computed, cached ones excluded.", tokens)

    def _make_config(self) -> None:
        flags, blocks = self.engine.flags, self.engine.num_blocks
        none = ("cache_hit_alignment_tokens", "hash_block_size", "kv_cache_layout", "kv_cache_memory_bytes",
                "kv_offloading_size", "mamba_block_size", "mamba_page_size_padded", "mamba_ssm_cache_dtype",
                "num_cpu_blocks", "prefix_match_unit", "skip_page_size_padded")
        no = ("enable_mamba_shared_prefix_checkpoint", "is_attention_free", "kv_sharing_fast_prefill",
              "use_kda_recoverssm", "use_replayssm")
        info = dict.fromkeys(none, "None") | dict.fromkeys(no, "False") | {
            "_block_size_resolved": "True", "block_size": flags.block_size, "cache_dtype": flags.kv_cache_dtype,
            "effective_attention_block_size": flags.block_size, "enable_prefix_caching": flags.enable_prefix_caching,
            "engine": "0", "gpu_memory_utilization": flags.gpu_memory_utilization, "kv_cache_dtype_skip_layers": "[]",
            "kv_cache_max_concurrency": blocks * flags.block_size / self.engine.max_model_len,
            "kv_cache_size_tokens": blocks * flags.block_size, "kv_offloading_backend": "native",
            "mamba_cache_dtype": "auto", "mamba_cache_mode": "none", "num_gpu_blocks": blocks,
            "num_gpu_blocks_override": flags.num_gpu_blocks_override,
            "prefix_cache_retention_interval": flags.prefix_cache_retention_interval,
            "prefix_caching_hash_algo": "sha256", "replayssm_buffer_len": "16",
            "sliding_window": self.engine.model.sliding_window, "swa_bounded_replay": "True",
            "user_specified_block_size": "block_size" in flags.model_fields_set,
        }
        family = self._registry.family("vllm:cache_config_info", "gauge", "The cache's configuration, in labels.")
        family.child(**{name: str(value) for name, value in info.items()}).value = 1

    def _make_http(self) -> None:
        family = self._registry.family
        self._http_requests = family("http_requests_total", "counter", "Requests by method, status and route.",
                                     created=True)
        self._http_in = family("http_request_size_bytes", "summary", "Declared length of requests.", created=True)
        self._http_out = family("http_response_size_bytes", "summary", "Declared length of answers.", created=True)
        self._http_fine = family("http_request_duration_highr_seconds", "histogram", "Duration of all requests.",
                                 created=True, buckets=HTTP_FINE_S).child()
        self._http_coarse = family("http_request_duration_seconds", "histogram", "Duration of requests by route.",
                                   created=True, buckets=HTTP_COARSE_S)

    def _make_own(self) -> None:
        passport = self.engine.passport()
        shown = {name: str(passport.get(name)) for name in ("model", "gpu", "gpu_count", "step_time", "calibration_id")}
        self._registry.family("spoc:passport_info", "gauge", "Every value of this page is simulated by this model."
                              ).child(simulated="true", **shown).value = 1
        self._lag = self._registry.family("spoc:step_lag_seconds", "histogram", "How late steps were delivered.",
                                          buckets=STEP_LAG_S).child()
        self._resets = self._registry.family("spoc:clock_resets_total", "counter",
                                             "Restarts of the clock, each after falling far behind.").child()

    # what happens

    def step(self, result: StepResult, delivered: list[tuple[Generation, int]]) -> None:
        """Count a step and the tokens that it delivered: (generation, new tokens)."""
        now, computed, generated = result.end_s, 0, 0
        gaps: dict[float, int] = {}
        for one, new in delivered:
            generated += new
            if one.first_token_s is None or one.last_token_s is None:
                one.first_token_s = now
                self._ttft.observe(now - one.arrived_s)
                self._prompt.value += one.prompt_tokens
                self._cached.value += one.cached_tokens
                computed += one.prompt_tokens - one.cached_tokens
            else:
                gap = now - one.last_token_s
                gaps[gap] = gaps.get(gap, 0) + 1
            one.last_token_s = now
        for gap, times in gaps.items():
            self._itl.observe(gap, times)
        if result.batch.tokens:
            self._iteration.observe(computed + generated)
        self._generated.value += generated
        self._prompt_by["local_compute"].value += computed
        self._prompt_by["local_cache_hit"].value = self._cached.value
        self.activity.add(result)

    def finished(self, generation: Generation, now: float) -> None:
        """Count a generation that ended at `now`."""
        one = generation
        self._success[one.finish_reason].value += 1
        if one.finish_reason == "abort" or one.first_token_s is None or one.last_token_s is None:
            return
        self._request_prompt.observe(one.prompt_tokens)
        self._request_output.observe(one.tokens)
        self._request_longest.observe(one.tokens)
        self._request_n.observe(one.params_n)
        self._request_max.observe(one.max_tokens)
        self._request_preemptions.observe(one.preemptions)
        self._request_computed.observe(one.prompt_tokens - one.cached_tokens)
        decode = one.last_token_s - one.first_token_s
        self._tpot.observe(decode / (one.tokens - 1) if one.tokens > 1 else 0.0)
        scheduled = one.scheduled_s if one.scheduled_s is not None else one.arrived_s
        for histogram, seconds in zip(self._phases, (
                now - one.arrived_s, max(0.0, scheduled - one.arrived_s), one.last_token_s - scheduled,
                one.first_token_s - scheduled, decode), strict=True):
            histogram.observe(seconds)

    def late(self, seconds: float) -> None:
        """Count how late a step was delivered."""
        self._lag.observe(seconds)

    def rejected(self, reason: str) -> None:
        """The queue limit `reason` (a flag's name) refused a request."""
        self._rejections[reason].value += 1

    def http(self, route: str, method: str, status: int, request_bytes: int, response_bytes: int,
             seconds: float) -> None:
        """An HTTP request was answered."""
        if route in UNCOUNTED_ROUTES:
            return
        self._http_requests.child(handler=route, method=method, status=f"{status // 100}xx").value += 1
        self._http_in.child(handler=route).observe(request_bytes)
        self._http_out.child(handler=route).observe(response_bytes)
        self._http_fine.observe(seconds)
        self._http_coarse.child(handler=route, method=method).observe(seconds)

    # the page

    def totals(self, realtime: RealtimeEngine) -> dict[str, Any]:
        """What was served so far, in plain values."""
        stats = realtime.core.stats()
        return {"requests": {reason: int(one.value) for reason, one in self._success.items()},
                "prompt_tokens": int(self._prompt.value), "cached_tokens": int(self._cached.value),
                "generation_tokens": int(self._generated.value), "preemptions": stats.preemptions,
                "clock_resets": realtime.lag_resets}

    def render(self, realtime: RealtimeEngine) -> bytes:
        """The page as of now."""
        stats = realtime.core.stats()
        self._running.value = stats.running
        self._waiting.value = self._waiting_by["capacity"].value = stats.waiting
        self._usage.value = stats.kv_usage
        self._queries.value, self._hits.value = stats.prefix_queries, stats.prefix_hits
        self._cached_by["device"].value = stats.prefix_hits
        self._preemptions.value = stats.preemptions
        total = self.activity.total
        self._flops.value, self._read.value, self._written.value = (
            float(total.tensor_flops), float(total.read_bytes), float(total.write_bytes))
        self._resets.value = realtime.lag_resets
        self._process.update()
        return self._registry.render()


class ActivitySum:
    """What one GPU did since the start (`total`) and since it was last taken (`take`)."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self.total: Activity = NOTHING
        self._taken: Activity = NOTHING
        self._taken_s = time.monotonic()

    def add(self, result: StepResult) -> None:
        """Count what the GPUs did in a step."""
        if result.batch.tokens:
            engine = self._engine
            components = engine.step_time.components(result.batch)
            self.total = self.total.plus(activity(components, result.batch, engine.model, engine.gpu,
                                                  engine.gpu_count))

    def take(self, now: float) -> tuple[Activity, float, float]:
        """(activity, start, seconds) of the time since the last call."""
        start, before = self._taken_s, self._taken
        self._taken, self._taken_s = self.total, now
        return Activity(*(float(a - b) for a, b in zip(self.total, before, strict=True))), start, now - start
