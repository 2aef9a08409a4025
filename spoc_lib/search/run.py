"""A whole search: the study, the finalists, the tables, the findings. Resumable at any point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from spoc_lib.config import Cluster, Profile
from spoc_lib.core.errors import InputError
from spoc_lib.search import confirm as confirming
from spoc_lib.search import pareto
from spoc_lib.search.parts import assemble, finish, http_evaluator, screening_twin, throttled, twin_study
from spoc_lib.search.repeats import repeat_front
from spoc_lib.search.result import MEASURED, StudyResult
from spoc_lib.search.screened import search_real
from spoc_lib.search.settings import only_worker, write_settings
from spoc_lib.search.simplify import simplify
from spoc_lib.search.space import FlagSpace, build_space
from spoc_lib.search.study import Progress
from spoc_lib.search.twin import TwinEvaluator
from spoc_lib.sweep.drivers import ScriptFactory


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
    search = _search_twin if cluster.simulated else search_real
    with only_worker(folder):
        settings = write_settings(cluster, profile, folder, seed, trials, confirm, resume)
        return search(cluster, profile, space, script_factory, folder, settings, progress)


def _search_twin(cluster: Cluster, profile: Profile, space: FlagSpace, script_factory: ScriptFactory, folder: Path,
                 settings: Mapping[str, Any], progress: Progress | None) -> StudyResult:
    twin = screening_twin(cluster, profile, space, script_factory)
    study = twin_study(twin, space, script_factory, folder, settings["seed"], profile)
    reference = pareto.reference_point(cluster.slos)
    study.run(settings["trials"], progress=throttled(study, reference, progress))
    result = assemble(study, cluster, reference, passport=twin.engine(space.defaults).passport())
    if result.knee is not None:
        throughput, ttft, itl = (float(result.knee[name]) for name in result.objectives)
        plainer = simplify(space, result.best_flags, (throughput, ttft, itl), twin, folder / "simplified")
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
    repeats = repeat_front(result.trials, wanted, twin, folder, seeds, result.objectives, progress)
    return replace(result, repeats=repeats, probabilities=repeats.probabilities(front, result.seed))


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
