"""The search in sentences, every figure taken from its tables."""

from __future__ import annotations

from typing import Any

from spoc_lib.search import pareto
from spoc_lib.search.answer import MEASURED, Answer
from spoc_lib.search.recommend import point

#: A front membership that is worth relying on.
SURE = 0.9


def sentences(result: Answer) -> list[str]:
    """One finding a sentence, the answer first."""
    found = [_answer(result), _work(result), _stands(result)]
    if result.knee is not None:
        found += [_against_defaults(result), f"{pareto.KNEE_RULE[0].upper()}{pareto.KNEE_RULE[1:]}."]
    found += [_importance(result), *(c.sentence for c in result.confirmations), *result.extra]
    return [sentence for sentence in found if sentence]


def _answer(result: Answer) -> str:
    if result.knee is not None and result.chosen is not None:
        flags = ", ".join(f"{row.flag} {row.default} -> {row.chosen}" for row in result.changed.itertuples())
        restored = result.simplified.restored if result.simplified else []
        measured = point(result.chosen, result.objectives)
        return (f"At {result.users} users the knee is trial {result.knee_trial} ({measured})"
                + (f"; the recommendation changes {flags}." if flags else ", the engine's own defaults.")
                + (f" {', '.join(restored)} went back to the default: the difference was below "
                   f"{pareto.RESOLUTION:.0%} in every objective." if restored else ""))
    if result.nearest is not None:
        return (f"No trial meets the SLOs at {result.users} users. The nearest is trial {result.nearest['trial']} "
                f"({point(result.nearest, result.objectives)}), which misses them by "
                f"{result.nearest['violation']:.0%} of the limits in sum: ask for fewer users, or for looser limits.")
    return (f"No trial could be measured at {result.users} users: "
            + ", ".join(f"{count} × {name}" for name, count in result.failures.items()) + ".")


def _work(result: Answer) -> str:
    states = result.states
    measured = states.get("complete", 0) + states.get("infeasible", 0)
    kind = "the twin's virtual clock" if result.simulated else "real launches"
    parts = [f"{len(result.trials)} trials on {kind}: {measured} measured, {states.get('complete', 0)} within the "
             f"SLOs, {len(result.front)} on the front"]
    spared = states.get("duplicate", 0) + states.get("invalid", 0)
    if spared:
        parts.append(f"{spared} answered without a measurement (repeats or combinations that the engine refuses)")
    if result.failures:
        parts.append("without a measurement: " + ", ".join(f"{n} × {name}" for name, n in result.failures.items()))
    return "; ".join(parts) + "."


def _against_defaults(result: Answer) -> str:
    defaults = result.defaults
    if defaults is None:
        return ""
    if result.knee_trial == int(defaults["trial"]):
        return "The defaults are the knee: nothing that was tried is told from them for the better."
    if defaults["state"] not in MEASURED:
        return f"The defaults could not be measured ({defaults['failure_class']}), the knee could."
    changes = [f"{row.label} {row.change_ratio:+.1%}{_range(row)} ({row.better} is better)"
               for row in result.effects.itertuples()]
    missed = " The defaults miss the SLOs here." if defaults["state"] == "infeasible" else ""
    return "Against the defaults: " + ", ".join(changes) + "." + missed


def _range(row: Any) -> str:
    return "" if row.low is None or row.low != row.low else f" ({row.low:+.1%} to {row.high:+.1%} over user samples)"


def _stands(result: Answer) -> str:
    """Whether the front is more than noise."""
    known = {trial: chance for trial, chance in result.probabilities.items() if trial in set(result.front["trial"])}
    if not known and len(result.front) and result.simulated:
        return ("The front was played before one sample of users: how another sample would change it is not known "
                "(a profile with seeds of 2 or more repeats it).")
    if not known:
        return ""
    sure = sum(chance >= SURE for chance in known.values())
    knee = None if result.knee_trial is None else known.get(result.knee_trial)
    return (f"{sure} of {len(known)} front trials are on the front with a probability of at least {SURE:.0%}"
            + (f"; the knee with {_chance(knee)}." if knee is not None else "."))


def _chance(ratio: float) -> str:
    """A probability that was drawn some hundred times is never certain."""
    return "over 99%" if ratio > 0.99 else f"{ratio:.0%}"


def _importance(result: Answer) -> str:
    if result.importances.empty:
        return "Too few measured trials to say which flags decided."
    best = result.importances.loc[result.importances.groupby("objective", sort=False)["importance"].idxmax()]
    named = ", ".join(f"{row.flag} for {row.objective} ({row.importance:.0%})" for row in best.itertuples())
    return f"The flags that set the best quarter of trials apart (PED-ANOVA): {named}."
