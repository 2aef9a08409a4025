"""The search on a real engine: the twin proposes, real launches decide, their answers recalibrate the twin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from spoc_lib.config import Cluster, Profile
from spoc_lib.core.errors import InputError
from spoc_lib.engine.steptime.parameters import Parameters
from spoc_lib.search import noise, pareto
from spoc_lib.search.acquire import expected_gain
from spoc_lib.search.avoid import CrashAvoidance, switched_on
from spoc_lib.search.heldout import fit_to_defaults, held_out
from spoc_lib.search.helptext import check_flags
from spoc_lib.search.parts import (
    assemble,
    finish,
    http_evaluator,
    prediction_twin,
    screening_twin,
    throttled,
    twin_study,
    workload_digest,
)
from spoc_lib.search.recalibrate import encode, fit, misled
from spoc_lib.search.result import StudyResult
from spoc_lib.search.space import Flags, FlagSpace, flags_key
from spoc_lib.search.storage import storage_from_environment
from spoc_lib.search.study import Progress, Proposal, SearchStudy, record_of
from spoc_lib.sweep.drivers import ScriptFactory

#: From this many launches on, the last one measures the defaults again (noise and drift) …
DEFAULTS_AGAIN_FROM = 8
#: … and the one before it the knee.
KNEE_AGAIN_FROM = 16
#: Before two engines are measured twice, one measurement is taken to be this exact (in logarithms).
ASSUMED_NOISE_SD = 0.03
#: A space of more engines than this is not counted out.
MOST_COUNTED = 10_000


@dataclass(frozen=True)
class Screened:
    """An engine as the twin has it. room: largest value / limit over the SLOs on TTFT, and on ITL."""

    flags: Flags
    values: tuple[float, float, float]
    room: tuple[float, float]


@dataclass
class ScreenedPlan:
    """Fills the slots of a real study from the twin's trials.

    Each slot goes to the engine of the largest expected gain of hypervolume under the corrected twin. The last of
    `launches` repeats the defaults, in a long search the one before it the knee (`noise`). Depends on the finished
    trials and `seed` alone.
    """

    space: FlagSpace
    pool: list[Screened]
    reference: pareto.Reference
    launches: int
    seed: int
    _encoded: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._encoded = encode(self.space, [s.flags for s in self.pool]) if self.pool else np.zeros((0, 1))
        self._index = {flags_key(s.flags): i for i, s in enumerate(self.pool)}

    def __call__(self, study: SearchStudy, slot: int) -> Proposal | None:
        if self.launches >= DEFAULTS_AGAIN_FROM and slot == self.launches - 1:
            return Proposal(self.space.defaults, repeat=True)
        if self.launches >= KNEE_AGAIN_FROM and slot == self.launches - 2:
            return self._knee_again(study)
        return self.next(study, slot)

    def next(self, study: SearchStudy, slot: int) -> Proposal | None:
        """The engine to launch next; None when the twin knows no further one."""
        answered = {flags_key(r["flags"]) for r in records(study) if r["state"] != "duplicate"}
        open_ones = np.array([flags_key(s.flags) not in answered and not (study.avoid and study.avoid(study, s.flags))
                              for s in self.pool], dtype=bool)
        if not open_ones.any():
            return None
        asked = np.flatnonzero(open_ones)
        index, ratio = self.log_ratios(study)
        correction = fit(self._encoded[index], ratio, self._encoded[asked], ASSUMED_NOISE_SD)
        random = np.random.default_rng([self.seed, slot])
        gain = expected_gain(np.array([self.pool[i].values for i in asked]),
                             np.array([self.pool[i].room for i in asked]), correction, self._members(study),
                             self.reference, random)
        return Proposal(self.pool[asked[int(np.argmax(gain))]].flags)

    def log_ratios(self, study: SearchStudy) -> tuple[np.ndarray, np.ndarray]:
        """Indices (n,) into the pool of engines measured by both, and log(real / twin) of their objectives (n, 3)."""
        index, ratio = [], []
        for record in measured(study):
            where = self._index.get(flags_key(record["flags"]))
            if where is None or min(*record["values"], *self.pool[where].values) <= 0:
                continue
            index.append(where)
            ratio.append(np.log(np.array(record["values"]) / np.array(self.pool[where].values)))
        return np.array(index, dtype=int), np.array(ratio, dtype=float).reshape(-1, 3)

    def _members(self, study: SearchStudy) -> np.ndarray:
        return np.array([r["values"] for r in measured(study) if r["violation"] <= 0], dtype=float).reshape(-1, 3)

    def _knee_again(self, study: SearchStudy) -> Proposal | None:
        found = [r for r in measured(study) if r["violation"] <= 0]
        points = np.array([r["values"] for r in found], dtype=float).reshape(-1, 3)
        chosen = pareto.knee(points, pareto.front(points))
        return None if chosen is None else Proposal(found[chosen.index]["flags"], repeat=True)


def records(study: SearchStudy) -> list[dict[str, Any]]:
    """Records of all answered trials, in order."""
    return [r for r in map(record_of, study.trials()) if r]


def measured(study: SearchStudy) -> list[dict[str, Any]]:
    """Records of all measured trials, repeats included."""
    return [r for r in records(study) if r["state"] in ("complete", "infeasible")]


def screened(study: SearchStudy) -> list[Screened]:
    """What a study on the twin measured, one entry a distinct engine."""
    found = []
    for record in measured(study):
        ratios = [(name, 1.0 + value) for name, value in record["constraints"].items()]
        ttft = max((r for name, r in ratios if " ttft " in name or " e2e " in name), default=0.0)
        itl = max((r for name, r in ratios if " ttft " not in name), default=0.0)
        found.append(Screened(record["flags"], tuple(record["values"]), (ttft, itl)))
    return found


def search_real(cluster: Cluster, profile: Profile, space: FlagSpace, script_factory: ScriptFactory, folder: Path,
                settings: Mapping[str, Any], progress: Progress | None) -> StudyResult:
    """Launch the defaults, fit the twin to them, screen on it (into `folder`/screen), launch up to
    `settings['trials']` times, say what repeats and the twin were worth."""
    seed, users = settings["seed"], cluster.search.target_users
    reference = pareto.reference_point(cluster.slos)
    unchecked = check_flags(cluster, space, folder)
    real = http_evaluator(cluster, profile, space, script_factory, users=users)
    workload = workload_digest(script_factory, cluster.slos, users, real.duration_s, real.warmup_s)
    study = SearchStudy(space, real, folder, workload, seed, profile.search_population, [space.defaults],
                        storage=storage_from_environment(), avoid=CrashAvoidance() if switched_on() else None)
    told = throttled(study, reference, progress)
    if not study.distributed:  # workers that share a study take their slots as they come
        study.run(1, progress=told)
    parameters, why_not = fit_to_defaults(study, cluster)
    pool, notes = _screen(cluster, profile, space, script_factory, folder / "screen", seed, parameters, progress)
    notes += [sentence for sentence in (unchecked, why_not) if sentence]
    plan = study.propose = ScreenedPlan(space, pool, reference, settings["trials"], seed)
    study.run(settings["trials"], launches=settings["trials"], progress=told)
    probabilities, sentences = noise_findings(study, cluster, seed)
    index, ratio = plan.log_ratios(study)
    if len(index) >= 2:
        twin = np.array([pool[i].values for i in index])
        notes += misled(twin, twin * np.exp(ratio), space.objectives)
    predicted = held_out(study, cluster, partial(prediction_twin, real), parameters)
    notes += [predicted.sentence, saved(study, space, len(pool) - len(set(index.tolist())))]
    result = assemble(study, cluster, reference, simulated=False, extra=list(dict.fromkeys(notes + sentences)),
                      probabilities=probabilities, heldout=predicted.table)
    return finish(result, folder)


def saved(study: SearchStudy, space: FlagSpace, judged: int) -> str:
    """What the twin spared, in launches and in time; judged: engines that only the twin measured."""
    paid = [r["duration_s"] for r in records(study) if r["state"] in ("complete", "infeasible", "failed")]
    grid = sum(1 for _ in islice(space.grid(), MOST_COUNTED))
    more = "more than " if grid == MOST_COUNTED else ""
    minutes = judged * float(np.mean(paid)) / 60 if paid else 0.0
    return (f"{len(paid)} real launches of {more}{grid} distinct engines; {judged} more were judged by the twin alone, "
            f"which saved as many launches, {minutes:,.0f} minutes at this search's mean of "
            f"{np.mean(paid) if paid else 0:.0f} s each.")


def _screen(cluster: Cluster, profile: Profile, space: FlagSpace, script_factory: ScriptFactory, folder: Path,
            seed: int, parameters: Parameters | None, progress: Progress | None) -> tuple[list[Screened], list[str]]:
    try:
        twin = screening_twin(cluster, profile, space, script_factory, parameters)
    except InputError as error:
        return [], [f"There was no screening, since the twin cannot stand for this engine: {error.message}."]
    study = twin_study(twin, space, script_factory, folder, seed, profile)
    reference = pareto.reference_point(cluster.slos)
    study.run(profile.search_trials, progress=throttled(study, reference, progress))
    if parameters is not None:
        return screened(study), ["The twin that screened was fitted to the launch of the defaults."]
    warnings = twin.engine(space.defaults).passport().get("warnings", [])
    return screened(study), [f"Screening by the twin: {warning}." for warning in warnings]


def noise_findings(study: SearchStudy, cluster: Cluster, seed: int) -> tuple[dict[int, float], list[str]]:
    """({trial: chance to be on the front}, sentences) from the repeats of a study."""
    table = pd.DataFrame([{"trial": t.number, "key": r["key"], "values": r["values"]}
                          for t in study.trials() if (r := record_of(t)) and r["state"] in ("complete", "infeasible")
                          and min(r["values"]) > 0])  # noise is a matter of logarithms
    if table.empty:
        return {}, []
    groups = [(int(g["trial"].iloc[0]), np.array(g["values"].tolist(), dtype=float))
              for _, g in table.groupby("key", sort=False)]
    repeats = [values for _, values in groups]
    sd = noise.relative_sd(repeats)
    chance = noise.membership(repeats, sd, _limits(cluster), seed)
    known = noise.repeated(repeats)
    throughput, ttft, itl = (f"{value:.1%}" for value in sd)
    again = "one repeat" if known == 1 else f"{known} repeats"
    sentences = [f"One measurement scatters by {throughput} in throughput, {ttft} in p95 TTFT and {itl} in p95 ITL "
                 f"(standard deviation from {again} and an assumed {noise.UNKNOWN_SD:.0%} that counts as "
                 f"{noise.UNKNOWN_COUNTS})." if known else
                 f"No engine was measured twice: {noise.UNKNOWN_SD:.0%} of noise is assumed in every objective."]
    first = groups[0][1]
    if len(first) > 1:
        sentences.append(noise.drift(first[0], first[-1], sd, study.space.objectives).sentence)
    return {number: float(p) for (number, _), p in zip(groups, chance, strict=True)}, sentences


def _limits(cluster: Cluster) -> np.ndarray:
    """(3,) the limits that SLOs on everybody's p95 set for the objectives; inf where there is none."""
    limits = [np.inf, np.inf, np.inf]
    for slo in cluster.slos:
        column = {"ttft": 1, "itl": 2}.get(slo.metric)
        if column and slo.persona == "all" and slo.percentile == 95:
            limits[column] = min(limits[column], slo.limit_s)
    return np.array(limits)
