"""The search in sentences, every figure taken from its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spoc_lib.search import pareto

if TYPE_CHECKING:
    from spoc_lib.search.result import StudyResult


#: A front membership that is worth relying on.
SURE = 0.9


def sentences(result: StudyResult) -> list[str]:
    """One finding a sentence, the answer first."""
    found = [_answer(result), _work(result), _stands(result)]
    if result.knee is not None:
        found += [_against_defaults(result), f"{pareto.KNEE_RULE[0].upper()}{pareto.KNEE_RULE[1:]}."]
    found += [_importance(result), *(c.sentence for c in result.confirmations), *result.extra]
    return [sentence for sentence in found if sentence]


def point(row: dict[str, Any]) -> str:
    """A trial's three objectives for readers."""
    return (f"{row['output_tokens_per_s']:,.0f} output tokens/s, p95 TTFT {row['ttft_p95_s']:.2f} s, p95 ITL "
            f"{1000 * row['itl_p95_s']:.1f} ms")


def _answer(result: StudyResult) -> str:
    if result.knee is not None:
        flags = ", ".join(f"{row.flag} {row.default} -> {row.chosen}" for row in result.changed.itertuples())
        restored = result.simplified.restored if result.simplified else []
        return (f"At {result.users} users the knee is trial {result.knee_trial} ({point(result.chosen)})"
                + (f"; the recommendation changes {flags}." if flags else ", the engine's own defaults.")
                + (f" {', '.join(restored)} went back to the default: the difference was below "
                   f"{pareto.RESOLUTION:.0%} in every objective." if restored else ""))
    if result.nearest is not None:
        return (f"No trial meets the SLOs at {result.users} users. The nearest is trial {result.nearest['trial']} "
                f"({point(result.nearest)}), which misses them by {result.nearest['violation']:.0%} of the limits in "
                f"sum: ask for fewer users, or for looser limits.")
    return (f"No trial could be measured at {result.users} users: "
            + ", ".join(f"{count} × {name}" for name, count in result.failures.items()) + ".")


def _work(result: StudyResult) -> str:
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


def _against_defaults(result: StudyResult) -> str:
    if result.knee_trial == int(result.defaults["trial"]):
        return "The defaults are the knee: nothing that was tried is told from them for the better."
    if result.defaults["output_tokens_per_s"] != result.defaults["output_tokens_per_s"]:
        return f"The defaults could not be measured ({result.defaults['failure_class']}), the knee could."
    changes = [f"{row.label} {row.change_ratio:+.1%}{_range(row)} ({row.better} is better)"
               for row in result.effects.itertuples()]
    missed = " The defaults miss the SLOs here." if result.defaults["state"] == "infeasible" else ""
    return "Against the defaults: " + ", ".join(changes) + "." + missed


def _range(row: Any) -> str:
    return "" if row.low is None or row.low != row.low else f" ({row.low:+.1%} to {row.high:+.1%} over user samples)"


def _stands(result: StudyResult) -> str:
    """Whether the front is more than noise."""
    known = {trial: chance for trial, chance in result.probabilities.items() if trial in set(result.front["trial"])}
    if not known:
        return ""
    sure = sum(chance >= SURE for chance in known.values())
    knee = known.get(result.knee_trial)
    return (f"{sure} of {len(known)} front trials are on the front with a probability of at least {SURE:.0%}"
            + (f"; the knee with {knee:.0%}." if knee is not None else "."))


def _importance(result: StudyResult) -> str:
    if result.importances.empty:
        return "Too few measured trials to say which flags decided."
    best = result.importances.loc[result.importances.groupby("objective", sort=False)["importance"].idxmax()]
    named = ", ".join(f"{row.flag} for {row.objective} ({row.importance:.0%})" for row in best.itertuples())
    return f"The flags that set the best quarter of trials apart (PED-ANOVA): {named}."
