"""One finding of the paper beside ours, and the three verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

#: The paper's users and best token budgets, by (GPUs, GPU).
USERS = {(4, "h100-sxm"): 300, (2, "h200-sxm"): 85}
BUDGETS = {(4, "h100-sxm"): 2048, (2, "h200-sxm"): 1024}
#: Its ratio of these users as published, and how near to it and to them, relatively, is reproduced.
RATIO, NEAR = 3.5, 0.15


@dataclass(frozen=True)
class Claim:
    """One row: the paper's figure, ours, the verdict, and what it depends on or why it is not reproduced."""

    finding: str
    paper: str
    ours: str
    verdict: str
    why: str


def not_judged(finding: str, paper: str, why: str) -> Claim:
    """A finding that the runs at hand say nothing about."""
    return Claim(finding, paper, "–", "not judged", why)


def spans(values: Iterable[float], figure: float, tolerance: float = 0.0) -> bool:
    """Whether the known values reach around `figure`, give or take `tolerance` of them."""
    known = [v for v in values if v is not None and not pd.isna(v) and math.isfinite(v)]
    return bool(known) and min(known) * (1 - tolerance) <= figure <= max(known) * (1 + tolerance)


def judge(near: bool, depends: list[str], otherwise: str) -> tuple[str, str]:
    """(verdict, why) from whether the figure is met as swept, and what would have to move for it."""
    if near:
        return "reproduced", "as swept"
    return ("depends on", "; ".join(depends)) if depends else ("not reproduced", otherwise)
