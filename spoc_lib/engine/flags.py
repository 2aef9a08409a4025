"""The flags that the embedded engine understands, with vLLM's names and defaults on H100/H200."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from spoc_lib.config import read_flags
from spoc_lib.config.flags import unknown_flags
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import Strict

Count = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
#: Stored bits of a key or value by `kv_cache_dtype`; None: the model's own.
KV_BITS = {"auto": None, "bfloat16": 16, "float16": 16, "fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8}


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

    @field_validator("kv_cache_dtype")
    @classmethod
    def _stored(cls, dtype: str) -> str:
        if dtype not in KV_BITS:
            raise ValueError(f"the embedded engine stores keys and values as {', '.join(KV_BITS)} only: use one of "
                             "them, or a real engine")
        return dtype

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


def parse_flags(values: Mapping[str, Any], where: str = "flags") -> EngineFlags:
    """`EngineFlags` from flags in any spelling (`config.read_flags`); InputError naming one that is unknown, faulty or
    not modelled."""
    flags = read_flags(values, where)
    refuse_unmodelled(flags, where)
    return yamlfile.parse(EngineFlags, {name: value for name, value in flags.items() if value is not None}, where)


def refuse_unmodelled(names: Iterable[str], where: str) -> None:
    """InputError for the first of `names` that the embedded engine does not model."""
    for name in names:
        if name not in EngineFlags.model_fields:
            unknown = unknown_flags([name])
            raise InputError("unknown-flag", f"{where}: " + (unknown[0] if unknown else
                             f"the embedded engine does not model '{name}': set it on a real engine, or remove it"))
