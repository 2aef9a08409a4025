"""A short stretch of a trace, kernel by kernel, for drawing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib.nsight.categories import classify
from spoc_lib.nsight.trace import open_trace


def excerpt(path: str | Path | Sequence[str | Path], start_ns: int, end_ns: int, *, most: int = 6000) -> pd.DataFrame:
    """What runs in [start_ns, end_ns) on the trace's clock: columns pid, device, start_s and duration_s (seconds
    from `start_ns`), category, name. At most `most` rows a trace, an equal number a GPU, the earliest first."""
    with open_trace(path, accept_graph_mode=True) as trace:
        categories = classify(trace.names)
        names = np.array(trace.names, dtype=object)
        parts = []
        for rank, activity in trace.activities.items():
            inside = np.flatnonzero((activity.start >= start_ns) & (activity.start < end_ns))[:most // len(trace.ranks)]
            name, start = names[activity.name[inside]], activity.start[inside]
            parts.append(pd.DataFrame({
                "pid": trace.pids[rank], "device": rank.device, "start_s": (start - start_ns) / 1e9,
                "duration_s": np.maximum(activity.end[inside] - start, 0) / 1e9,
                "category": [categories[n] for n in name], "name": name}))
    return pd.concat(parts, ignore_index=True)
