"""A capture at the capacity limit: the engine under nsys, loaded by Locust, windowed once the load is steady."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.config import Cluster
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import write_json
from spoc_lib.core.schemas import METRICS
from spoc_lib.core.tables import write_table
from spoc_lib.metrics import streams
from spoc_lib.nsight import session
from spoc_lib.nsight.capture import await_report, collect, profiling, require_nsys, under_nsys
from spoc_lib.nsight.dcgmpause import paused
from spoc_lib.nsight.nsysrep import find_nsys
from spoc_lib.nsight.plan import gpus_of
from spoc_lib.pipeline.stage import Stage
from spoc_lib.servers import launch
from spoc_lib.sweep.drivers import http_rung
from spoc_lib.sweep.record import RungRecord, Timing

#: Seconds of load beyond warm-up and window: opening and closing the profiler take their time.
MARGIN_S = 10.0


def require(cluster: Cluster, trace: str = "") -> None:
    """InputError, before anything runs, when a capture was asked for that cannot be made here."""
    if trace:
        raise InputError("two-traces", "capture and trace exclude each other: capture a new trace, or read a given one")
    if cluster.engine.kind != "embedded":
        require_nsys(cluster)


def captured(stage: Stage, users: int, origin: str) -> tuple[Path, str]:
    """(the trace as SQLite, where it comes from). The engine starts under nsys, is loaded with `users` users, and the
    profiler's window opens once all of them are answered. InputError for a capture that lacks a rank.

    Leaves in `capture/`: nsys' report, the load's tables, the metrics with DCGM's gap, `capture.json`.
    """
    cluster, flags, folder = stage.cluster, stage.flags(), stage.folder / "capture"
    folder.mkdir(parents=True, exist_ok=True)
    gpus, output, seconds = gpus_of(cluster, flags), folder / "limit", stage.profile.trace_s
    with under_nsys(cluster, output) as traced, launch(traced, flags, folder / "server") as server:
        recorded = bool(cluster.telemetry.dcgm_url or server.dcgm_url)
        with paused(recorded) as pause:
            window = Window(lambda: profiling(server.base_url, server.access), users, stage.profile.warmup_s, seconds)
            rung = _load(stage, server, users, folder, window)
        path = collect(output, stage.folder / "limit.sqlite", gpus)
    write_table(folder / "metrics.parquet", pause.without_gap(rung.metrics), METRICS)
    cost = tracing_cost(rung.chunks, window)
    write_json(
        folder / "capture.json",
        {
            "users": users,
            "gpus": gpus,
            "window_s": [window.opened_s, window.closed_s],
            "steady": window.steady,
            "dcgm_gap_s": [pause.start_s, pause.end_s],
            "dcgm": pause.sentence,
            "cost": cost,
            "problems": rung.problems,
        },
    )
    steady = "once every user was answered" if window.steady else "though not every user was answered yet"
    return path, " ".join(
        (f"Captured by nsys: {seconds:g} s of the engine at {users} users ({origin}), {steady}; "
         f"all {gpus} GPUs are in it.", cost["sentence"], pause.sentence)
    )


def engine_ranges(stage: Stage) -> str:
    """What nsys hears of the embedded engine's steps while Locust loads it over HTTP, in a sentence. It does so with
    the users that the profile plays over HTTP, whom this machine can serve on time."""
    if find_nsys() is None:
        return "nsys is not on this machine, so the engine's own NVTX ranges were not captured beside it."
    folder = stage.folder / "capture"
    folder.mkdir(parents=True, exist_ok=True)
    name, output, users = f"spoc{os.getpid()}", folder / "engine", stage.profile.http_users
    with launch(session.in_session(stage.cluster, name, folder), stage.flags(), folder / "server") as server:
        window = Window(
            lambda: session.recording(name, output), users, 0.25 * stage.profile.http_rung_s, stage.profile.trace_s
        )
        _load(stage, server, users, folder, window)
        report = await_report(output, timeout_s=60)
    return f"Beside it, over HTTP with {users} users: {session.heard(report)}"


@dataclass
class Window:
    """Opens `context` in a thread of its own when the load is steady: after `warmup_s`, and once as many requests as
    users are answered; at the latest after twice the warm-up. opened_s, closed_s: monotonic seconds."""

    context: Callable[[], AbstractContextManager[Any]]
    users: int
    warmup_s: float
    seconds: float
    opened_s: float | None = None
    closed_s: float | None = None
    steady: bool = False
    _thread: threading.Thread | None = None
    _errors: list[Exception] = field(default_factory=list)

    @property
    def load_s(self) -> float:
        """How long the load must last."""
        return 2 * self.warmup_s + self.seconds + MARGIN_S

    def watch(self, state: dict[str, Any]) -> None:
        """Hears the load's progress (`load.run`)."""
        answered = state["completed"] >= self.users
        late = state["elapsed_s"] >= 2 * self.warmup_s
        if self._thread is None and state["elapsed_s"] >= self.warmup_s and (answered or late):
            self.steady = answered
            self._thread = threading.Thread(target=self._run, name="capture window", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            with self.context():
                self.opened_s = time.monotonic()
                time.sleep(self.seconds)
                self.closed_s = time.monotonic()
        except Exception as error:  # told to whoever waits for the window
            self._errors.append(error)

    def wait(self) -> None:
        """Until the window is closed; raises what went wrong in it."""
        if self._thread is None:
            raise InputError(
                "no-window",
                "the load ended before it was steady, so nothing was captured: see the engine's log beside the capture",
            )
        self._thread.join()
        if self._errors:
            raise self._errors[0]


def _load(stage: Stage, server: Any, users: int, folder: Path, window: Window) -> RungRecord:
    timing = Timing(window.load_s, window.warmup_s)
    rung = http_rung(stage.cluster, server, stage.script, users, timing, folder, stage.progress, watch=window.watch)
    window.wait()
    return rung


def tracing_cost(chunks: pd.DataFrame, window: Window) -> dict[str, Any]:
    """Median inter-token latency of the load before the window and in it: what tracing costs, as clients see it.

    chunks: CHUNKS of the load, on the window's clock.
    """
    itl = streams(chunks).gaps.itl
    before, inside = (itl.where((itl.time_s >= start_s) & (itl.time_s < end_s)) for start_s, end_s in (
        (-math.inf, window.opened_s), (window.opened_s, window.closed_s)))
    if not len(before) or not len(inside):
        return {
            "untraced_itl_p50_s": None,
            "traced_itl_p50_s": None,
            "sentence": "No stream ran both before and in the window, so the capture's cost is unknown.",
        }
    untraced, traced = before.percentile(50), inside.percentile(50)
    return {
        "untraced_itl_p50_s": untraced,
        "traced_itl_p50_s": traced,
        "sentence": f"Median inter-token latency was {untraced * 1e3:.1f} ms before the window and "
        f"{traced * 1e3:.1f} ms in it: tracing costs {traced / untraced - 1:+.0%}.",
    }
