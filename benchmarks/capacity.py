"""Does the capacity's interval hold what it promises? 50 synthetic servers whose capacity is known exactly.

    python benchmarks/capacity.py [--servers 50] [--json FILE]

A server is a curve of p95 TTFT and p95 ITL over users (a slope, a queue that saturates, a cliff, a late
knee), whose crossing with the SLA is solved for; a probe draws a rung's requests around the curve, with
users that differ, bursts that hit everybody, and noise, so that the true p95 is exactly the curve's. Beside
the ladder stand plain bisection (believes each rung's sign) and a fixed ladder (as many rungs, evenly spaced
in the logarithm).

Exit status 1 when the promise is broken: coverage of the 90 % interval >= 85 %, median width <= 10 % of the
capacity, at most 10 probes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from spoc_lib.config import Slo
from spoc_lib.core.files import to_json, write_json
from spoc_lib.metrics import Samples
from spoc_lib.sweep.ladder import Ladder
from spoc_lib.sweep.slo import slo_row

LADDER = (25, 50, 100, 150, 200, 250, 300, 400)
PROBES = 10
TTFT_LIMIT_S, ITL_LIMIT_S = 5.0, 0.05
WINDOW_S = 90.0
KINDS = ("slope", "queue", "cliff", "knee")


@dataclass(frozen=True)
class Server:
    """`ttft_s` and `itl_s`: true p95 as a function of users; `capacity`: users at which the first limit is
    reached."""

    kind: str
    ttft_s: Callable[[float], float]
    itl_s: Callable[[float], float]
    capacity: float
    user_spread: float
    burst_spread: float
    noise: float


def make_server(seed: int) -> Server:
    rng = np.random.default_rng(seed)
    kind, edge = KINDS[seed % len(KINDS)], float(np.exp(rng.uniform(math.log(30), math.log(380))))
    base = rng.uniform(0.2, 1.0)
    power, jump = rng.uniform(2.5, 5), rng.uniform(5, 40)
    ceiling = edge * rng.uniform(1.02, 1.15)

    def ttft(users: float) -> float:
        if kind == "slope":
            return base + (TTFT_LIMIT_S - base) * (users / edge) ** power
        if kind == "queue":
            rho, at_edge = min(users / ceiling, 0.999), edge / ceiling
            return base + (TTFT_LIMIT_S - base) * (rho / (1 - rho)) / (at_edge / (1 - at_edge)) * \
                (1 + max(0.0, users / ceiling - 0.999) * 50)
        if kind == "cliff":
            return base * (1 + users / edge) if users <= edge else TTFT_LIMIT_S * jump * (users / edge)
        return base * (1 + 0.3 * users / edge) + (TTFT_LIMIT_S - 1.3 * base) * math.exp(8 * (users / edge - 1))

    itl_edge = edge * rng.uniform(0.9, 1.6)
    itl_base = rng.uniform(0.01, 0.02)

    def itl(users: float) -> float:
        return itl_base + (ITL_LIMIT_S - itl_base) * (users / itl_edge)

    top = 2.0 * edge
    crossings = [edge if kind == "cliff" else brentq(lambda n: ttft(n) - TTFT_LIMIT_S, 1, top), itl_edge]
    return Server(kind, ttft, itl, min(crossings), rng.uniform(0.1, 0.5), rng.uniform(0.02, 0.15),
                  rng.uniform(0.2, 0.5))


def probe(server: Server, users: int, rung: int, seed: int) -> list[dict]:
    """One rung's SLO rows: requests drawn around the true percentiles, judged by the same code as a real
    rung's."""
    rng = np.random.default_rng([seed, rung, users])
    rows = []
    for metric, true_s, limit_s, per_user, shrink in (
            ("ttft", server.ttft_s(users), TTFT_LIMIT_S, 6, 1.0), ("itl", server.itl_s(users), ITL_LIMIT_S, 60, 0.4)):
        spreads = shrink * np.array([server.user_spread, server.burst_spread, server.noise])
        count = users * per_user
        owner, when = np.repeat(np.arange(users), per_user), rng.uniform(0, WINDOW_S, count)
        bursts = rng.normal(0, spreads[1], 30)[(when / WINDOW_S * 30).astype(int)]
        log = rng.normal(0, spreads[0], users)[owner] + bursts + rng.normal(0, spreads[2], count)
        values = true_s * np.exp(log - 1.6449 * math.sqrt((spreads**2).sum()))
        rows.append(slo_row(Slo(metric=metric, percentile=95, limit_s=limit_s),
                            Samples(values, np.ones(count), owner, when), rung=rung, users=users, driver="virtual"))
    return rows


def our_ladder(server: Server, seed: int) -> dict:
    ladder, rows, rung = Ladder(LADDER), pd.DataFrame(columns=["users", "samples", "rung"]), 0
    while rung < PROBES and (step := ladder.next(rows)) is not None:
        found = pd.DataFrame(probe(server, step.users, rung, seed))
        rows = found if not rung else pd.concat([rows, found], ignore_index=True)
        rung += 1
    crossing = ladder.crossing(rows)
    return _result(server, crossing.users, crossing.low, crossing.high, rung)


def plain_bisection(server: Server, seed: int) -> dict:
    low, high, rung = 0, 2 * LADDER[-1], 0
    while rung < PROBES and high - low > 1:
        users = (low + high) // 2
        missed = any(row["value_s"] > row["limit_s"] for row in probe(server, users, rung, seed))
        low, high = (low, users) if missed else (users, high)
        rung += 1
    return _result(server, (low + high) / 2, low, high, rung)


def fixed_ladder(server: Server, seed: int) -> dict:
    low, high = 0.0, math.inf
    for rung, users in enumerate(np.unique(np.geomspace(LADDER[0], LADDER[-1], PROBES).astype(int))):
        missed = any(row["value_s"] > row["limit_s"] for row in probe(server, int(users), rung, seed))
        if missed:
            high = float(users)
            break
        low = float(users)
    return _result(server, low, low, high, PROBES)


def _result(server: Server, users: float, low: float, high: float, probes: int) -> dict:
    """Users are whole: a bracket [n, n + 1] around the exact crossing is the truth."""
    return dict(kind=server.kind, capacity=server.capacity, users=users, low=low, high=high, probes=probes,
                covered=low <= server.capacity <= high, width=(high - low) / server.capacity,
                error=abs(users - server.capacity) / server.capacity if math.isfinite(users) else math.inf)


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--servers", type=int, default=50, help="synthetic servers; 50 take about a minute")
    arguments.add_argument("--seed", type=int, default=0, help="of the first server")
    arguments.add_argument("--json", metavar="FILE")
    given = arguments.parse_args()
    methods = {"ladder": our_ladder, "plain_bisection": plain_bisection, "fixed_ladder": fixed_ladder}
    summary, began = {}, time.process_time()
    for name, method in methods.items():
        rows = pd.DataFrame([method(make_server(given.seed + index), given.seed + index)
                             for index in range(given.servers)])
        summary[name] = dict(
            coverage=rows["covered"].mean(), width_median=rows["width"].median(), error_median=rows["error"].median(),
            error_p95=rows["error"].quantile(0.95), probes_mean=rows["probes"].mean(), probes_max=rows["probes"].max(),
            by_kind={kind: dict(coverage=part["covered"].mean(), width_median=part["width"].median())
                     for kind, part in rows.groupby("kind")})
        print(f"{name:16s} coverage {summary[name]['coverage']:.0%}  median width {summary[name]['width_median']:.1%}"
              f"  median error {summary[name]['error_median']:.1%}  p95 error {summary[name]['error_p95']:.1%}"
              f"  probes {summary[name]['probes_mean']:.1f} (max {summary[name]['probes_max']})")
    ours = summary["ladder"]
    summary["servers"], summary["cpu_s"] = given.servers, time.process_time() - began
    summary["passed"] = bool(ours["coverage"] >= 0.85 and ours["width_median"] <= 0.10 and
                             ours["probes_max"] <= PROBES)
    if given.json == "-":
        print(to_json(summary))
    elif given.json:
        write_json(given.json, summary)
    print(f"{given.servers} servers of the kinds {', '.join(KINDS)}, {summary['cpu_s']:.0f} s of CPU")
    print("held:" if summary["passed"] else "BROKEN:", f"coverage >= 85 %, median width <= 10 %, <= {PROBES} probes")
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
