"""A whole search: the study, the finalists, the tables, the findings. Resumable at any point."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from spoc_lib.config import Cluster, Profile
from spoc_lib.core import schemas, yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.core.tables import write_table
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.search import confirm as confirming
from spoc_lib.search import pareto
from spoc_lib.search.importance import importances
from spoc_lib.search.real import HttpEvaluator
from spoc_lib.search.repeats import repeat_front
from spoc_lib.search.result import MEASURED, StudyResult
from spoc_lib.search.simplify import simplify
from spoc_lib.search.space import FlagSpace, build_space, digest
from spoc_lib.search.storage import storage_from_environment
from spoc_lib.search.study import Progress, SearchStudy
from spoc_lib.search.table import trials_table
from spoc_lib.search.twin import ScriptFactory, TwinEvaluator, settle_s

SETTINGS = "search.json"
#: Seconds before a trial is measured, as a share of the measured ones: at least, and (over HTTP) at most.
WARMUP_SHARE, WARMUP_MOST = 0.25, 0.5
TABLE_EVERY_S = 2.0
HASHED_USERS, HASHED_TURNS = 8, 4


def run_study(cluster: Cluster, profile: Profile, script_factory: ScriptFactory, folder: Path, *, seed: int = 0,
              trials: int | None = None, confirm: bool = True, resume: bool = False,
              progress: Progress | None = None) -> StudyResult:
    """Search `cluster`'s flags at its target users; everything lands in `folder`.

    trials: slots of the study: on an embedded engine trials on the virtual clock (default: profile.search_trials), on
        a real one real launches (default: profile.http_launches; profile.search_trials more are screened on the twin);
    confirm: put the finalists of an embedded engine before real load over HTTP;
    resume: go on with the search that `folder` holds (also one that was killed); without it a folder that holds a
    search is refused. InputError for a space, workload or engine that cannot be searched.
    """
    if cluster.engine.kind == "remote":
        raise InputError("remote-search", f"cluster '{cluster.name}': a remote engine's flags are fixed, so there is "
                         f"nothing to search: sweep it, or describe how to launch it")
    folder = Path(folder)
    space = build_space(cluster)
    trials = trials or (profile.search_trials if cluster.simulated else profile.http_launches)
    settings = _settle(cluster, profile, folder, seed, trials, confirm, resume)
    if cluster.simulated:
        return _search_twin(cluster, profile, space, script_factory, folder, settings, progress)
    from spoc_lib.search.screened import search_real

    return search_real(cluster, profile, space, script_factory, folder, settings, progress)


def open_settings(folder: Path) -> dict[str, Any]:
    """The settings of the search in `folder`; InputError when there is none."""
    if not (Path(folder) / SETTINGS).is_file():
        raise InputError("no-search", f"{folder} holds no search: give the folder that `spoc search run` wrote")
    return read_json(Path(folder) / SETTINGS, "search settings")


def settings_models(settings: dict[str, Any]) -> tuple[Cluster, Profile]:
    """Cluster and profile as the search was started with, whatever became of their files."""
    return (yamlfile.parse(Cluster, settings["cluster"], SETTINGS),
            yamlfile.parse(Profile, settings["profile"], SETTINGS))


def workload_digest(script_factory: ScriptFactory, *plan: Any) -> str:
    """Identity of what is played: sizes, streams and think times of the first turns of the first users, and the
    plan (users, seconds)."""
    turns = []
    for user in islice(script_factory(0).users(HASHED_USERS), HASHED_USERS):
        history = 0
        for _ in range(HASHED_TURNS):
            turn = user.next(history)
            history = turn.prompt_tokens + turn.output_tokens
            turns.append([turn.persona, turn.prompt_tokens, turn.output_tokens, round(turn.think_time_s, 6),
                          [[str(s.stream), s.tokens] for s in turn.append]])
    return digest([turns, [float(value) for value in plan]])


def screening_twin(cluster: Cluster, profile: Profile, space: FlagSpace,
                   script_factory: ScriptFactory) -> TwinEvaluator:
    """The twin at the target users for profile.screen_s measured seconds, after the crowd has settled."""
    users = cluster.search.target_users
    warmup_s = max(WARMUP_SHARE * profile.screen_s, _settle_s(cluster, space, script_factory, users))
    return TwinEvaluator(cluster, space, script_factory, users, warmup_s + profile.screen_s, warmup_s,
                         profile.gap_cap_s)


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
    engine = EmbeddedEngine.from_cluster(cluster, overrides={**space.fixed, **space.defaults})
    return settle_s(script_factory(0), users, engine)


def throttled(study: SearchStudy, reference: pareto.Reference, progress: Progress | None) -> Callable[[str], None]:
    """Passes progress on, and keeps `trials.parquet` fresh while the study runs."""
    last = 0.0

    def told(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= TABLE_EVERY_S:
            last = time.monotonic()
            write_table(study.folder / "trials.parquet", trials_table(study.trials(), reference), schemas.TRIALS)
        if progress:
            progress(line)

    return told


def _settle(cluster: Cluster, profile: Profile, folder: Path, seed: int, trials: int, confirm: bool,
            resume: bool) -> dict[str, Any]:
    """Write the settings down before the first trial, so that the folder alone can be resumed."""
    if (folder / SETTINGS).is_file() and not resume:
        raise InputError("search-exists", f"{folder} holds a search already: resume it, or name another folder")
    settings = {"cluster": cluster.model_dump(mode="json"), "profile": profile.model_dump(mode="json"),
                "seed": seed, "trials": trials, "confirm": confirm, "workbench": version("spoc-workbench")}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, settings)
    return settings


def _search_twin(cluster: Cluster, profile: Profile, space: FlagSpace, script_factory: ScriptFactory, folder: Path,
                 settings: dict[str, Any], progress: Progress | None) -> StudyResult:
    twin = screening_twin(cluster, profile, space, script_factory)
    study = twin_study(twin, space, script_factory, folder, settings["seed"], profile)
    reference = pareto.reference_point(cluster.slos)
    study.run(settings["trials"], progress=throttled(study, reference, progress))
    result = assemble(study, cluster, reference, passport=twin.engine(space.defaults).passport())
    if result.knee is not None:
        values = tuple(float(result.knee[name]) for name in pareto.OBJECTIVES)
        plainer = simplify(space, result.best_flags, values, twin, folder / "simplified")
        result = replace(result, simplified=plainer if plainer.restored else None)
    if profile.seeds > 1:
        result = _with_repeats(result, twin, folder / "repeats", profile.seeds, progress)
    if settings["confirm"]:
        result.confirmations.extend(_confirmations(result, profile, space, script_factory, folder, progress))
    return finish(result, folder)


def _with_repeats(result: StudyResult, twin: TwinEvaluator, folder: Path, seeds: int,
                  progress: Progress | None) -> StudyResult:
    """The front, the chosen trial and the defaults before other samples of users."""
    front = [int(number) for number in result.front["trial"]]
    wanted = [int(r["trial"]) for r in (result.defaults, result.chosen) if r is not None and r["state"] in MEASURED]
    wanted = list(dict.fromkeys([*wanted, *front]))
    if not wanted:
        return result
    repeats = repeat_front(result.trials, wanted, twin, folder, seeds, progress)
    return replace(result, repeats=repeats, probabilities=repeats.probabilities(front, result.seed))


def twin_study(twin: TwinEvaluator, space: FlagSpace, script_factory: ScriptFactory, folder: Path, seed: int,
               profile: Profile) -> SearchStudy:
    """The study on the virtual clock; trial 0 holds the defaults."""
    workload = workload_digest(script_factory, twin.users, twin.duration_s, twin.warmup_s)
    return SearchStudy(space, twin, folder, workload, seed, profile.search_population, [space.defaults],
                       storage=storage_from_environment())


def assemble(study: SearchStudy, cluster: Cluster, reference: pareto.Reference, **more: Any) -> StudyResult:
    """The study's tables as a result."""
    return StudyResult(cluster, study.space, study.seed, study.evaluator.users, reference,
                       trials_table(study.trials(), reference), importances(study.study), **more)


def finish(result: StudyResult, folder: Path) -> StudyResult:
    """Write the tables and the result beside the study."""
    write_table(folder / "trials.parquet", result.trials, schemas.TRIALS)
    write_json(folder / "result.json", result.to_dict())
    return result


def _confirmations(result: StudyResult, profile: Profile, space: FlagSpace, script_factory: ScriptFactory,
                   folder: Path, progress: Progress | None) -> list[confirming.Confirmation]:
    """Finalists over HTTP at the users that this box holds, each beside the twin at the same users."""
    cluster = result.cluster
    users = min(cluster.search.target_users, profile.http_users)
    http = http_evaluator(cluster, profile, space, script_factory, users=users)
    twin = TwinEvaluator(cluster, space, script_factory, users, http.duration_s, http.warmup_s, profile.gap_cap_s)
    chosen, defaults = (None if row is None else int(row["trial"]) for row in (result.chosen, result.defaults))
    rows = result.trials.set_index("trial")
    return [
        confirming.confirm(role, number, result.best_flags if number == chosen else
                           orjson.loads(rows.loc[number, "flags"]), http, twin,
                           folder / "confirmations" / f"{number:04d}", progress)
        for role, number in confirming.finalists(result.trials, chosen, defaults, profile.search_finalists)
    ]
