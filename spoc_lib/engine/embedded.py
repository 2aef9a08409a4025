"""The embedded engine of a cluster file: flags, model, GPUs, pool and step time in one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spoc_lib.config import Cluster, GpuSpec, ModelSpec, load_gpu, load_model, read_flags
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import StepTime
from spoc_lib.engine.flags import EngineFlags, parse_flags
from spoc_lib.engine.memory import kv_bits, num_kv_blocks
from spoc_lib.engine.scheduling.core import EngineCore, check_retention, max_model_len
from spoc_lib.engine.steptime import passport
from spoc_lib.engine.steptime.model import step_time_model


@dataclass(frozen=True)
class EmbeddedEngine:
    """Everything that a run of the twin needs, for both clocks."""

    flags: EngineFlags
    model: ModelSpec
    gpu: GpuSpec
    gpu_count: int
    num_blocks: int
    step_time: StepTime

    @classmethod
    def from_cluster(cls, cluster: Cluster, overrides: Mapping[str, Any] | None = None) -> EmbeddedEngine:
        """The twin of `cluster`, its flags overridden by name (dashes or underscores).

        Any kind of cluster has a twin: a real server's is the prediction to hold beside it. InputError for unknown
        or contradictory flags, or a model that does not fit.
        """
        where = f"flags of {cluster.name}"
        named = {"tensor_parallel_size": cluster.hardware.count, **read_flags(cluster.flags, where),
                 **read_flags(overrides or {}, where)}
        flags = parse_flags(named, where)
        return cls.build(flags, load_model(cluster.model), load_gpu(cluster.hardware.gpu), cluster.hardware.count)

    @classmethod
    def build(cls, flags: EngineFlags, model: ModelSpec, gpu: GpuSpec, gpu_count: int) -> EmbeddedEngine:
        """The twin of one replica on `gpu_count` GPUs under tensor parallelism."""
        if flags.tensor_parallel_size > gpu_count:
            raise InputError("bad-field", f"flags: field 'tensor_parallel_size': {flags.tensor_parallel_size} GPUs "
                             f"wanted, the cluster has {gpu_count}")
        max_model_len(flags, model)
        check_retention(flags, model)
        used = flags.tensor_parallel_size
        model = model.model_copy(update={"kv_bits": kv_bits(flags, model)})  # attention reads what the cache stores
        return cls(flags, model, gpu, used, num_kv_blocks(flags, model, gpu, used),
                   step_time_model(model, gpu, used))

    @property
    def max_model_len(self) -> int:
        """Longest context of a request, tokens."""
        return max_model_len(self.flags, self.model)

    def core(self) -> EngineCore:
        """A fresh core: empty queues, empty cache."""
        return EngineCore(self.flags, self.model, self.num_blocks, self.step_time)

    def passport(self) -> dict[str, Any]:
        """Where the twin's numbers come from and how far to trust them (the step-time model's passport)."""
        return {"simulated": True, **self.step_time.passport()}

    def outside(self, *, strict: bool = False, **asked: float | None) -> list[str]:
        """Sentences on where this engine, or what is `asked` of it, leaves the measured range (`passport.outside`).

        With `strict` the first is raised as InputError. A step time without a range to judge by says nothing.
        """
        issued = self.passport()
        if "range" not in issued:
            return []
        return passport.outside(issued, batched_tokens=float(self.flags.max_num_batched_tokens),
                                kv_bits=float(self.model.kv_bits), strict=strict, **asked)

    def outside_as_server(self, *, strict: bool = False) -> list[str]:
        """The same for anything that clients may ask of it: full batches, full contexts, prefix hits."""
        longest = float(self.max_model_len)
        return self.outside(strict=strict, concurrency=float(self.flags.active_seqs), prompt_tokens=longest,
                            context_tokens=longest,
                            cached_tokens=longest if self.flags.enable_prefix_caching else None)

    def describe(self) -> dict[str, Any]:
        """The engine in plain values, for provenance."""
        return {"model": self.model.name, "gpu": self.gpu.name, "gpu_count": self.gpu_count,
                "num_blocks": self.num_blocks, "max_model_len": self.max_model_len,
                "flags": self.flags.model_dump(mode="json")}
