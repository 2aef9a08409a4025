"""NSGA-II whose every trial depends on the seed, the trial's slot and the finished trials, and on nothing else.

Optuna's sampler carries its random state in memory, so a resumed study goes another way. Here each slot draws
from its own stream: a killed study that goes on makes the trials that it would have made. A child that repeats a
known engine, or that the engine would refuse, mutates until it does not, since a real trial costs a server start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import NSGAIISampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

#: User attribute that every trial carries once it was answered; a failed trial without it was interrupted.
RECORD = "record"
#: Mutations of an unwanted child before it is taken as it is (a small space may be exhausted).
ATTEMPTS = 64

Unwanted = Callable[[], Callable[[Mapping[str, Any]], bool]]


class SlotSampler(NSGAIISampler):
    """Optuna's NSGA-II, seeded by slot.

    distributions: the whole space, so that the first generation is drawn with the same care as the others;
    unwanted: called once a trial, gives what says of a child's parameters that they need no trial (known, invalid).
    """

    def __init__(self, *, seed: int, population_size: int, distributions: Mapping[str, BaseDistribution],
                 unwanted: Unwanted | None = None) -> None:
        super().__init__(seed=seed, population_size=population_size)
        self._seed, self._population = seed, population_size
        self._distributions = dict(distributions)
        self._unwanted = unwanted
        self._start(slot=0)

    def _start(self, slot: int) -> None:
        breeding, drawing, mutating = np.random.SeedSequence([self._seed, slot]).generate_state(3)
        self._breeder = _Breeder(seed=int(breeding), population_size=self._population)
        # A stream of its own: with one seed for both, a mutated value would repeat the crossover's first draw.
        self._drawer = RandomSampler(seed=int(drawing))
        self._mutation = np.random.default_rng(int(mutating))

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Seed the draws by the trial's slot (Optuna calls this)."""
        self._start(slot_of(study, trial.number))

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All flags that have more than one value (Optuna calls this)."""
        return {name: dist for name, dist in self._distributions.items() if not dist.single()}

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial,
                        search_space: dict[str, BaseDistribution]) -> dict[str, Any]:
        """A child of the population, drawn again while it is unwanted (Optuna calls this)."""
        child = self._breeder.sample_relative(study, trial, search_space)
        for name, distribution in search_space.items():
            if name not in child:  # the first generation, or a mutated gene
                child[name] = self._drawer.sample_independent(study, trial, name, distribution)
        unwanted = self._unwanted() if self._unwanted else None
        for _ in range(ATTEMPTS):
            if unwanted is None or not unwanted(child):
                break
            name = str(self._mutation.choice(list(search_space)))
            child[name] = self._drawer.sample_independent(study, trial, name, search_space[name])
        return child

    def sample_independent(self, study: optuna.Study, trial: FrozenTrial, param_name: str,
                           param_distribution: BaseDistribution) -> Any:
        """One flag at random (Optuna calls this)."""
        return self._drawer.sample_independent(study, trial, param_name, param_distribution)


class _Breeder(NSGAIISampler):
    """Parents in the order of their numbers: Optuna hands them to the first child of a generation in the order of
    selection and to the others by number, so a first child that is made again would have other parents."""

    def select_parent(self, study: optuna.Study, generation: int) -> list[FrozenTrial]:
        return sorted(super().select_parent(study, generation), key=lambda trial: trial.number)


def interrupted(trial: FrozenTrial) -> bool:
    """Whether `trial` was cut off before it was answered."""
    return trial.state == TrialState.FAIL and RECORD not in trial.user_attrs


def slot_of(study: optuna.Study, number: int) -> int:
    """The place of trial `number` in the search: its number less the interrupted trials before it."""
    lost = sum(1 for t in study.get_trials(deepcopy=False) if t.number < number and interrupted(t))
    return number - lost
