"""Trials on the twin's virtual clock: the same script, the same summary as over HTTP, seconds instead of minutes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from spoc_lib.config import Cluster
from spoc_lib.core import schemas
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import write_json, write_text
from spoc_lib.core.tables import write_table
from spoc_lib.core.version import VERSION
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.virtual import VirtualRun, play
from spoc_lib.metrics import Measured
from spoc_lib.search import recommend
from spoc_lib.search.evaluate import Measurement, TrialFailure, measurement
from spoc_lib.search.remembered import RememberedScript
from spoc_lib.search.space import Flags, FlagSpace
from spoc_lib.sweep.drivers import FreshUsers, ScriptFactory
from spoc_lib.sweep.rung import summarise
from spoc_lib.sweep.slo import goodput
from spoc_lib.workload.script import ConversationScript

#: Decodes share the steps that compute the first histories.
SETTLE_MARGIN = 1.5


@dataclass
class TwinEvaluator:
    """Plays `duration_s` simulated seconds (the first `warmup_s` unmeasured) of `users` users on the twin.

    Every trial meets the same users, sizes and think times (common random numbers): a difference between two
    trials is a difference between their flags. The twin is deterministic: a repeat plays other users.
    evidence: leave files and sample telemetry; without it a trial is its three objectives alone, twice as fast.
    """

    cluster: Cluster
    space: FlagSpace
    script_factory: ScriptFactory
    users: int
    duration_s: float
    warmup_s: float
    gap_cap_s: float = 60.0
    evidence: bool = True
    driver: str = "virtual"

    def __post_init__(self) -> None:
        self._script = RememberedScript(self.script_factory(0))
        passport = self.engine(self.space.defaults).passport()
        self.version = (f"twin {VERSION} {passport['model']} {passport['gpu']}x"
                        f"{passport['gpu_count']} {passport['calibration_id']}")

    def engine(self, flags: Flags) -> EmbeddedEngine:
        """The twin with `flags`; InputError when it cannot be built."""
        return EmbeddedEngine.from_cluster(self.cluster, self.space.twin_flags(flags))

    def evaluate(self, flags: Flags, folder: Path, repeat: int = 0) -> Measurement:
        """Measure `flags`; evidence: command, engine, requests, metrics, rung. The chunks are left out: the seed
        plays them again."""
        started = time.monotonic()
        try:
            engine = self.engine(flags)
        except InputError as error:
            raise TrialFailure("twin-refused", error.message) from error
        script = FreshUsers(self.script_factory).script(repeat) if repeat else self._script
        run = play(script, self.users, engine=engine, duration_s=self.duration_s, warmup_s=self.warmup_s)
        metrics = run.metrics if self.evidence else schemas.METRICS.empty_table().to_pandas()
        row, slo = summarise(run.requests, run.chunks, metrics, run.window, self.cluster.slos, self.users,
                             self.driver, gap_cap_s=self.gap_cap_s)
        if self.evidence:
            self._leave(folder, flags, engine, run, {"rung": row, "slo": slo})
        samples = Measured(run.requests, run.chunks, run.window)
        return measurement(row, slo, users=self.users, driver=self.driver, duration_s=time.monotonic() - started,
                           samples=samples, goodput_per_s=goodput(samples, self.cluster.slos)["good_per_s"],
                           objectives=self.space.objectives)

    def _leave(self, folder: Path, flags: Flags, engine: EmbeddedEngine, run: VirtualRun, summary: dict) -> None:
        write_text(folder / "command.txt", recommend.command(self.cluster, {**self.space.fixed, **flags}) + "\n")
        write_json(folder / "engine.json", {**engine.describe(), "passport": run.passport})
        write_json(folder / "rung.json", summary)
        write_table(folder / "requests.parquet", run.requests, schemas.REQUESTS)
        write_table(folder / "metrics.parquet", run.metrics, schemas.METRICS)


def settle_s(script: ConversationScript, users: int, engine: EmbeddedEngine) -> float:
    """Seconds until a crowd that starts in mid-conversation has its histories in the prefix cache, by the twin.

    At the start every history is foreign to the cache and is computed once; measured before that, a server looks
    slower than it is ever again. An upper bound: histories as if nothing were shared, whole steps of prompt alone,
    times SETTLE_MARGIN for the decodes between them.
    """
    prompts = [user.next(0).prompt_tokens for user in islice(script.users(users), users)]
    chunk = min(engine.flags.max_num_batched_tokens, max(prompts))
    before = sum(p * p for p in prompts) / sum(prompts) / 2  # mean context of a prompt token
    pairs = chunk * (before + chunk / 2)
    window = chunk * (engine.model.sliding_window or 0)
    step = Batch(chunk, 0, 0, 0, 1, chunk, pairs, float(window), int(before), 1)
    return SETTLE_MARGIN * sum(prompts) / chunk * engine.step_time.seconds(step)
