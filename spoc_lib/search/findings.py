"""The search in sentences, every figure taken from its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spoc_lib.search import pareto

if TYPE_CHECKING:
    from spoc_lib.search.result import StudyResult


def sentences(result: StudyResult) -> list[str]:
    """One finding a sentence, the answer first."""
    found = [_answer(result), _work(result)]
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
        return (f"At {result.users} users the knee is trial {result.knee_trial} ({point(result.knee)})"
                + (f"; it changes {flags}." if flags else ", the engine's own defaults."))
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
        return "The defaults are the knee: no searched flag improves all objectives enough to leave them."
    if result.defaults["output_tokens_per_s"] != result.defaults["output_tokens_per_s"]:
        return f"The defaults could not be measured ({result.defaults['failure_class']}), the knee could."
    changes = [f"{row.label} {row.change_ratio:+.1%} ({row.better} is better)" for row in result.effects.itertuples()]
    missed = " The defaults miss the SLOs here." if result.defaults["state"] == "infeasible" else ""
    return "Against the defaults: " + ", ".join(changes) + "." + missed


def _importance(result: StudyResult) -> str:
    if result.importances.empty:
        return "Too few measured trials to say which flags decided."
    best = result.importances.loc[result.importances.groupby("objective", sort=False)["importance"].idxmax()]
    named = ", ".join(f"{row.flag} for {row.objective} ({row.importance:.0%})" for row in best.itertuples())
    return f"The flags that set the best quarter of trials apart (PED-ANOVA): {named}."
