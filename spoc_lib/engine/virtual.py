"""The virtual clock: a whole workload against the twin, far faster than real time.

`play` is a closed loop. User k thinks, sends, waits for its reply, thinks again; the script says what and how long,
the core decides every step, the step model how long a step takes. A token is visible when its step ends; with
asynchronous scheduling a step is planned when the one before it starts, and that delay is in TTFT. What is in flight
at the end is censored.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from spoc_lib.core.errors import InputError
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.fast import play as fast
from spoc_lib.engine.runlog import RunLog, chunks_table, requests_table, steps_table
from spoc_lib.engine.virtual_metrics import metrics_table
from spoc_lib.engine.virtual_plain import PlainRun
from spoc_lib.workload.script import ConversationScript


@dataclass(frozen=True)
class VirtualRun:
    """A finished run; tables are made when first asked for.

    requests (REQUESTS), chunks (CHUNKS), metrics (METRICS, 1 s grid), steps (see `runlog.steps_table`): times are
    simulated seconds from 0. window: (start, end) that counts, warm-up excluded. wall_s: seconds the playing took,
    simulated_s: seconds played; setup_s: seconds before that: seating the users (a stationary start draws several
    conversations for each), loading the compiled loop. core: "fast" or "plain".
    """

    log: RunLog
    engine: EmbeddedEngine
    users: int
    window: tuple[float, float]
    simulated_s: float
    wall_s: float
    setup_s: float
    core: str
    _tables: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def requests(self) -> pd.DataFrame:
        """REQUESTS of the run."""
        if "requests" not in self._tables:
            self._tables["requests"] = requests_table(self.log, self._chunks()[1])
        return self._tables["requests"]

    @property
    def chunks(self) -> pd.DataFrame:
        """CHUNKS of the run."""
        return self._chunks()[0]

    @property
    def metrics(self) -> pd.DataFrame:
        """METRICS of the run, sampled on the virtual clock."""
        if "metrics" not in self._tables:
            self._tables["metrics"] = metrics_table(self.log, self.engine, self.simulated_s)
        return self._tables["metrics"]

    @property
    def steps(self) -> pd.DataFrame:
        """The engine's steps, one row each (`runlog.steps_table`)."""
        if "steps" not in self._tables:
            self._tables["steps"] = steps_table(self.log)
        return self._tables["steps"]

    @property
    def passport(self) -> dict[str, Any]:
        """The engine's passport, plus `outside`: sentences on where this run left the measured range."""
        issued = self.engine.passport()
        if "range" not in issued or not len(self.log.turns):
            return issued
        prompts = np.array([turn.prompt_tokens for turn in self.log.turns])
        replies = np.array([turn.output_tokens for turn in self.log.turns])
        running = self.log.steps["running"]
        return issued | {"outside": self.engine.outside(
            concurrency=float(running.max()) if len(running) else None, prompt_tokens=float(prompts.max()),
            context_tokens=float((prompts + replies).max()), cached_tokens=float(max(self.log.cached.max(), 0)))}

    @property
    def speed(self) -> float:
        """Simulated seconds a wall second."""
        return self.simulated_s / self.wall_s if self.wall_s else float("inf")

    def _chunks(self):
        if "chunks" not in self._tables:
            self._tables["chunks"] = chunks_table(self.log, self.engine.flags.stream_interval)
        return self._tables["chunks"]


def compile_ahead() -> None:
    """Compile the fast core into numba's cache, where it is not there yet: half a minute on a machine's first run."""
    from spoc_lib.config import load_cluster
    from spoc_lib.workload import build_script
    from spoc_lib.workload.personas import load_personas

    cluster = load_cluster("sim-4xh100")
    fast.FastRun(EmbeddedEngine.from_cluster(cluster), build_script(load_personas(cluster.personas), 1), 1,
                 lambda prompt_tokens: 0.0)


def play(script: ConversationScript, users: int, *, engine: EmbeddedEngine, duration_s: float, warmup_s: float = 0,
         seed: int = 0, core: Literal["auto", "fast", "plain"] = "auto") -> VirtualRun:
    """Play `users` users of `script` for `duration_s` simulated seconds.

    The run is a function of its arguments: the same script gives the same bytes (`seed` is the script's business;
    nothing here is random). core: "plain" takes the block-by-block core, "fast" the extent core, which decides the
    same; "auto" the fast one wherever it knows the model's cache layout. InputError for an empty window.
    """
    if users < 1 or duration_s <= 0 or not 0 <= warmup_s < duration_s:
        raise InputError("bad-window", f"{users} users for {duration_s:g} s with {warmup_s:g} s of warm-up: users must "
                         "be at least 1 and the warm-up shorter than the run")
    chosen = core if core != "auto" else "fast" if fast.supports(engine) else "plain"
    frontend = getattr(engine.step_time, "frontend_seconds", lambda prompt_tokens: 0.0)
    began = time.perf_counter()
    run: fast.FastRun | PlainRun = (fast.FastRun(engine, script, users, frontend) if chosen == "fast"
                                    else PlainRun(engine.core(), script, users, frontend))
    seated = time.perf_counter()
    log = run.run(duration_s)
    return VirtualRun(log, engine, users, (float(warmup_s), float(duration_s)), float(duration_s),
                      time.perf_counter() - seated, seated - began, chosen)
