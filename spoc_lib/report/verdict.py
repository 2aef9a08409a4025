"""The answer in words, computed from the artefacts of one or more runs."""

from __future__ import annotations

import math

import pandas as pd

from spoc_lib.config import SHARES
from spoc_lib.metrics import METRICS
from spoc_lib.report.answer import Answer
from spoc_lib.report.likeness import hindrances


def table(answers: list[Answer]) -> pd.DataFrame:
    """One row a run: cluster, max_users, low, high, what binds, what saturated, flags."""
    rows = []
    for answer in answers:
        low, high = answer.interval or (math.nan, math.nan)
        binding = answer.binding
        rows.append(
            {
                "cluster": answer.cluster.name,
                "max_users": answer.users,
                "low": low,
                "high": high,
                "users_per_gpu": None if answer.users is None else answer.users / answer.cluster.hardware.count,
                "binding SLO": f"{binding['persona']} {binding['metric']} p{binding['percentile']:g}"
                if binding
                else "none",
                "saturated": answer.saturated or "unknown",
                "numbers": answer.label,
                "run": answer.run,
            }
        )
    return pd.DataFrame(rows)


def sentences(answers: list[Answer]) -> list[str]:
    """The verdict: one sentence a cluster, then the first against each other one."""
    found = [_one(answer) for answer in answers]
    known = [a for a in answers if a.users and a.resolved]
    found += [ratio_sentence(known[0], other) for other in known[1:]]
    return found


def _one(answer: Answer) -> str:
    name, following = answer.cluster.title, answer.capacity.get("next") or "run more rungs"
    if answer.users is None:
        return (
            f"{name}: unresolved ({answer.reason}). Next: {following}."
        )
    if not answer.resolved:
        return (
            f"{name}: unresolved, {answer.users:g} users at least as far as the rungs show ({answer.label}): "
            f"{answer.reason}. Next: {following}."
        )
    low, high = answer.interval or (answer.users, answer.users)
    text = f"{name}: {answer.users:g} users ({low:g} to {high:g} at {100 * answer.level:.0f} %), {answer.label}"
    binding = answer.binding
    if binding:
        metric = f"{metric_name(binding['metric'])} p{binding['percentile']:g} of {who(binding['persona'])} at " \
            f"{time_text(binding['limit_s'])}" \
            if binding["metric"] not in SHARES else binding["name"]
        text += f"; the limit that breaks first is {metric}"
    if answer.saturated not in ("", "unknown"):
        text += f"; what saturates is {answer.saturated}"
    return text + "."


def ratio(first: Answer, second: Answer) -> tuple[float, float, float]:
    """Users of `first` over users of `second`, with the widest interval that both intervals allow; ValueError where
    one of them has no capacity."""
    if first.interval is None or second.interval is None or not first.users or not second.users:
        raise ValueError("a ratio needs two capacities")
    (a_low, a_high), (b_low, b_high) = first.interval, second.interval
    return first.users / second.users, a_low / b_high if b_high else math.nan, a_high / b_low if b_low else math.inf


def ratio_sentence(first: Answer, second: Answer) -> str:
    """How many times the users of the second the first holds, beside what their GPU counts would say; why there is no
    ratio where they answer different questions."""
    apart = hindrances(first, second)
    if apart:
        return f"{first.cluster.name} and {second.cluster.name} are not comparable: {'; '.join(apart)}."
    value, low, high = ratio(first, second)
    gpus = first.cluster.hardware.count / second.cluster.hardware.count
    return (
        f"{first.cluster.name} holds {value:.2f} times the users of {second.cluster.name} ({low:.2f} to {high:.2f}); "
        f"its GPU count alone would say {gpus:g}."
    )


def who(persona: str) -> str:
    """`all personas`, `persona P1`."""
    return "all personas" if persona == "all" else f"persona {persona}"


def metric_name(metric: str) -> str:
    """What readers call an SLO's metric."""
    return METRICS[metric].title


def metric_value(metric: str, value: float) -> str:
    """A value of an SLO's metric in words: `58 ms`, `1.41 s`, `2.5 %`."""
    return f"{value:.1%}" if metric in SHARES else time_text(value)


def time_text(seconds: float) -> str:
    """`1.41 s`, `58 ms`, `300 µs`."""
    if math.isinf(seconds):
        return "infinite (failures)"
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
