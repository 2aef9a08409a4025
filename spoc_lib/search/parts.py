"""What both kinds of search are made of: the evaluators with their seconds, the study on the twin, the tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from spoc_lib.config import Cluster, Profile, Slo
from spoc_lib.core import schemas
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import write_json
from spoc_lib.core.tables import write_table
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.steptime.parameters import Parameters
from spoc_lib.search import pareto
from spoc_lib.search.heldout import CalibratedTwin
from spoc_lib.search.importance import importances
from spoc_lib.search.real import HttpEvaluator
from spoc_lib.search.result import StudyResult
from spoc_lib.search.space import FlagSpace, digest
from spoc_lib.search.storage import storage_from_environment
from spoc_lib.search.study import Progress, SearchStudy
from spoc_lib.search.table import trials_table
from spoc_lib.search.twin import TwinEvaluator, settle_s
from spoc_lib.sweep.drivers import ScriptFactory

#: Seconds before a trial is measured, as a share of the measured ones: at least, and (over HTTP) at most.
WARMUP_SHARE, WARMUP_MOST = 0.25, 0.5
TABLE_EVERY_S = 2.0
HASHED_USERS, HASHED_TURNS = 8, 4


def workload_digest(script_factory: ScriptFactory, slos: Sequence[Slo], *plan: float) -> str:
    """Identity of what is played and how it is judged: sizes, streams and think times of the first turns of the first
    users, the SLOs (a stored trial holds their verdict), and the plan (users, seconds)."""
    turns = []
    for user in islice(script_factory(0).users(HASHED_USERS), HASHED_USERS):
        history = 0
        for _ in range(HASHED_TURNS):
            turn = user.next(history)
            history = turn.prompt_tokens + turn.output_tokens
            turns.append([turn.persona, turn.prompt_tokens, turn.output_tokens, round(turn.think_time_s, 6),
                          [[str(s.stream), s.tokens] for s in turn.append]])
    return digest([turns, [slo.model_dump(mode="json") for slo in slos], [float(value) for value in plan]])


def screening_twin(cluster: Cluster, profile: Profile, space: FlagSpace, script_factory: ScriptFactory,
                   parameters: Parameters | None = None) -> TwinEvaluator:
    """The twin at the target users for profile.screen_s measured seconds, after the crowd has settled; `parameters` of
    its step time (None: as shipped)."""
    users = cluster.search.target_users
    warmup_s = max(WARMUP_SHARE * profile.screen_s, _settle_s(cluster, space, script_factory, users))
    return CalibratedTwin(cluster, space, script_factory, users, warmup_s + profile.screen_s, warmup_s,
                          profile.gap_cap_s, parameters=parameters)


def prediction_twin(real: HttpEvaluator, parameters: Parameters | None) -> CalibratedTwin:
    """The twin of a real evaluator: its users, script and seconds, `parameters` of the step time (None: as shipped)."""
    return CalibratedTwin(real.cluster, real.space, real.script_factory, real.users, real.duration_s, real.warmup_s,
                          real.gap_cap_s, evidence=False, parameters=parameters)


def http_evaluator(cluster: Cluster, profile: Profile, space: FlagSpace, script_factory: ScriptFactory, *,
                   users: int) -> HttpEvaluator:
    """Real load: profile.http_rung_s measured seconds after the crowd's settling, for which half as long is waited
    at most."""
    seconds = profile.http_rung_s
    try:
        settle_s = _settle_s(cluster, space, script_factory, users)
    except InputError:  # no twin for this engine, so no estimate either
        settle_s = 0.0
    warmup_s = min(WARMUP_MOST * seconds, max(WARMUP_SHARE * seconds, settle_s))
    return HttpEvaluator(cluster, space, script_factory, users, warmup_s + seconds, warmup_s, profile.gap_cap_s)


def _settle_s(cluster: Cluster, space: FlagSpace, script_factory: ScriptFactory, users: int) -> float:
    """The settling time with the engine's default flags: one warm-up for all trials."""
    engine = EmbeddedEngine.from_cluster(cluster, space.twin_flags(space.defaults))
    return settle_s(script_factory(0), users, engine)


def throttled(study: SearchStudy, reference: pareto.Reference, progress: Progress | None) -> Callable[[str], None]:
    """Passes progress on, and keeps `trials.parquet` fresh while the study runs."""
    last = 0.0

    def told(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= TABLE_EVERY_S:
            last = time.monotonic()
            table = trials_table(study.trials(), reference, study.space.objectives)
            write_table(study.folder / "trials.parquet", table, schemas.TRIALS)
        if progress:
            progress(line)

    return told


def twin_study(twin: TwinEvaluator, space: FlagSpace, script_factory: ScriptFactory, folder: Path, seed: int,
               profile: Profile) -> SearchStudy:
    """The study on the virtual clock; trial 0 holds the defaults."""
    workload = workload_digest(script_factory, twin.cluster.slos, twin.users, twin.duration_s, twin.warmup_s)
    return SearchStudy(space, twin, folder, workload, seed, profile.search_population, [space.defaults],
                       storage=storage_from_environment())


def assemble(study: SearchStudy, cluster: Cluster, reference: pareto.Reference, **more: Any) -> StudyResult:
    """The study's tables as a result."""
    objectives = study.space.objectives
    return StudyResult(cluster, study.space, study.seed, study.evaluator.users, reference,
                       trials_table(study.trials(), reference, objectives), importances(study.study, objectives),
                       **more)


def finish(result: StudyResult, folder: Path) -> StudyResult:
    """Write the tables and the result beside the study."""
    write_table(folder / "trials.parquet", result.trials, schemas.TRIALS)
    write_json(folder / "result.json", result.to_dict())
    return result
