"""The flags that the embedded engine understands, with vLLM's names and defaults on H100/H200."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from spoc_lib.core import yamlfile
from spoc_lib.core.yamlfile import Strict

Count = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class EngineFlags(Strict):
    """vLLM 0.32 engine flags (see `vllm serve --help`). `num_gpu_blocks_override` fixes the pool's size."""

    max_num_batched_tokens: Count = 8192
    max_num_seqs: Count = 1024
    max_num_active_seqs: Count | None = Field(None, description="requests that run at once; default: max_num_seqs")
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.92
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: NonNegative = 0
    long_prefill_token_threshold_adaptive: bool = Field(False, description="the threshold is at least a fair share "
                                                        "of the budget: max_num_batched_tokens / requests")
    scheduling_policy: str = "fcfs"
    enable_prefix_caching: bool = True
    block_size: Count = 16
    max_model_len: Count | None = Field(None, description="default: the model's own")
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.0
    scheduler_reserve_full_isl: bool = True
    prefix_cache_retention_interval: NonNegative | None = 0
    async_scheduling: bool = True
    tensor_parallel_size: Count = 1
    stream_interval: Count = 1
    max_num_queued_reqs: NonNegative | None = Field(None, description="unfinished requests; one more gets a 503")
    max_num_queued_tokens: NonNegative | None = Field(None, description="prompt tokens of requests without a first "
                                                      "token; once there, the next request gets a 503")
    num_gpu_blocks_override: Count | None = None
    kv_cache_dtype: str = "auto"

    @field_validator("scheduling_policy")
    @classmethod
    def _played(cls, policy: str) -> str:
        if policy != "fcfs":
            raise ValueError("the embedded engine serves first come, first served (fcfs) only: leave the flag out")
        return policy

    @model_validator(mode="after")
    def _consistent(self) -> EngineFlags:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): raise the first or lower the second"
            )
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ValueError(f"max_num_active_seqs ({self.max_num_active_seqs}) must not exceed max_num_seqs "
                             f"({self.max_num_seqs}): lower the first or raise the second")
        return self

    @property
    def active_seqs(self) -> int:
        """How many requests may run at once; max_num_seqs also sizes buffers."""
        return self.max_num_active_seqs or self.max_num_seqs


def parse_flags(values: dict[str, Any], where: str = "flags") -> EngineFlags:
    """`EngineFlags` from names with underscores or dashes; InputError naming an unknown or invalid flag."""
    return yamlfile.parse(EngineFlags, {k.lstrip("-").replace("-", "_"): v for k, v in values.items()}, where)
