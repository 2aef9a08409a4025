"""Conditions between flags, as data: `[left, operator, right]`, each side a name or a literal. No expressions are
evaluated; a side that is unset (null) makes the condition not apply."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from spoc_lib.core.yamlfile import Strict

OPERATORS = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt,
    "==": operator.eq, "!=": operator.ne,
}
Operand = bool | int | float | str


def _known_operator(condition: tuple[Operand, str, Operand]) -> tuple[Operand, str, Operand]:
    if condition[1] not in OPERATORS:
        raise ValueError(f"unknown operator '{condition[1]}': use one of {', '.join(OPERATORS)}")
    return condition


Condition = Annotated[tuple[Operand, str, Operand], AfterValidator(_known_operator)]


class Rule(Strict):
    """`require` must hold (where `when` holds), else the engine refuses to start, for `reason`."""

    require: Condition
    when: Condition | None = None
    reason: str


class NoEffect(Strict):
    """Where `when` holds and `unless` does not, `flag` changes nothing and stands at its default."""

    flag: str
    when: Condition
    unless: Condition | None = None
    reason: str


def holds(condition: Condition, values: Mapping[str, Any]) -> bool | None:
    """Whether `condition` holds among `values`; None when one of its sides is unset."""
    left, sign, right = (_resolve(side, values) for side in condition)
    if left is None or right is None:
        return None
    return bool(OPERATORS[sign](left, right))


def broken(rules: list[Rule], values: Mapping[str, Any]) -> str | None:
    """The sentence of the first rule that `values` break, naming the flags and their values."""
    for rule in rules:
        if rule.when is not None and not holds(rule.when, values):
            continue
        if holds(rule.require, values) is False:
            left, sign, right = rule.require
            return f"{_shown(left, values)} must be {sign} {_shown(right, values)}: {rule.reason}"
    return None


def _resolve(side: Operand, values: Mapping[str, Any]) -> Any:
    return values.get(side) if isinstance(side, str) and side in values else side


def _shown(side: Operand, values: Mapping[str, Any]) -> str:
    return f"{side} ({values[side]})" if isinstance(side, str) and side in values else str(side)
