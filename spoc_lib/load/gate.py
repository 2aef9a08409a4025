"""The gate that follows from measuring the measurer: when are a rung's figures the client's, not the server's?"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from spoc_lib.core.caches import cache_dir

#: A rung over this share of the client's ceiling is the client's result, not the server's.
CEILING_SHARE = 0.5
#: Stamps later than this share of the measured gap spoil it.
LAG_SHARE = 0.1
#: More of the users' time than this spent waiting for the client to send, and the rung had other users than asked for.
LATE_SHARE = 0.03
#: One Python process at this share of a core has no room for lateness.
CPU_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What the client can do on this host, against a server whose answers are known.

    `lag_*`: the client's stamp of a token minus the moment at which the paced server wrote it. Errors are measured
    minus configured: TTFT, and each gap (absolute); the server's own lateness (`server_late_*`) is part of them.
    `ceiling_tokens_per_s` (one process): the tokens a second at which this process's core would be full;
    `ceiling_users` at the tested pace.
    """

    host: str
    users: int
    itl_s: float
    ttft_s: float
    tokens_per_s: float
    in_flight_users: float
    lag_p50_s: float
    lag_p99_s: float
    ttft_error_p50_s: float
    ttft_error_p99_s: float
    gap_error_p50_s: float
    gap_error_p99_s: float
    cpu_us_per_token: float
    ceiling_tokens_per_s: float
    ceiling_users: float
    server_late_p50_s: float
    server_late_p99_s: float
    startup_s: float
    stamps: str
    passed: bool
    sentence: str


def host_key() -> str:
    """Names the host whose client was measured: another machine or Python needs its own check."""
    return f"{platform.node()} {os.cpu_count()} cpus Python {platform.python_version()}"


def stored_path() -> Path:
    """Where the last self-check of this host lies."""
    return cache_dir() / "selfcheck.json"


def stored() -> SelfCheck | None:
    """The stored self-check of this host; None when there is none that measured something (the summary says so)."""
    try:
        check = SelfCheck(**orjson.loads(stored_path().read_bytes()))
    except (OSError, orjson.JSONDecodeError, TypeError):
        return None
    return check if check.host == host_key() and check.lag_p99_s is not None else None


def client_limits(summary: Mapping[str, Any], processes: int, check: SelfCheck | None) -> list[str]:
    """Sentences that say why a rung's figures are the client's rather than the server's; empty when they are not."""
    limits = []
    if summary["client_cpu_ratio"] > CPU_SHARE:
        limits.append(f"a client process used {100 * summary['client_cpu_ratio']:.0f} % of its core")
    if summary["late_users"] > LATE_SHARE * summary["users"]:
        limits.append(late_sentence(summary))
    if check is None:
        return limits
    share = summary["output_tokens_per_s"] / (check.ceiling_tokens_per_s * processes or np.inf)
    if share > CEILING_SHARE:
        limits.append(f"{summary['output_tokens_per_s']:,.0f} tokens/s are {100 * share:.0f} % of the client's "
                      f"ceiling of {check.ceiling_tokens_per_s * processes:,.0f}")
    itl = summary["itl_s"]["p50"]
    if np.isfinite(itl) and check.lag_p99_s > LAG_SHARE * itl:
        limits.append(f"the client's lag p99 of {1e3 * check.lag_p99_s:.1f} ms is over {100 * LAG_SHARE:.0f} % "
                      f"of the measured ITL of {1e3 * itl:.1f} ms")
    return limits


def late_sentence(summary: Mapping[str, Any]) -> str:
    """How many users waited for the client to send, and what the client was waiting for itself."""
    users, late, p95 = summary["users"], summary["late_users"], summary["schedule_lag_s"]["p95"]
    prepared = summary["late_prepare_ratio"] or 0.0
    loop, share = summary["client_loop_lag_p99_s"] or 0.0, summary["client_cpu_ratio"]
    return (f"{late:.2f} of {users} users ({100 * late / users:.1f} %) were waiting for the client to send (p95 "
            f"{1e3 * p95:.0f} ms): {100 * prepared:.0f} % of it for the next prompt to be made, the rest for the "
            f"client process, whose loop was {1e3 * loop:.0f} ms late at p99 and used {100 * share:.0f} % of a core")
