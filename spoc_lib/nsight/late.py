"""Why a rank is late: the GPU that others wait for in a trace, beside what DCGM said of its clocks meanwhile."""

from __future__ import annotations

import json

import pandas as pd

from spoc_lib.nsight.decompose import Decomposition
from spoc_lib.telemetry import dcgm
from spoc_lib.telemetry.straggler import find_stragglers


def why_late(decomposition: Decomposition, metrics: pd.DataFrame, start_s: float, end_s: float) -> str:
    """One sentence on the late GPU of `decomposition.waiting`; metrics: METRICS around the capture, on its own clock.

    A trace counts devices per process and DCGM counts boards, so the two are joined by UUID where the trace holds it,
    else by index, and the sentence says so.
    """
    late = decomposition.waiting.late
    if late is None:
        return "No GPU makes the others wait, so there is nothing to explain."
    uuid = decomposition.metadata["uuids"].get(f"{late[0]}:{late[1]}")
    name = _dcgm_name(metrics, uuid, late[1])
    where = f"GPU {late[1]} of process {late[0]}"
    if name is None:
        return f"{where} makes the others wait, and no DCGM metrics of it were recorded: the clocks cannot be judged."
    joined = "" if uuid else " (joined by index, for the trace holds no UUID)"
    report = find_stragglers(metrics, start_s, end_s)
    mine = next((s for s in report.stragglers if s.gpu == name), None)
    if mine is not None:
        return f"{where} makes the others wait, and DCGM tells why{joined}: {mine.sentence}"
    if report.gpus < 2:
        return f"{where} makes the others wait; {'; '.join(report.notes)}."
    return (f"{where} makes the others wait, though its clocks keep up with its peers'{joined}: look at its host "
            f"process (scheduling, NUMA, another process on its cores).")


def _dcgm_name(metrics: pd.DataFrame, uuid: str | None, device: int) -> str | None:
    """How DCGM's labels call the GPU with this UUID, or, without one, with this index."""
    rows = metrics[metrics.source == "dcgm"]
    for text in rows.labels.unique():
        labels = json.loads(text)
        if uuid is not None:
            if str(labels.get("UUID", "")).lower().removeprefix("gpu-") == uuid.lower().removeprefix("gpu-"):
                return dcgm.gpu_of(labels)
        elif str(labels.get("gpu")) == str(device):
            return dcgm.gpu_of(labels)
    return None
