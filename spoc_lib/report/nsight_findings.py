"""The sentences under the figures of the trace analysis, each computed from the table that its figure draws."""

from __future__ import annotations

import numpy as np
import pandas as pd

from spoc_lib.nsight.categories import TITLES
from spoc_lib.nsight.roofline import Verdict
from spoc_lib.report.verdict import time_text
from spoc_lib.report.wording import counted, listed

#: Difference between GPUs, in shares of the window, from which it is named.
UNEVEN = 0.02


def stacked(decomposition: pd.DataFrame) -> list[str]:
    """Where most of the time goes over all GPUs, and which GPUs differ. `decomposition`: table DECOMPOSITION."""
    wide = decomposition.pivot_table(index=["pid", "device"], columns="category", values="busy_ns", aggfunc="sum",
                                     fill_value=0, observed=True)
    shares = wide.div(wide.sum(axis=1), axis=0)
    mean = shares.mean().sort_values(ascending=False)
    busy = mean[(mean.index != "idle") & (mean > 0)]
    if busy.empty:
        return [f"{counted(len(shares), 'GPU')} ran no kernel in this window."]
    most = listed([f"{_title(category)} {share:.0%}" for category, share in busy.head(3).items()])
    said = [f"Over {counted(len(shares), 'GPU')}: {most} of the time; idle {mean.get('idle', 0.0):.0%}."]
    if len(shares) > 1:
        spread = shares.max() - shares.min()
        category = spread.idxmax()
        if spread[category] < UNEVEN:
            said.append(f"The GPUs are alike: no share differs by more than "
                        f"{max(0.1, 100 * spread[category]):.1f} points.")
        else:
            low, high = shares[category].idxmin(), shares[category].idxmax()
            said.append(f"The GPUs are not alike, least of all in {_title(category)}: "
                        f"{shares.loc[low, category]:.0%} of the time on {_gpu(low, shares)}, "
                        f"{shares.loc[high, category]:.0%} on {_gpu(high, shares)}.")
    return said


def _title(category: object) -> str:
    return TITLES.get(str(category), str(category))


def _gpu(key: object, shares: pd.DataFrame) -> str:
    pid, device = key if isinstance(key, tuple) else (0, key)
    alone = shares.index.get_level_values("device").is_unique
    return f"GPU {device}" if alone else f"GPU {device} (pid {pid})"


def kernel_timeline(kernels: pd.DataFrame) -> list[str]:
    """How many kernels a GPU runs in the stretch drawn, how long they are, and how much of it none runs."""
    if kernels.empty:
        return ["No kernel runs in the stretch that is drawn."]
    ranks = [rows for _, rows in kernels.groupby(["pid", "device"], sort=False)]
    first = float(kernels["start_s"].min())
    span = float((kernels["start_s"] + kernels["duration_s"]).max()) - first
    idle = 1 - float(np.mean([_covered(rows) for rows in ranks])) / span if span > 0 else 0.0
    longest = kernels.loc[kernels["duration_s"].idxmax()]
    return [f"In {time_text(span)} a GPU runs {len(kernels) / len(ranks):,.0f} kernels of "
            f"{time_text(float(kernels['duration_s'].mean()))} on average, and none for {idle:.0%} of it.",
            f"The longest, {time_text(float(longest['duration_s']))}, is {_title(longest['category'])}: "
            f"{str(longest['name'])[:60]}."]


def _covered(rows: pd.DataFrame) -> float:
    """Seconds in which at least one of a GPU's kernels runs."""
    ordered = rows.sort_values("start_s")
    start = ordered["start_s"].to_numpy(float)
    end = start + ordered["duration_s"].to_numpy(float)
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())


def predictions(verdict: Verdict | None, reason: str = "") -> list[str]:
    """The mean step beside its roof under both readings, and where most of the time above the roof lies."""
    if verdict is None:
        return [f"No roofline: {reason or 'the trace does not tell what its steps computed'}."]
    rows = verdict.table[(verdict.table["phase"] == "all") & (verdict.table["measured_s"] > 0)]
    kernels = rows[rows["category"] != "idle"]
    took, w4a16, naive = (float(kernels[name].sum()) for name in ("measured_s", "w4a16_s", "fp4_naive_s"))
    kind = "simulated" if verdict.simulated else "measured"
    said = [f"Of {time_text(took)} of kernels in a mean step ({kind}), the hardware needs {time_text(w4a16)} as W4A16 "
            f"({w4a16 / took:.0%}) and {time_text(naive)} as FP4-naive ({naive / took:.0%})."
            if abs(w4a16 - naive) > 0.01 * took else
            f"Of {time_text(took)} of kernels in a mean step ({kind}), the hardware needs {time_text(w4a16)} "
            f"({w4a16 / took:.0%}), in both readings."]
    above = kernels["measured_s"] - kernels["w4a16_s"]
    if above.max() > 0:
        row = kernels.loc[above.idxmax()]
        reached = f", which runs at {row['w4a16_s'] / row['measured_s']:.0%} of its roof" if row["w4a16_s"] else \
            ", for which no roof is reckoned"
        said.append(f"Most of the time above the roof is {_title(row['category'])}{reached}: "
                    f"{time_text(float(above.max()))} a step.")
    return said
