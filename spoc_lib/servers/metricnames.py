"""What servers call the quantities that the workbench reads: vLLM's names of today are the house's own, and the names
that vLLM has had, that pipelines make of them, and that other engines use are read as the same quantities.

Sources: vllm/v1/metrics/loggers.py (0.8 to 0.11), Ray Serve's metrics agent, SGLang's, TGI's, llama.cpp's and
Triton's (TensorRT-LLM) documentation of their metrics pages.
"""

from __future__ import annotations

import re
from functools import cache

#: What a server under test always exports; one that lacks is said.
EXPECTED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
            "vllm:num_preemptions_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total",
            "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
            "vllm:time_to_first_token_seconds_bucket")
#: Ray Serve prefixes `ray_`; remote write and OTLP pipelines turn ':' into '_'.
_VLLM = re.compile(r"(?:ray_)?vllm[:_](.+)")
_FORMERLY = (("gpu_cache_usage_perc", "kv_cache_usage_perc"), ("gpu_prefix_cache_", "prefix_cache_"),
             ("time_per_output_token_seconds", "inter_token_latency_seconds"))
_COUNTERS = frozenset(name[5:-6] for name in EXPECTED if name.endswith("_total"))
#: {prefix of a page: (the engine's name, {its metric without the prefix: vLLM's})}
_OTHERS = {
    "sglang:": ("SGLang", {
        "num_running_reqs": "num_requests_running", "num_queue_reqs": "num_requests_waiting",
        "token_usage": "kv_cache_usage_perc",
        "generation_tokens_total": "generation_tokens_total", "prompt_tokens_total": "prompt_tokens_total",
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds"}),
    "tgi_": ("TGI", {"batch_current_size": "num_requests_running", "queue_size": "num_requests_waiting"}),
    "llamacpp:": ("llama.cpp", {
        "requests_processing": "num_requests_running", "requests_deferred": "num_requests_waiting",
        "kv_cache_usage_ratio": "kv_cache_usage_perc", "prompt_tokens_total": "prompt_tokens_total",
        "tokens_predicted_total": "generation_tokens_total"}),
    "trtllm_": ("TensorRT-LLM", {"kv_cache_utilization": "kv_cache_usage_perc",
                                 "time_to_first_token_seconds": "time_to_first_token_seconds"}),
    "nv_trt_llm_": ("TensorRT-LLM", {}),
}
_PART = re.compile(r"(.*?)(_bucket|_sum|_count)?")
#: What a Prometheus is asked for: every name above, and what the embedded engine says of its own clock.
QUERY = "|".join(("(ray_)?vllm[:_].+", "spoc:(clock_resets|step_lag).+", *(
    f"{prefix}({'|'.join(known)})(_bucket|_sum|_count)?" for prefix, (_, known) in _OTHERS.items() if known)))


@cache
def canonical(metric: str) -> str:
    """The name that vLLM has today for the same quantity, or the name itself: `ray_vllm_gpu_cache_usage_perc` is
    `vllm:kv_cache_usage_perc`."""
    if metric.startswith("vllm:") and not metric.startswith("vllm:gpu_") and "time_per_output" not in metric:
        return metric if metric[5:] not in _COUNTERS else metric + "_total"
    if own := _VLLM.fullmatch(metric):
        name = own[1]
        for before, now in _FORMERLY:
            if name.startswith(before):
                name = now + name[len(before):]
        return f"vllm:{name}" + "_total" * (name in _COUNTERS)
    for prefix, (_, known) in _OTHERS.items():
        if metric.startswith(prefix):
            base, part = _PART.fullmatch(metric.removeprefix(prefix)).groups()  # type: ignore[union-attr]
            return f"vllm:{known[base]}{part or ''}" if base in known else metric
    return metric


def engine_of(metrics: set[str]) -> str | None:
    """Which other engine has a page of these metrics, by their own names; None: vLLM, or unknown."""
    if any(_VLLM.fullmatch(metric) for metric in metrics):
        return None
    return next((name for prefix, (name, _) in _OTHERS.items() if any(one.startswith(prefix) for one in metrics)), None)
