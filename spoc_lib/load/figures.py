"""What a rung's tables say beside its metrics: tokens that were read together, and stretches without a server."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spoc_lib.metrics import Streams


def merged_ratio(streams: Streams) -> float:
    """Share of the gaps between a request's chunks that are nothing: both came with one read, so under one stamp.
    Either the server sent them together, or the client read late."""
    gap_s = streams.gaps.gap_s
    return float((gap_s == 0.0).mean()) if len(gap_s) else 0.0


def outages(requests: pd.DataFrame, start_s: float) -> list[str]:
    """A sentence for each stretch in which the server was gone: connections were refused, and of all requests sent
    before its end none was completed after its beginning. Times are seconds after `start_s`."""
    done = requests[requests["outcome"] == "completed"].sort_values("end_s")
    lost = requests[requests["error_class"].isin(("refused", "cut"))].sort_values("end_s")
    said = []
    for answered, stretch in lost.groupby(np.searchsorted(done["end_s"], lost["end_s"])):
        back = done.iloc[int(answered):]
        first_s, last_s = stretch["end_s"].min(), stretch["end_s"].max()
        if not (stretch["error_class"] == "refused").any() or (back["send_s"] < last_s).any():
            continue  # a connection cut, or a queue overrun: the server was there
        counts = ", ".join(f"{name} {count}" for name, count in stretch["error_class"].value_counts().items())
        until = f"until {back['send_s'].min() - start_s:.1f} s" if len(back) else \
            "and was not back at the end of the rung"
        said.append(f"the server was gone from {first_s - start_s:.1f} s {until}: {len(stretch)} requests failed "
                    f"({counts})")
    return said
