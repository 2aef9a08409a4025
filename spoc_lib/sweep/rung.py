"""One rung of the ladder in one row: the same code for a rung on the virtual clock and for one over HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.config import SHARES, Slo, slo_name
from spoc_lib.metrics import LITTLE_TOLERANCE, Measured, Occupancy, occupancy
from spoc_lib.sweep.slo import LEVEL, evaluate
from spoc_lib.telemetry.timeline import window_summary

#: The embedded engine may deliver one step in twenty this late (the clusters' own limit on ITL), no later.
STEP_LAG_S = 0.05
#: Fewer requests than this in the window say nothing about anybody.
LEAST_REQUESTS = 5


def summarise(requests: pd.DataFrame, chunks: pd.DataFrame, metrics: pd.DataFrame, window: tuple[float, float],
              slos: Sequence[Slo], users: int, driver: str, *, rung: int = 0, start_s: float | None = None,
              end_s: float | None = None, planned: int | None = None, client_limited: bool = False,
              gap_cap_s: float = 60.0, level: float = LEVEL,
              server: dict | None = None) -> tuple[dict, list[dict]]:
    """(row of RUNGS, rows of SLO_VERDICTS) of one rung.

    requests, chunks, metrics: the rung's REQUESTS, CHUNKS and METRICS; window: its steady part, (start_s,
    end_s);
    start_s, end_s: the whole rung (default: first and last event); planned: requests that the driver set out
    to send (default: the rows of `requests`); client_limited: the load generator said so; server: the
    window's `window_summary`, if it is at hand already; level: of the SLOs' intervals.

    Each figure is as `metrics` has it. The verdict of an invalid rung is `invalid` with the reason, whatever its
    latencies.
    """
    seen = Measured(requests, chunks, window, end_s)
    end_s = seen.end_s
    if start_s is None:
        start_s = float(np.nanmin([window[0], requests["intended_send_s"].min()]))
    outcomes = {name: int((requests["outcome"] == name).sum()) for name in ("completed", "failed", "censored")}
    planned = len(requests) if planned is None else planned
    counted = occupancy(requests, users, window, start_s, end_s, gap_cap_s)
    verdicts = evaluate(seen, slos, rung=rung, users=users, driver=driver, level=level)
    server = window_summary(metrics, *window) if server is None else server
    row = dict(rung=rung, users=users, driver=driver, start_s=start_s, window_start_s=float(window[0]),
               window_end_s=float(window[1]), end_s=end_s, planned=planned, **outcomes,
               **counted.numbers("live_users", "thinking_users", "in_flight_users", "little_error_ratio"),
               **seen.numbers("request_rate_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "cached_ratio"),
               **_latencies(seen), kv_usage_ratio=server["kv_usage_ratio"],
               sm_active_ratio=server["sm_active_ratio"], dram_active_ratio=server["dram_active_ratio"],
               preemptions=None if server["preemptions"] is None else int(round(server["preemptions"])),
               waiting_mean=server["waiting"], client_limited=client_limited)
    if row["cached_ratio"] is None:
        row["cached_ratio"] = server["cached_ratio"]
    reasons = _invalid(row, counted, seen, server)
    row["verdict"] = "invalid" if reasons else overall(verdicts)
    row["binding"] = _binding(verdicts)
    row["reason"] = "; ".join(reasons) or _reason(verdicts)
    return row, verdicts


def overall(verdicts: Sequence[dict]) -> str:
    """missed when one SLO is missed, met when all are met, else undecided."""
    found = {row["verdict"] for row in verdicts}
    if "missed" in found:
        return "missed"
    return "met" if found <= {"met"} else "undecided"


def name_of(row: Mapping[str, Any]) -> str:
    """`planner ttft p95 <= 5 s`, as `config.Slo.name` has it, from a row of SLO_VERDICTS."""
    return slo_name(row["persona"], row["metric"], row["percentile"], row["limit_s"])


def pressure(row: Mapping[str, Any]) -> float:
    """How near to its limit an SLO_VERDICTS row is (1: there): the percentile over the limit; for a share of requests,
    the share beyond over the share allowed. -inf without samples."""
    value = row["beyond_ratio"] / (1 - row["percentile"] / 100) if row["metric"] in SHARES else \
        row["value_s"] / row["limit_s"]
    return -math.inf if math.isnan(value) else float(value)


def _latencies(seen: Measured) -> dict:
    """Percentiles over everybody, as they are shown everywhere."""
    return {f"{metric}_{name}_s": value for metric, percents in (("ttft", (50, 95, 99)), ("itl", (50, 95, 99)),
                                                                 ("tpot", (50, 95)))
            for name, value in seen.samples(metric).percentiles(percents).items()}


def _invalid(row: dict, counted: Occupancy, seen: Measured, server: Mapping[str, Any]) -> list[str]:
    """Why the rung says nothing about `users` users; empty when it does."""
    reasons = []
    accounted = row["completed"] + row["failed"] + row["censored"]
    if row["planned"] != accounted:
        reasons.append(f"{row['planned']} requests were planned but {accounted} are accounted for (completed + "
                       f"failed + censored)")
    if seen.sent.sum() < LEAST_REQUESTS:
        reasons.append(f"fewer than {LEAST_REQUESTS} requests were sent in the window: run it longer")
    if counted.overlaps:
        reasons.append(f"{counted.overlaps} requests were sent while their user still had one in flight")
    if counted.seen > row["users"]:
        reasons.append(f"{counted.seen} different users sent requests, {row['users']} were asked for")
    if not counted.little_error_ratio <= LITTLE_TOLERANCE:
        reasons.append(f"Little's law misses by {counted.little_error_ratio:.1%}: the records account for "
                       f"{counted.live:.1f} live users of {row['users']}")
    if counted.late > LITTLE_TOLERANCE * row["users"]:
        reasons.append(f"{counted.late:.2f} of {row['users']} users ({counted.late / row['users']:.1%}) were waiting "
                       "for the load generator to send: the rung had fewer users than asked for")
    elif row["client_limited"]:
        reasons.append("the load generator could not keep up: its own delay is in the latencies")
    return reasons + _behind(server)


def _behind(server: Mapping[str, Any]) -> list[str]:
    """Whether the embedded engine kept real time: where it did not, its latencies are those of the machine it runs on,
    and no capacity."""
    resets, lag_s = server.get("clock_resets") or 0.0, server.get("step_lag_p95_s") or 0.0
    way_out = "play fewer users over HTTP ('http_users' in the profile) or use a faster machine"
    if resets >= 0.5:
        times = f"{resets:.0f} time{'s' * (resets >= 1.5)}"
        return [f"the embedded engine fell behind real time and restarted its clock {times}: its latencies are this "
                f"machine's, not the server's; {way_out}"]
    if lag_s >= STEP_LAG_S:
        return [f"the embedded engine delivered one step in twenty {1e3 * lag_s:.0f} ms late or more: its latencies "
                f"are this machine's, not the server's; {way_out}"]
    return []


def _binding(verdicts: Sequence[dict]) -> str | None:
    """The SLO nearest to its limit, or furthest beyond it."""
    return name_of(max(verdicts, key=pressure)) if verdicts else None


def _reason(verdicts: Sequence[dict]) -> str:
    open_ones = [says(row) for row in verdicts if row["verdict"] != "met"]
    return "; ".join(open_ones) if open_ones else "every SLO is met with its whole interval"


def says(row: Mapping[str, Any]) -> str:
    """An SLO with its value and interval, of a row of SLO_VERDICTS."""
    if row["metric"] in SHARES:
        found = [100 * row[name] for name in ("beyond_ratio", "beyond_low_ratio", "beyond_high_ratio")]
        if row["metric"] == "goodput":
            found = [100 - found[0], 100 - found[2], 100 - found[1]]
        value, low, high = (f"{one:.3g}" for one in found)
        return f"{name_of(row)}: {value} % ({low} to {high})"
    value, low, high = (f"{row[name]:.3g}".replace("inf", "∞") for name in ("value_s", "low_s", "high_s"))
    return f"{name_of(row)}: {value} s ({low} to {high})"
