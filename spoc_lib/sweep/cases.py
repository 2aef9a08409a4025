"""A question to the twin in plain values: one cluster, one workload, one way to judge; asked alone or many at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from spoc_lib.config import Cluster, Profile
from spoc_lib.core.errors import InputError
from spoc_lib.core.limits import worker_pool
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.steptime.model import StepTimeModel
from spoc_lib.sweep.drivers import virtual_rung
from spoc_lib.sweep.quick import QuickCapacity, quick_capacity
from spoc_lib.sweep.record import RungRecord, Timing
from spoc_lib.workload import build_script
from spoc_lib.workload.personas import PersonaSet
from spoc_lib.workload.script import AroundScript, ConversationScript, Turn, UserScript

#: Salt of the quick answers' users: the same in every answer, foreign to the sweep's.
SALT = 2_000


@dataclass(frozen=True)
class Case:
    """cluster with its SLOs; flags: engine flags over the cluster's; personas: a set, or a name or path.

    gap_cap_s, think_scale: think times are capped, then multiplied; start: cold | stationary; measured_s, warmup_s:
    simulated seconds of a rung; near: users to begin at; parameters: step-time parameters (name -> value) in the
    calibration's place; shared_ratio: most of a first prompt that is common ground (None: the set's own).
    """

    cluster: Cluster
    personas: PersonaSet | str
    flags: dict[str, Any] = field(default_factory=dict)
    gap_cap_s: float = 60.0
    think_scale: float = 1.0
    start: Literal["cold", "stationary"] = "stationary"
    measured_s: float = 300.0
    warmup_s: float = 30.0
    seed: int = 1
    near: int = 60
    parameters: dict[str, float] = field(default_factory=dict)
    shared_ratio: float | None = None

    @classmethod
    def of(cls, cluster: Cluster, profile: Profile, flags: dict[str, Any] | None = None, **changed: Any) -> Case:
        """The question that a sweep of `profile` asks, in rungs of at most 300 s."""
        return cls(cluster, cluster.personas, dict(flags or {}), **{**dict(
            gap_cap_s=profile.gap_cap_s, start=profile.start, measured_s=min(profile.rung_s, 300.0)), **changed})

    def changed(self, **fields: Any) -> Case:
        """The same question with some fields changed."""
        return replace(self, **fields)

    def engine(self) -> EmbeddedEngine:
        """The twin; InputError where the model does not fit or the flags contradict each other."""
        engine = EmbeddedEngine.from_cluster(self.cluster, self.flags)
        if not self.parameters:
            return engine
        model = step_model(engine)
        return replace(engine, step_time=model.with_parameters(model.parameters.model_copy(update=self.parameters)))

    def script(self, engine: EmbeddedEngine) -> ConversationScript:
        """The users' conversations, within the engine's context."""
        from spoc_lib.workload.personas import load_personas

        personas = load_personas(self.personas) if isinstance(self.personas, str) else self.personas
        geometry = None if self.shared_ratio is None else \
            personas.geometry.model_copy(update={"max_shared_ratio": self.shared_ratio})
        script = build_script(personas, self.seed, salt=SALT, gap_cap_s=self.gap_cap_s, start=self.start,
                              context_limit=engine.max_model_len, geometry=geometry)
        return script if self.think_scale == 1 else Paced(script, self.think_scale)

    def answer(self, trying: Callable[[int], None] = lambda users: None) -> QuickCapacity:
        """Its capacity; InputError as in `engine`. trying: is told the users of each rung before it is played."""
        return judged([self], trying)[0]


def judged(cases: Sequence[Case], trying: Callable[[int], None] = lambda users: None) -> list[QuickCapacity]:
    """The capacity of cases that differ only in their SLOs: each rung is played once and judged by all of them."""
    case = cases[0]
    engine = case.engine()
    script = case.script(engine)
    timing = Timing(case.measured_s + case.warmup_s, case.warmup_s)

    def play(users: int) -> RungRecord:
        trying(users)
        return virtual_rung(engine, script, users, timing, case.seed)

    shared = cache(play) if len(cases) > 1 else play  # a lone case plays no rung twice, and records are large
    return [quick_capacity(engine, shared, one.cluster.slos, near=one.near) for one in cases]


def answers(cases: Sequence[Case], workers: int | None = None) -> list[QuickCapacity | str]:
    """The answer of each case in its place, or the sentence why there is none; several at a time."""
    alike: dict[str, list[int]] = {}
    for number, case in enumerate(cases):
        alike.setdefault(repr(case.changed(cluster=case.cluster.model_copy(update={"slos": []}))), []).append(number)
    groups = [[cases[number] for number in numbers] for numbers in alike.values()]
    workers = min(workers or os.cpu_count() or 1, 4, len(groups))
    if workers < 2:
        found = [_judged(group) for group in groups]
    else:
        with worker_pool(workers) as pool:
            found = list(pool.map(_judged, groups))
    placed = {number: answer for numbers, group in zip(alike.values(), found, strict=True)
              for number, answer in zip(numbers, group, strict=True)}
    return [placed[number] for number in range(len(cases))]


def _judged(cases: Sequence[Case]) -> list[QuickCapacity | str]:
    try:
        return list(judged(cases))
    except InputError as error:
        return [str(error)] * len(cases)


def step_model(engine: EmbeddedEngine) -> StepTimeModel:
    """The engine's step time as the model whose parameters can be changed; TypeError for any other."""
    if not isinstance(engine.step_time, StepTimeModel):
        raise TypeError(f"a {type(engine.step_time).__name__} has no parameters to change")
    return engine.step_time


@dataclass(frozen=True)
class Paced(AroundScript):
    """A script whose users think `scale` times as long; all else as it was."""

    script: ConversationScript
    scale: float

    @property
    def gap_cap_s(self) -> float:
        """Longest think time, s."""
        return self.scale * super().gap_cap_s

    def user(self, number: int) -> UserScript:
        return _PacedUser(self.script.user(number), self.scale)


class _PacedUser:
    def __init__(self, user: UserScript, scale: float) -> None:
        self._user, self._scale = user, scale
        self.persona, self.user = user.persona, user.user

    def next(self, history_tokens: int) -> Turn:
        turn = self._user.next(history_tokens)
        return replace(turn, think_time_s=self._scale * turn.think_time_s)
