"""A simulated kernel trace of the embedded engine, in the SQLite schema of Nsight Systems.

For each step the step-time model gives GPU seconds by kernel category; they are laid out as the kernels that vLLM
launches for the model, layer by layer, under the names that its traces show on Hopper. Real in it: the schema, the
names, the sums by category and step. Assumed: how a category's time divides among its kernels, and where within the
step the idle time stands. Every trace says in META_DATA_CAPTURE that it is simulated, and by what.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import replacing
from spoc_lib.core.sqlite import full_disk_told
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.kernelnames import Kernel, step_kernels
from spoc_lib.engine.traceschema import create_tables

SIMULATED = "SPOC_SIMULATED"
SIMULATED_BY = "SPOC_SIMULATED_BY"
#: A CUDA graph's kernels follow each other after about this long; what remains of a step's idle time is the host's.
_LAUNCH_GAP_NS = 800
_FIRST_PID = 1001
_STREAM = 7


def phase_of(prefills: int, decodes: int) -> str:
    """prefill, decode or mixed; none for an empty step."""
    if prefills and decodes:
        return "mixed"
    return "prefill" if prefills else "decode" if decodes else "none"


def step_text(step: int, batch: Batch) -> str:
    """Text of the NVTX range around one engine step: its number, phase and batch, as key=value."""
    values = " ".join(f"{name}={float(value)!r}" if "pairs" in name else f"{name}={int(value)}"
                      for name, value in batch._asdict().items())
    return f"spoc step={step} phase={phase_of(batch.prefills, batch.decodes)} {values}"


def write_trace(path: str | Path, engine: EmbeddedEngine, steps: pd.DataFrame, start_s: float, end_s: float,
                *, max_kernels: int = 2_000_000) -> Path:
    """Write the steps that start in [start_s, end_s) as a kernel trace; one process a GPU, all doing the same.

    steps: columns time_s, duration_s and the fields of `Batch` (`VirtualRun.steps`). Stops after whole steps at
    `max_kernels`. InputError when no step with work starts in the window.
    """
    chosen = steps[(steps.time_s >= start_s) & (steps.time_s < end_s) & (steps.tokens > 0)]
    if chosen.empty:
        raise InputError("empty-window", f"no engine step starts between {start_s:g} s and {end_s:g} s: nothing to "
                         f"write into a kernel trace")
    names = _Names()
    with full_disk_told(path), replacing(path) as temporary, closing(sqlite3.connect(temporary)) as database:
        database.execute("PRAGMA journal_mode = OFF")
        database.execute("PRAGMA synchronous = OFF")
        create_tables(database)
        written = 0
        for number, laid in enumerate(_lay_out(engine, chosen)):
            _write_step(database, names, engine.gpu_count, number, laid)
            written += laid.start.size * engine.gpu_count
            if written >= max_kernels:
                break
        _write_frame(database, names, engine)
        database.commit()
    return Path(path)


@dataclass(frozen=True)
class _LaidOut:
    """One step in ns: kernels back to back with launch gaps, the host's gap behind them."""

    step: int
    batch: Batch
    begin_ns: int
    end_ns: int
    kernels: list[Kernel]
    start: np.ndarray
    end: np.ndarray


def _lay_out(engine: EmbeddedEngine, steps: pd.DataFrame) -> Iterator[_LaidOut]:
    fractions = {"prefill_pairs", "prefill_window_pairs"}
    by_category = engine.step_time.components_of(Batch._make(steps[f].to_numpy(float) for f in Batch._fields))
    for at, (index, row) in enumerate(zip(steps.index, steps.itertuples(index=False), strict=True)):
        batch = Batch._make((float if f in fractions else int)(getattr(row, f)) for f in Batch._fields)
        begin, duration = round(row.time_s * 1e9), round(row.duration_s * 1e9)
        seconds = {name: float(values[at]) for name, values in by_category.items()}
        kernels = [k for k in step_kernels(engine.model, engine.gpu_count, batch,
                                           _full_layer_share(engine.model, engine.gpu, batch))
                   if seconds.get(k.category, 0.0) > 0]
        lengths = _lengths(kernels, seconds)
        idle = max(0, duration - int(lengths.sum()))
        gap = min(_LAUNCH_GAP_NS, idle // (2 * max(1, len(kernels))))
        start = begin + np.concatenate(([0], np.cumsum(lengths + gap)[:-1]))
        yield _LaidOut(int(index), batch, begin, begin + duration, kernels, start, start + lengths)


def _lengths(kernels: list[Kernel], seconds: dict[str, float]) -> np.ndarray:
    """ns of each kernel: its category's seconds divided by weight, rounded so that the sum is right to the ns."""
    lengths = np.zeros(len(kernels), dtype=np.int64)
    categories = np.array([k.category for k in kernels])
    weights = np.array([k.weight for k in kernels])
    for category in dict.fromkeys(categories):
        where = np.flatnonzero(categories == category)
        edges = np.cumsum(weights[where]) / weights[where].sum() * seconds[category] * 1e9
        lengths[where] = np.diff(np.round(edges), prepend=0).astype(np.int64)
    return lengths


def _full_layer_share(model: ModelSpec, gpu: GpuSpec, batch: Batch) -> float:
    """Attention time of a full layer over that of a full and a sliding one, by bytes read and FLOPs computed."""
    token_s = 2 * model.kv_heads * model.head_dim * model.kv_bits / 8 / gpu.dram_bytes_per_s
    pair_s = 4 * model.heads * model.head_dim / gpu.bf16_flops_per_s
    full = (batch.decode_context + batch.prefill_context) * token_s + batch.prefill_pairs * pair_s
    window = model.sliding_window or model.max_model_len
    sliding = ((batch.decode_window + min(batch.prefill_context, batch.prefills * window)) * token_s
               + batch.prefill_window_pairs * pair_s)
    return full / (full + sliding) if full + sliding else 0.5


class _Names:
    """StringIds: text to id."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids))


def _global_pid(rank: int) -> int:
    return (1 << 48) | ((_FIRST_PID + rank) << 24)


def _write_step(database: sqlite3.Connection, names: _Names, gpus: int, number: int, laid: _LaidOut) -> None:
    demangled = [names(k.name) for k in laid.kernels]
    short = [names(k.name.split("<")[0].removeprefix("void ").split("::")[-1]) for k in laid.kernels]
    start, end = laid.start.tolist(), laid.end.tolist()
    text, launch, correlation = step_text(laid.step, laid.batch), names("cudaGraphLaunch_v10000"), number + 1
    for rank in range(gpus):
        pid = _global_pid(rank)
        thread = pid | (_FIRST_PID + rank)
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, contextId, streamId, correlationId, "
            "globalPid, demangledName, shortName, registersPerThread, gridX, gridY, gridZ, blockX, blockY, blockZ, "
            "staticSharedMemory, dynamicSharedMemory, localMemoryPerThread, localMemoryTotal, gridId, graphNodeId) "
            "VALUES (?,?,?,1,?,?,?,?,?,0,1,1,1,1,1,1,0,0,0,0,?,?)",
            ((s, e, rank, _STREAM, correlation, pid, d, h, i, i) for i, (s, e, d, h) in
             enumerate(zip(start, end, demangled, short, strict=True))))
        database.execute("INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid, domainId) "
                         "VALUES (?,?,59,?,?,0)", (laid.begin_ns, laid.end_ns - 1, text, thread))
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME (start, end, eventClass, globalTid, correlationId, "
                         "nameId, returnValue) VALUES (?,?,0,?,?,?,0)",
                         (laid.begin_ns, laid.begin_ns + 1, thread, correlation, launch))


def _write_frame(database: sqlite3.Connection, names: _Names, engine: EmbeddedEngine) -> None:
    """What stands around the activities: strings, processes, GPUs, and what made the trace."""
    database.executemany("INSERT INTO StringIds VALUES (?,?)", ((i, text) for text, i in names.ids.items()))
    ranks = range(engine.gpu_count)
    database.executemany("INSERT INTO PROCESSES VALUES (?,?,?)",
                         ((_global_pid(r), _FIRST_PID + r, f"VLLM::Worker_TP{r} (simulated)") for r in ranks))
    database.executemany(
        "INSERT INTO TARGET_INFO_GPU (vmId, id, name, totalMemory, memoryBandwidth, computeMajor, computeMinor) "
        "VALUES (?,?,?,?,?,9,0)",
        ((1 << 48, r, f"{engine.gpu.title} (simulated)", int(engine.gpu.memory_gib * 2**30),
          int(engine.gpu.dram_bytes_per_s)) for r in ranks))
    database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (0, '1970-01-01T00:00:00', "
                     "'1970-01-01T00:00:00', 0)")
    database.executemany("INSERT INTO META_DATA_EXPORT VALUES (?,?)", (
        ("EXPORT_PRODUCT_NAME", "SPOC embedded engine"), ("EXPORT_SCHEMA_VERSION", "3.25.0")))
    passport = {"model": engine.model.name, "gpu": engine.gpu.name, "gpu_count": engine.gpu_count,
                "calibration": engine.passport().get("calibration")}
    database.executemany("INSERT INTO META_DATA_CAPTURE VALUES (?,?)", (
        (SIMULATED, "true"), (SIMULATED_BY, json.dumps(passport, default=str)),
        ("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Node"), ("CAPTURE_EVENT_TYPE", "Cuda"),
        ("CAPTURE_EVENT_TYPE", "NvtxEvents")))
