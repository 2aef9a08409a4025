"""The Optuna study of a search: asked, answered, cached, resumed.

One trial is one slot of the search. Its record (a user attribute) says how it ended:
complete (SLOs met), infeasible (measured, an SLO missed), duplicate (answered from the cache), failed (with a
class, never a number), invalid (a combination that the engine refuses: never launched).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import plain, write_json
from spoc_lib.search import recommend, tickets
from spoc_lib.search.evaluate import Evaluator, TrialFailure
from spoc_lib.search.pareto import DIRECTIONS
from spoc_lib.search.sampler import RECORD, SlotSampler, interrupted
from spoc_lib.search.space import Flags, FlagSpace, digest, flags_key
from spoc_lib.search.storage import answering, file_url, open_storage

Progress = Callable[[str], None]
Avoid = Callable[["SearchStudy", Flags], str | None]
Propose = Callable[["SearchStudy", int], "Proposal | None"]
REPEAT = "repeat"


@dataclass(frozen=True)
class StudyKey:
    """What must be equal for an earlier answer to count: the workload, the engine, the users, the space."""

    workload: str
    engine: str
    space: str

    def of(self, flags: Flags) -> str:
        """Identity of an answer: these flags, this workload, this engine."""
        return digest([flags_key(flags), self.workload, self.engine])


@dataclass(frozen=True, slots=True)
class Proposal:
    """Flags for one slot; with `repeat` they are measured again although their answer is known."""

    flags: Flags
    repeat: bool = False


@dataclass
class SearchStudy:
    """A search of `space` by `evaluator`, kept in `folder` (or in the database `storage`).

    initial: flags of the first slots, the defaults first; seed and population: of NSGA-II;
    propose: flags for a slot beyond the initial ones, None to let NSGA-II choose; it must depend on the finished
        trials alone, so that a resumed search goes the same way;
    avoid: says why flags need no launch (learned crash avoidance), None to let them through.
    """

    space: FlagSpace
    evaluator: Evaluator
    folder: Path
    workload: str
    seed: int
    population: int
    initial: Sequence[Flags] = ()
    storage: str | None = None
    propose: Propose | None = None
    avoid: Avoid | None = None
    sampler: optuna.samplers.BaseSampler | None = None
    _study: optuna.Study | None = field(default=None, repr=False)

    @property
    def key(self) -> StudyKey:
        """What an answer must share to be taken from the cache."""
        return StudyKey(self.workload, self.evaluator.version, self.space.digest())

    @property
    def name(self) -> str:
        """Workers that search the same thing meet in the same study."""
        return "search-" + digest([self.key.workload, self.key.engine, self.key.space, self.seed])

    @property
    def distributed(self) -> bool:
        """Whether other workers may be at the same study: in a database that was named, not in the run's file."""
        return self.storage is not None

    @property
    def study(self) -> optuna.Study:
        """The Optuna study, created or loaded on first use."""
        if self._study is None:
            self._study = self._open()
        return self._study

    def run(self, trials: int, *, launches: int | None = None, progress: Progress | None = None) -> None:
        """Go on until `trials` slots are answered, or `launches` measurements were paid for; InputError when the
        study's database stops answering."""
        with answering(self.folder):
            self._run(trials, launches, progress)

    def _run(self, trials: int, launches: int | None, progress: Progress | None) -> None:
        if self.distributed:
            self._issue_tickets(trials)
        else:
            self.mark_leftovers()
        while (slot := self.answered()) < trials or self.distributed:
            if self.distributed and not self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                break  # every ticket is taken; those of dead workers come back by themselves
            if launches is not None and self.paid() >= launches:
                break
            if not self.distributed:
                self._enqueue(slot)
            self.study.optimize(self._objective, n_trials=1, catch=(TrialFailure,))
            if progress:
                progress(self._line(trials))

    def answered(self) -> int:
        """Slots that have their answer."""
        return sum(1 for t in self.trials() if t.state.is_finished() and not interrupted(t))

    def paid(self) -> int:
        """Trials that really ran."""
        return sum(1 for t in self.trials() if record_of(t).get("state") in ("complete", "infeasible", "failed"))

    def trials(self) -> list[FrozenTrial]:
        """All trials in the order of their slots, interrupted ones included."""
        return self.study.get_trials(deepcopy=False)

    def mark_leftovers(self) -> int:
        """Trials that a killed process left RUNNING become FAIL and their slots are run again; one that had its record
        already, and was killed before Optuna was told, keeps its answer."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        for trial in running:
            values = record_of(trial).get("values")
            if values:
                self.study.tell(trial.number, [float(value) for value in values])
            else:
                self.study.tell(trial.number, state=TrialState.FAIL)
        return len(running)

    def known(self, key: str) -> FrozenTrial | None:
        """The first trial that measured what `key` stands for, or failed at it."""
        for trial in self.trials():
            record = record_of(trial)
            if record.get("key") == key and record["state"] in ("complete", "infeasible", "failed"):
                return trial
        return None

    def _open(self) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder.mkdir(parents=True, exist_ok=True)
        storage = self._open_storage()
        sampler = self.sampler or SlotSampler(seed=self.seed, population_size=self.population,
                                              distributions=self.space.distributions(), unwanted=self._unwanted)
        self._check_same(storage)
        study = optuna.create_study(storage=storage, study_name=self.name, directions=list(DIRECTIONS),
                                    sampler=sampler, load_if_exists=True)
        with warnings.catch_warnings():  # names for optuna-dashboard; Optuna still calls them experimental
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names(list(self.space.objectives))
        return study

    def _open_storage(self) -> RDBStorage:
        return open_storage(self.storage or file_url(self.folder / "study.db"),
                            heartbeat=self.distributed)

    def _check_same(self, storage: RDBStorage) -> None:
        """The folder's study must be the one that is asked for; Optuna itself would silently open a second one."""
        names = optuna.get_all_study_names(storage)
        if not self.distributed and names and self.name not in names:
            raise InputError("other-study", f"{self.folder} holds a search of another space, workload, SLOs, engine "
                             f"version or seed: resume it with its own settings, or use another folder")

    def _enqueue(self, slot: int) -> None:
        """Put the slot's fixed flags, if it has any, before the sampler (once: a kill may have come in between)."""
        if self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            return
        if slot < len(self.initial):
            self.study.enqueue_trial(dict(self.initial[slot]))
        elif self.propose is not None and (proposal := self.propose(self, slot)) is not None:
            self.study.enqueue_trial(dict(proposal.flags), user_attrs={REPEAT: proposal.repeat})

    def _issue_tickets(self, trials: int) -> None:
        """The first worker puts one waiting trial a slot into the database; each is then taken exactly once."""
        tickets.issue(self.study, self._open_storage(), list(self.initial), trials)

    def _unwanted(self) -> Callable[[Mapping[str, Any]], bool]:
        keys = {record_of(t).get("key") for t in self.trials()}

        def unwanted(params: Mapping[str, Any]) -> bool:
            flags = self.space.canonical(params)
            return (self.key.of(flags) in keys or self.space.invalid(flags) is not None
                    or (self.avoid is not None and self.avoid(self, flags) is not None))

        return unwanted

    def _objective(self, trial: optuna.Trial) -> tuple[float, ...]:
        if self.distributed and tickets.TICKET not in trial.user_attrs:  # another worker took the last one in between
            raise TrialFailure("no-ticket", "every slot is taken")  # without a record it is no answer of the search
        params = {name: trial.suggest_categorical(name, dist.choices)
                  for name, dist in self.space.distributions().items()}
        flags = self.space.canonical(cast("Flags", params))  # Optuna allows None as a choice, a space has none
        key = self.key.of(flags)
        folder = self.folder / "trials" / f"{trial.number:04d}"
        record: dict[str, Any] = {"flags": flags, "key": key, "driver": self.evaluator.driver,
                                  "evidence": str(folder.relative_to(self.folder))}
        if reason := self.space.invalid(flags):
            return self._fail(trial, record, "invalid", "invalid", reason)
        earlier = self.known(key)
        again = bool(trial.user_attrs.get(REPEAT))
        if earlier is not None and not again:
            return self._repeat(trial, record, earlier)
        if earlier is not None:
            record["duplicate_of"] = earlier.number
        if self.avoid is not None and (reason := self.avoid(self, flags)):
            return self._fail(trial, record, "invalid", "avoided", reason)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            measured = self.evaluator.evaluate(flags, folder, repeat=trial.number if again else 0)
        except TrialFailure as failure:
            record["duration_s"] = time.monotonic() - started
            return self._fail(trial, record, "failed", failure.failure_class, failure.message)
        record |= {"duration_s": measured.duration_s, "constraints": measured.constraints,
                   "violation": measured.violation, "values": list(measured.values), "figures": measured.figures}
        if measured.note:
            record["reason"] = measured.note
        return self._answer(trial, record, "complete" if measured.violation <= 0 else "infeasible")

    def _answer(self, trial: optuna.Trial, record: dict[str, Any], state: str) -> tuple[float, ...]:
        for name, value in record["constraints"].items():
            trial.set_constraint(name, value)
        self._store(trial, record | {"state": state})
        return tuple(record["values"])

    def _repeat(self, trial: optuna.Trial, record: dict[str, Any], earlier: FrozenTrial) -> tuple[float, ...]:
        old = record_of(earlier)
        record |= {"duplicate_of": earlier.number, "evidence": old["evidence"], "duration_s": 0.0}
        if old["state"] == "failed":
            return self._fail(trial, record, "duplicate", old["failure_class"], old["reason"])
        record |= {name: old[name] for name in ("constraints", "violation", "values", "figures")}
        return self._answer(trial, record, "duplicate")

    def _fail(self, trial: optuna.Trial, record: dict[str, Any], state: str, failure_class: str,
              reason: str) -> tuple[float, ...]:
        self._store(trial, record | {"state": state, "failure_class": failure_class, "reason": reason})
        raise TrialFailure(failure_class, reason)

    def _store(self, trial: optuna.Trial, record: dict[str, Any]) -> None:
        record = {"violation": None, "duration_s": 0.0, **record}
        if record["state"] not in ("duplicate", "invalid"):
            write_json(self.folder / record["evidence"] / "verdict.json", {"trial": trial.number, **record})
        trial.set_user_attr(RECORD, plain(record))

    def _line(self, trials: int) -> str:
        last = max((t for t in self.trials() if RECORD in t.user_attrs), key=lambda t: t.number)
        record = record_of(last)
        told = recommend.point(record["figures"], self.space.objectives) if "figures" in record else record["reason"]
        return f"trial {self.answered()}/{trials} {record['state']}: {told}"


def record_of(trial: FrozenTrial) -> dict[str, Any]:
    """How `trial` ended; empty while it waits, runs, or where it was interrupted."""
    return trial.user_attrs.get(RECORD, {})
