"""What a planner asks next: other hardware, KV dtype, context limit, mix, think time, sharing; max users for each."""

from __future__ import annotations

import pandas as pd

from spoc_lib import config
from spoc_lib.config import Cluster
from spoc_lib.sweep.cases import Case, answers
from spoc_lib.sweep.sensitivity import table
from spoc_lib.workload.personas import PersonaSet, RecordedSet, load_personas

GPU_COUNTS = (1, 2, 4, 8)
CONTEXT_LIMITS = (32_768, 65_536)
THINK_SCALES = (0.5, 2.0)


def on_hardware(cluster: Cluster, gpu: str | None = None, count: int | None = None) -> Cluster:
    """The cluster on other GPUs or another number of them, all in one tensor-parallel group."""
    hardware = cluster.hardware.model_copy(update={
        "gpu": gpu or cluster.hardware.gpu, "count": count or cluster.hardware.count})
    return cluster.model_copy(update={
        "hardware": hardware, "flags": {**cluster.flags, "tensor_parallel_size": hardware.count}})


def with_share(personas: PersonaSet, name: str, share: float) -> PersonaSet:
    """The set with one persona's share changed, the others' scaled to make room; a share of 0 leaves it out."""
    rest = 1 - personas.persona(name).share
    mixed = []
    for one in personas.personas:
        own = share if one.name == name else one.share * (1 - share) / rest
        if own > 0:
            mixed.append(one.model_copy(update={"share": own}))
    return personas.model_copy(update={"personas": mixed})


def questions(case: Case) -> list[tuple[str, str, Case]]:
    """(question, variant, case): the case itself first, then one thing changed at a time."""
    cluster = case.cluster
    asked = [("as it is", f"{cluster.hardware.count} x {cluster.hardware.gpu_name}", case)]
    for count in GPU_COUNTS:
        if count != cluster.hardware.count:
            near = max(1, round(case.near * count / cluster.hardware.count))
            asked.append(("GPU count", f"{count} x {cluster.hardware.gpu_name}", case.changed(
                cluster=on_hardware(cluster, count=count), near=near)))
    for gpu in config.names("gpus"):
        if gpu not in (cluster.hardware.gpu_name, "cpu"):
            asked.append(("GPU", f"{cluster.hardware.count} x {gpu}", case.changed(cluster=on_hardware(cluster, gpu))))
    asked.append(("KV dtype", "fp8", case.changed(flags={**case.flags, "kv_cache_dtype": "fp8"})))
    asked += [("context limit", f"{limit:,} tokens", case.changed(flags={**case.flags, "max_model_len": limit}))
              for limit in CONTEXT_LIMITS]
    asked += [("think time", f"x {scale:g}", case.changed(think_scale=scale, near=max(1, round(case.near * scale))))
              for scale in THINK_SCALES]
    return asked + _workload(case)


def _workload(case: Case) -> list[tuple[str, str, Case]]:
    """Other mixes and no common ground; recorded sessions have neither to change."""
    personas = load_personas(case.personas) if isinstance(case.personas, str) else case.personas
    if isinstance(personas, RecordedSet):
        return []
    asked = []
    if len(personas.personas) > 1:
        last = personas.personas[-1]
        for share in (0.0, min(2 * last.share, 0.9)):
            asked.append(("mix", f"{share:.0%} {last.name} (instead of {last.share:.0%})",
                          case.changed(personas=with_share(personas, last.name, share))))
    asked.append(("monorepo sharing", "none", case.changed(shared_ratio=0.0)))
    return asked


def what_if(case: Case) -> pd.DataFrame:
    """`sensitivity.table` of the capacity under each of `questions`, with the passport's sentences in `outside`."""
    asked = questions(case)
    return table(asked, answers([one for _, _, one in asked]))
