"""Measure the measurer: this client against a paced server on the same box."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pandas as pd

from spoc_lib.core.errors import SpocError
from spoc_lib.core.files import write_json
from spoc_lib.core.stats import percentile
from spoc_lib.load.gate import CPU_SHARE, LAG_SHARE, SelfCheck, host_key, stored_path
from spoc_lib.load.plan import FixedTurns, LoadPlan
from spoc_lib.load.runner import LoadRun, run
from spoc_lib.load.script import fixed_stream
from spoc_lib.metrics import Measured

WALL_US = 1e6


@contextlib.contextmanager
def paced_server(ttft_s: float, itl_s: float, prefix: tuple[str, ...] = (), log: bool = True,
                 host: str = "127.0.0.1") -> Iterator[str]:
    """The paced server as a process of its own; yields its base URL. `prefix`: a command to run it under (taskset)."""
    command = [*prefix, sys.executable, "-m", "spoc_lib.load.paced", "--ttft", str(ttft_s), "--itl", str(itl_s),
               "--host", host, *(["--log"] if log else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None  # a pipe
    try:
        line = process.stdout.readline()
        if not line:
            raise SpocError("no-paced-server", f"the paced server did not start (exit status {process.wait()})")
        yield orjson.loads(line)["base_url"]
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def paced_report(base_url: str) -> dict[str, Any]:
    """What the paced server says of itself, `writes` included."""
    pages = []
    for page in ("/paced", "/paced/writes"):
        with urllib.request.urlopen(base_url + page, timeout=30) as answer:
            pages.append(orjson.loads(answer.read()))
    return {**pages[0], "writes": pages[1]}


def selfcheck(users: int = 100, duration_s: float = 10.0, *, ttft_s: float = 0.2, itl_s: float = 0.02,
              output_tokens: int = 200, prompt_tokens: int = 16, folder: Path | None = None,
              progress: Callable[[dict], None] | None = None, store: bool = True) -> SelfCheck:
    """Run `users` fixed users for `duration_s` against a paced server and say how late and how dear the client is.

    The users start spread over one answer, as real users are, not in one burst.

    Stored for this host (see `stored_path`), where every later rung finds it.
    """
    with contextlib.ExitStack() as stack:
        base_url = stack.enter_context(paced_server(ttft_s, itl_s))
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spoc-selfcheck-")))
        answer_s = ttft_s + (output_tokens - 1) * itl_s
        plan = LoadPlan(base_url=base_url, model="paced", users=users, duration_s=duration_s,
                        stop_timeout_s=answer_s + 5, ramp_s=min(answer_s, duration_s / 3),
                        warmup_s=min(1.0, duration_s / 6),
                        fixed=FixedTurns(output_tokens=output_tokens, prompt_tokens=prompt_tokens))
        result = run(plan, where, progress=progress)
        report = paced_report(base_url)
    check = judge(result, ttft_s, itl_s, report)
    if store:
        write_json(stored_path(), asdict(check))
    return check


def judge(result: LoadRun, ttft_s: float, itl_s: float, report: Mapping[str, Any]) -> SelfCheck:
    """The SelfCheck of a LoadRun against a paced server and that server's own report; SpocError where no answer was
    whole."""
    seen = Measured(result.requests, result.chunks, result.window)
    answered = seen.sent & ~np.isnan(seen.records.ttft_s)
    errors = seen.records.ttft_s[answered] - ttft_s
    off = np.abs(seen.samples("inter_chunk").value_s - itl_s)
    lags = stamp_lags(result.requests[seen.sent], result.chunks, report["writes"], result.plan.salt)
    summary = result.summary
    if not len(lags):
        raise SpocError("nothing-measured", f"no answer that began in the {result.plan.duration_s:g} s of the "
                        "self-check was whole: run it for longer (--duration), on a machine that is less busy")
    per_token = summary["client_cpu_us_per_token"] or 0.0
    ceiling = WALL_US * CPU_SHARE / per_token if per_token else 0.0
    lag_p99 = percentile(lags, 99)
    failed = summary["failed"] + (0 if summary["valid"] else 1)
    passed = not failed and lag_p99 <= LAG_SHARE * itl_s
    sentence = (f"the client holds {summary['in_flight_users']:.0f} of {summary['users']} streams, lag p99 "
                f"{1e3 * lag_p99:.2f} ms, {per_token:.0f} us CPU a token, ceiling {ceiling:,.0f} tokens/s a process")
    return SelfCheck(
        host=host_key(), users=summary["users"], itl_s=itl_s, ttft_s=ttft_s,
        tokens_per_s=summary["output_tokens_per_s"], in_flight_users=summary["in_flight_users"],
        lag_p50_s=percentile(lags, 50), lag_p99_s=lag_p99,
        ttft_error_p50_s=percentile(errors, 50), ttft_error_p99_s=percentile(errors, 99),
        gap_error_p50_s=percentile(off, 50), gap_error_p99_s=percentile(off, 99), cpu_us_per_token=per_token,
        ceiling_tokens_per_s=ceiling, ceiling_users=ceiling * itl_s, server_late_p50_s=report["late_p50_s"],
        server_late_p99_s=report["late_p99_s"], startup_s=summary["startup_s"], stamps=summary["stamps"],
        passed=passed, sentence=sentence)


def stamp_lags(requests: pd.DataFrame, chunks: pd.DataFrame, writes: Mapping[str, list[float]],
               salt: int) -> np.ndarray:
    """Client's stamp minus server's write, seconds, for each token of the requests whose both ends are whole."""
    stamps = {request: own["time_s"].to_numpy() for request, own in chunks.groupby("request")}
    lags = [np.zeros(0)]
    for row in requests.itertuples():
        wrote = np.asarray(writes.get(f"{fixed_stream(salt, row.user, row.conversation):016x}", ()))
        stamped = stamps.get(row.request, ())
        if len(wrote) == len(stamped):
            lags.append(stamped - wrote)
    return np.concatenate(lags)
