"""Clusters side by side: the ratio of their capacities, with its interval, as a curve over the SLA's limits.

One ratio at one SLA misleads: what a cluster gains depends on where the limit stands. Each point of the curve moves the
limit of one metric and keeps all other SLOs; the rungs that were run are judged anew at it, nothing is run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.config import load_gpu
from spoc_lib.core.errors import InputError
from spoc_lib.core.schemas import SLO_VERDICTS
from spoc_lib.core.tables import read_table
from spoc_lib.sweep.capacity import read_capacity
from spoc_lib.sweep.fit import Margins, cross, draw, margins

KEY = ["persona", "metric", "percentile"]


@dataclass(frozen=True)
class Swept:
    """One sweep to compare: its capacity.json, SLO_VERDICTS of its valid rungs, and the same at other limits."""

    answer: dict[str, Any]
    slo: pd.DataFrame
    limits: pd.DataFrame

    @classmethod
    def read(cls, folder: str | Path) -> Swept:
        """From the folder of a finished sweep."""
        folder = Path(folder)
        answer = read_capacity(folder)
        slo = read_table(folder / "slo_verdicts.parquet", SLO_VERDICTS)
        limits = read_table(folder / "slo_limits.parquet", SLO_VERDICTS)
        return cls(answer, slo[slo["rung"].isin(limits["rung"].unique())], limits)

    @property
    def margins(self) -> list[Margins]:
        """Margins to the SLA that was swept."""
        return margins(self.slo, self.answer["level"])

    @property
    def shared_noise(self) -> bool:
        """Whether all rungs played the same users, so that their errors are one error."""
        return not self.answer["fresh_users"]

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return int(self.answer["gpus"])

    @property
    def price_per_hour(self) -> float | None:
        """Of all its GPUs, in the currency of the file that states it; None without a price."""
        price = self.answer["price_per_gpu_hour"]
        return None if price is None else price * self.gpus

    def at(self, metric: str, limit_s: float) -> pd.DataFrame:
        """SLO_VERDICTS with the limit of every SLO on `metric` moved to `limit_s`, the others as they were."""
        moved = self.limits[(self.limits["metric"] == metric) & np.isclose(self.limits["limit_s"], limit_s)]
        return pd.concat([self.slo[self.slo["metric"] != metric], moved], ignore_index=True)


def compare_folders(folders: Sequence[str | Path], metric: str = "itl") -> pd.DataFrame:
    """`compare` of the sweeps in `folders`, the first one being the reference."""
    if len(folders) < 2:
        raise InputError("one-sweep", "a comparison needs at least two sweeps: give two folders or more")
    return compare([Swept.read(folder) for folder in folders], metric)


def compare(sweeps: Sequence[Swept], metric: str = "itl") -> pd.DataFrame:
    """Each sweep against the first, one row a limit of `metric` that all of them were judged at.

    cluster, reference, metric, limit_s, own_limit (it is the SLA that was swept); users, users_low, users_high and
    reference_users: capacities at that limit; ratio, low, high: users / reference users with the interval of the
    sweeps' level (rungs of both drawn anew, independently); ratio_per_gpu; ratio_per_price (null without prices);
    naive_gpus, naive_bandwidth, naive_flops: what the counts and data sheets alone would promise. Limits at which
    a capacity is not bounded on either side have null bounds. InputError where the sweeps' SLOs differ in kind.
    """
    reference = sweeps[0]
    shared = [set(np.round(one.limits.loc[one.limits["metric"] == metric, "limit_s"], 9)) for one in sweeps]
    common = sorted(set.intersection(*shared))
    if not common:
        raise InputError("no-common-limit", f"the sweeps share no limit on {metric}: give every cluster the same SLOs")
    rows = []
    for other in sweeps[1:]:
        for limit_s in common:
            rows.append(_row(other, reference, metric, limit_s))
    return pd.DataFrame(rows)


def _row(other: Swept, reference: Swept, metric: str, limit_s: float) -> dict[str, Any]:
    level = reference.answer["level"]
    mine, theirs = (margins(one.at(metric, limit_s), one.answer["level"]) for one in (other, reference))
    one, two = (cross(found, level, shared_noise=swept.shared_noise)
                for found, swept in ((mine, other), (theirs, reference)))
    ratio = _ratio(one.users, two.users)
    low, high, _ = ratio_interval(mine, theirs, level, (other.shared_noise, reference.shared_noise))
    naive = _naive(other, reference)
    dearer = _ratio(other.price_per_hour, reference.price_per_hour) \
        if other.price_per_hour and reference.price_per_hour else None
    own = {row["limit_s"] for row in other.slo.to_dict("records") if row["metric"] == metric}
    return dict(
        cluster=other.answer["cluster"], reference=reference.answer["cluster"], metric=metric, limit_s=limit_s,
        own_limit=bool(any(math.isclose(limit_s, mark) for mark in own)),
        users=_finite(one.users), users_low=_finite(one.low), users_high=_finite(one.high),
        reference_users=_finite(two.users), reference_low=_finite(two.low), reference_high=_finite(two.high),
        ratio=ratio, low=_finite(low), high=_finite(high),
        ratio_per_gpu=None if ratio is None else ratio / naive["naive_gpus"],
        ratio_per_price=None if ratio is None or dearer is None else ratio / dearer, **naive)


def ratio_interval(mine: list[Margins], theirs: list[Margins], level: float,
                   shared_noise: tuple[bool, bool]) -> tuple[float, float, float]:
    """(low, high) of the ratio of the capacities at `level`, and the share of replicates in which it is surely below 1.

    In each replicate the ratio lies between (low / high) and (high / low) of the two brackets; the interval is taken
    over their outer ends, so it is wide rather than narrow. high is inf where nothing bounds it; all are NaN without
    margins. shared_noise: of each of the two (see `fit.draw`).
    """
    if not mine or not theirs:
        return math.nan, math.nan, math.nan
    low_a, high_a = draw(mine, shared_noise=shared_noise[0], seed=1)
    low_b, high_b = draw(theirs, shared_noise=shared_noise[1], seed=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        least, most = np.nan_to_num(low_a / high_b, nan=0.0), high_a / low_b
    most = np.where(np.isnan(most), np.inf, most)
    tail = (1 - level) / 2
    return (float(np.quantile(least, tail, method="inverted_cdf")),
            float(np.quantile(most, 1 - tail, method="inverted_cdf")), float(np.mean(most < 1)))


def _naive(other: Swept, reference: Swept) -> dict[str, float]:
    """Ratios that GPU count, memory bandwidth and dense FLOPs would give if capacity scaled with them."""
    a, b = load_gpu(other.answer["gpu"]), load_gpu(reference.answer["gpu"])
    gpus = other.gpus / reference.gpus
    return dict(naive_gpus=gpus, naive_bandwidth=gpus * a.dram_bytes_per_s / b.dram_bytes_per_s,
                naive_flops=gpus * a.bf16_flops_per_s / b.bf16_flops_per_s)


def _ratio(part: float, whole: float) -> float | None:
    """None, too, for a capacity of 0: no rung met the limit, which bounds it by the ladder's lowest and counts none."""
    return part / whole if part and whole and math.isfinite(part) and math.isfinite(whole) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
