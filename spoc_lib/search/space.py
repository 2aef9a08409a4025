"""The space of one search: which flags vary over which values, which stand fixed, which combinations cannot be."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from optuna.distributions import CategoricalDistribution

from spoc_lib.config import Cluster, FlagValue, load_gpu, rules
from spoc_lib.config.flags import Catalogue, load_catalogue
from spoc_lib.core.errors import InputError
from spoc_lib.engine.flags import EngineFlags, refuse_unmodelled
from spoc_lib.search import pareto

Flags = dict[str, FlagValue]


@dataclass(frozen=True)
class FlagSpace:
    """What a search may set.

    searched: flag -> its values, ascending where they are numbers; the default is always among them, so that the
        defaults can be trial 0 and be bred from;
    fixed: the cluster's own flags, part of every launch;
    defaults: the engine's default of each searched flag on this hardware;
    context: names that rules may compare with (`users`, `context_limit`) and the defaults of all other flags;
    explicit: pass defaults too (the embedded engine, which stands for any hardware, has no defaults of its own);
    objectives: what the search is after, as columns of TRIALS.
    """

    searched: dict[str, tuple[FlagValue, ...]]
    fixed: Flags
    defaults: Flags
    context: dict[str, Any]
    explicit: bool
    catalogue: Catalogue = field(repr=False)
    objectives: pareto.Objectives = pareto.OBJECTIVES

    @property
    def size(self) -> int:
        """Combinations, invalid ones included."""
        total = 1
        for values in self.searched.values():
            total *= len(values)
        return total

    def distributions(self) -> dict[str, CategoricalDistribution]:
        """As Optuna samples them: ordered lists, since round values are what operators write down."""
        return {name: CategoricalDistribution(values) for name, values in self.searched.items()}

    def canonical(self, params: Mapping[str, FlagValue]) -> Flags:
        """`params` with every flag that has no effect there set to its default: equal engines, equal flags."""
        flags = {name: params[name] for name in self.searched}
        for rule in self.catalogue.no_effect:
            if rule.flag not in flags or flags[rule.flag] == self.defaults[rule.flag]:
                continue
            values = {**self.context, **self.fixed, **flags, "default": self.defaults[rule.flag]}
            if rules.holds(rule.when, values) and not (rule.unless and rules.holds(rule.unless, values)):
                flags[rule.flag] = self.defaults[rule.flag]
        return flags

    def invalid(self, flags: Mapping[str, FlagValue]) -> str | None:
        """Why the engine would refuse `flags`, in a sentence; None when it would not."""
        return rules.broken(self.catalogue.rules, {**self.context, **self.fixed, **flags})

    def launch_flags(self, flags: Mapping[str, FlagValue]) -> Flags:
        """What a launch passes: the fixed flags, and those that differ from the engine's defaults, so that a
        launch of the defaults is what an operator gets who sets nothing."""
        changed = {k: v for k, v in flags.items() if self.explicit or v != self.context.get(k)}
        return {**self.fixed, **changed}

    def twin_flags(self, flags: Mapping[str, FlagValue]) -> Flags:
        """What the twin is told for such a launch: a real engine's defaults on this hardware as well (a CPU's blocks
        are larger), then the fixed flags, then `flags`."""
        defaults = {} if self.explicit else {name: self.context[name] for name in EngineFlags.model_fields
                                             if self.context.get(name) is not None}
        return {**defaults, **self.fixed, **flags}

    def grid(self) -> Iterator[Flags]:
        """Every distinct valid point, canonical, in the order of the lists."""
        seen: set[str] = set()
        for point in itertools.product(*self.searched.values()):
            flags = self.canonical(dict(zip(self.searched, point, strict=True)))
            key = flags_key(flags)
            if key not in seen and self.invalid(flags) is None:
                seen.add(key)
                yield flags

    def describe(self) -> list[dict[str, Any]]:
        """One row a searched flag: values, default, what it does."""
        return [
            {"flag": name, "values": list(values), "default": self.defaults[name],
             "about": spec.about if (spec := self.catalogue.spec(name)) else ""}
            for name, values in self.searched.items()
        ]

    def digest(self) -> str:
        """Identity of the space, of what is held fixed and of what is asked for, 12 hexadecimal digits."""
        return digest({"searched": self.searched, "fixed": self.fixed, "defaults": self.defaults,
                       "users": self.context["users"], "objectives": self.objectives})


def flags_key(flags: Mapping[str, FlagValue]) -> str:
    """Flags as one string, independent of their order."""
    return orjson.dumps(dict(flags), option=orjson.OPT_SORT_KEYS).decode()


def digest(value: Any) -> str:
    """Twelve hexadecimal digits of SHA-256 over `value` as JSON with sorted keys."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:12]


def build_space(cluster: Cluster, catalogue: Catalogue | None = None) -> FlagSpace:
    """The space of `cluster`: `search.space` names exactly what varies; without it, what the catalogue marks.

    InputError names the field: a flag both fixed and searched, a forbidden one that is either, a flag that the embedded
    engine does not model, or fixed flags that exclude the defaults.
    """
    catalogue = catalogue or load_catalogue()
    gpu, fixed = load_gpu(cluster.hardware.gpu), dict(cluster.flags)
    named = _named_space(cluster, catalogue, fixed)
    searched: dict[str, tuple[FlagValue, ...]] = {}
    defaults: Flags = {}
    for name, values in named.items():
        default = catalogue.default(name, gpu)
        if default is None:
            default = values[0]
        defaults[name] = default
        searched[name] = _with_default(values, default)
    context: dict[str, Any] = {name: catalogue.default(name, gpu) for name in catalogue.flags}
    context["users"] = cluster.search.target_users
    context["context_limit"] = cluster.context_limit()
    space = FlagSpace(searched, fixed, defaults, context, cluster.simulated, catalogue,
                      pareto.objectives(cluster.search.objective))
    if reason := space.invalid(defaults):
        raise InputError("bad-space", f"cluster '{cluster.name}': flags and the engine's defaults conflict: {reason}")
    return space


def _named_space(cluster: Cluster, catalogue: Catalogue, fixed: Flags) -> dict[str, list[FlagValue]]:
    where = f"cluster '{cluster.name}': search.space"
    _check_forbidden(cluster, fixed)
    named = dict(cluster.search.space) or {
        name: spec.points() for name, spec in catalogue.flags.items()
        if spec.searched and name not in fixed and name not in cluster.search.forbidden}
    for name in named:
        if name in fixed:
            raise InputError("bad-space", f"{where}: '{name}' is held fixed under flags: remove one of the two")
    if not named:
        raise InputError("bad-space", f"{where}: every searchable flag is held fixed under flags or forbidden: "
                         "nothing to search")
    if cluster.simulated:
        refuse_unmodelled(named, where)
        refuse_unmodelled(fixed, f"cluster '{cluster.name}': flags")
    return named


def _check_forbidden(cluster: Cluster, fixed: Flags) -> None:
    """InputError when a flag that no launch may set is fixed or searched all the same."""
    if cluster.simulated:
        refuse_unmodelled(cluster.search.forbidden, f"cluster '{cluster.name}': search.forbidden")
    for name in sorted(cluster.search.forbidden):
        for names, place in ((fixed, "held fixed under flags"), (cluster.search.space, "searched under search.space")):
            if name in names:
                raise InputError("forbidden-flag", f"cluster '{cluster.name}': search.forbidden: '{name}' is forbidden "
                                 f"and yet {place}: remove one of the two")


def _with_default(values: list[FlagValue], default: FlagValue) -> tuple[FlagValue, ...]:
    if default in values:
        return tuple(values)
    numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in [*values, default])
    return tuple(sorted([*values, default]) if numeric else [*values, default])
