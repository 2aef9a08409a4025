"""The trace that notebook 04 examines: the user's own, or the twin's at the capacity limit."""

from __future__ import annotations

from pathlib import Path

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json
from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import read_table
from spoc_lib.nsight.categories import rule_book
from spoc_lib.nsight.decompose import Decomposition
from spoc_lib.nsight.examination import Examination, examine
from spoc_lib.nsight.late import why_late
from spoc_lib.nsight.plan import gpus_of, tensor_parallel
from spoc_lib.nsight.roofline import batch_of
from spoc_lib.pipeline.parameters import P04, of_kind
from spoc_lib.pipeline.stage import Stage


def trace_at_limit(stage: Stage) -> tuple[Path, str]:
    """(path, where it comes from, in sentences). The `trace` parameter wins; else an embedded cluster plays its
    users on the virtual clock and writes the steps of the steady window as a kernel trace; a real engine is captured
    by nsys where `capture` asks for it."""
    asked = of_kind(P04, stage.parameters)
    given = asked.trace
    if given:
        return Path(given), f"The trace {Path(given).name} was given as a parameter."
    if stage.cluster.simulated:
        path, told = _simulated(stage)
        if asked.capture:
            from spoc_lib.pipeline.limit_capture import engine_ranges

            told = f"{told} {engine_ranges(stage)}"
        return path, told
    if asked.capture:
        from spoc_lib.pipeline.limit_capture import captured

        return captured(stage, *_users(stage))
    raise InputError("no-trace",
                     f"cluster '{stage.cluster.name}' is a real engine: capture a trace at the limit with --capture "
                     f"(spoc nsight plan {stage.cluster.name} tells how by hand), or pass one with --set trace=FILE")


def examined(stage: Stage, path: Path, model: ModelSpec, gpu: GpuSpec) -> Examination:
    """The trace at `path` examined with what the notebook was told beside it."""
    asked = of_kind(P04, stage.parameters)
    flags = stage.flags()
    return examine(path, model, gpu, gpus_of(stage.cluster, flags), tensor_parallel=tensor_parallel(stage.cluster,
    flags), batch=batch_of(asked.batch, "batch"), steps=asked.steps or None,
                   rules=rule_book(asked.rules) if asked.rules else None, accept_graph_mode=asked.accept_graph_mode)


def late_sentences(stage: Stage, found: Decomposition) -> list[str]:
    """Why a GPU makes the others wait, by what DCGM recorded around the capture; nothing where none was recorded."""
    record = stage.folder / "capture" / "capture.json"
    if not record.exists() or stage.cluster.simulated or found.waiting.late is None:
        return []
    start_s, end_s = read_json(record)["window_s"]
    return [why_late(found, read_table(record.with_name("metrics.parquet"), METRICS), start_s, end_s)]


def _simulated(stage: Stage) -> tuple[Path, str]:
    from spoc_lib.engine.embedded import EmbeddedEngine
    from spoc_lib.engine.kerneltrace import write_trace
    from spoc_lib.sweep.drivers import virtual_rung
    from spoc_lib.sweep.record import Timing

    users, origin = _users(stage)
    engine = EmbeddedEngine.from_cluster(stage.cluster, stage.flags())
    seconds, warmup = stage.profile.trace_s, stage.profile.warmup_s
    stage.progress(f"playing {users} users until {seconds:g} s of the steady state are there")
    rung = virtual_rung(engine, stage.script, users, Timing(warmup + seconds, warmup), stage.seed)
    path = stage.folder / "limit.sqlite"
    write_trace(path, engine, rung.steps, *rung.window)
    return path, (
        f"Simulated: the embedded engine wrote {seconds:g} s of its steps at {users} users ({origin}), {warmup:g} s "
        "after every user had its first answer."
    )


def _users(stage: Stage) -> tuple[int, str]:
    if asked := of_kind(P04, stage.parameters).users:
        return asked, "given as a parameter"
    swept = stage.result_of("03")
    if swept and swept.get("max_users"):
        return int(swept["max_users"]), "the limit that the sweep of this run found"
    return stage.cluster.search.target_users, "the cluster's target, since this run has no sweep"
