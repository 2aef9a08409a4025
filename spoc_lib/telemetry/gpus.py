"""The GPUs of the METRICS table: which meter a series reads, which GPUs do something, and each one's series once.

A board has one meter for power, energy, clocks and temperature. dcgm-exporter repeats its value for every MIG instance
(label GPU_I_ID) and, with time-slicing, for every pod; activity and memory are an instance's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import orjson
import pandas as pd

from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.series import Series, merged, select

#: A GPU that holds more memory than this, or is active for a larger share of the time, does something.
HELD_MIB, ACTIVE = 1024.0, 0.01
#: What an idle board draws, as a share of the one that draws most, where nothing better was recorded.
IDLE_POWER = 0.35
GPU_IDLE = 0x1  # bit of the clock event reasons
_ACTIVITY = {"DCGM_FI_PROF_SM_ACTIVE": 1.0, "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0, "DCGM_FI_DEV_GPU_UTIL": 0.01,
             "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 1.0, "DCGM_FI_PROF_DRAM_ACTIVE": 1.0}
_MEMORY = "DCGM_FI_DEV_FB_USED"


def unit_of(labels: Mapping[str, str]) -> str:
    """The MIG instance that a series is about, `UUID MIG 3`, else the board."""
    board, uuid = dcgm.gpu_of(labels), labels.get("UUID", "")
    instance = labels.get("GPU_I_ID") or uuid.removeprefix("MIG-") * uuid.startswith("MIG-")
    return f"{board} MIG {instance}" if instance else board


def by_gpu(metrics: pd.DataFrame, field: str) -> dict[str, Series]:
    """The supported samples of a field, under any of its names: one series a board, or a MIG instance where the field
    is an instance's own; none of NaN or DCGM's blanks."""
    found: dict[str, list[Series]] = {}
    for name in sorted(dcgm.aliases(field)):
        for one in select(metrics, name):
            fine = ~dcgm.unsupported(one.value)
            if fine.any():
                key = unit_of(one.labels) if dcgm.of_instance(field) else dcgm.gpu_of(one.labels)
                found.setdefault(key, []).append(Series(name, one.labels, one.time_s[fine], one.value[fine]))
    cut = {name.partition(" MIG ")[0] for name in found if " MIG " in name}  # instances tell more than their whole
    return {name: merged(series) for name, series in sorted(found.items()) if name not in cut}


def keep(metrics: pd.DataFrame, units: Collection[str]) -> pd.DataFrame:
    """The table with, of DCGM's series, only those about `units` (and their boards)."""
    boards = {unit.partition(" MIG ")[0] for unit in units}
    rows = metrics["source"].to_numpy() == "dcgm"
    wanted = {}
    for text in metrics.loc[rows, "labels"].unique():
        unit = unit_of(orjson.loads(text))
        wanted[text] = unit in units or unit in boards
    kept = ~rows
    kept[rows] = metrics.loc[rows, "labels"].map(wanted).to_numpy(bool)
    return metrics if kept.all() else metrics[kept].reset_index(drop=True)


def units(metrics: pd.DataFrame) -> dict[str, dict[str, str]]:
    """{board or MIG instance: labels of one of its series}, of all that DCGM reports; a board that is cut into
    instances is not listed beside them."""
    rows = metrics["source"].to_numpy() == "dcgm"
    found: dict[str, dict[str, str]] = {}
    for text in metrics.loc[rows, "labels"].unique():
        labels = orjson.loads(text)
        found[unit_of(labels)] = {**labels, **found.get(unit_of(labels), {})}
    cut = {name.partition(" MIG ")[0] for name in found if " MIG " in name}
    return {name: found[name] for name in sorted(found) if name not in cut}


def states(metrics: pd.DataFrame) -> dict[str, str]:
    """Each GPU (or instance) is `active`, `holds` memory without computing, or is `idle`; where nothing that was
    recorded tells, it counts as active."""
    listed = units(metrics)
    activity: dict[str, float] = {}
    for field, factor in _ACTIVITY.items():
        for name, series in by_gpu(metrics, field).items():
            activity[name] = max(activity.get(name, 0.0), factor * float(series.value.mean()))
    memory = {name: float(np.median(series.value)) for name, series in by_gpu(metrics, _MEMORY).items()}
    reasons = by_gpu(metrics, "DCGM_FI_DEV_CLOCKS_EVENT_REASONS")
    idle_bit = {name: float((series.value.astype(np.int64) & GPU_IDLE).mean()) > 0.9
                for name, series in reasons.items()}
    power = {name: float(series.value.mean()) for name, series in by_gpu(metrics, "DCGM_FI_DEV_POWER_USAGE").items()}
    most = max(power.values(), default=0.0)
    found = {}
    for name in listed:
        board = name.partition(" MIG ")[0]
        works = activity[name] > ACTIVE if name in activity else \
            not (idle_bit[board] if board in idle_bit else power.get(board, most) < IDLE_POWER * most)
        found[name] = "active" if works else "holds" if memory.get(name, 0.0) > HELD_MIB else "idle"
    return found


def at_work(metrics: pd.DataFrame) -> pd.DataFrame:
    """The table without the GPUs that did nothing while others worked: they hold nobody back, and are in no mean.

    Judged over the whole table. Where none is active, those that hold memory are kept, else all.
    """
    gpus = metrics[metrics["source"].to_numpy() == "dcgm"]
    active = by_gpu(gpus, "DCGM_FI_PROF_SM_ACTIVE")
    if len(active) == len(units(gpus)) and all(one.value.mean() > ACTIVE for one in active.values()):
        return metrics
    seen = states(gpus)
    for state in ("active", "holds"):
        chosen = [name for name, found in seen.items() if found == state]
        if chosen:
            return keep(metrics, chosen) if len(chosen) < len(seen) else metrics
    return metrics
