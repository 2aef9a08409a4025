"""Results as a few readable lines."""

from __future__ import annotations

from spoc_lib.nsight.categories import CATEGORIES, TITLES
from spoc_lib.nsight.decompose import Decomposition
from spoc_lib.nsight.diff import Diff
from spoc_lib.nsight.roofline import RESOURCES, Verdict


def decomposition_text(result: Decomposition) -> str:
    """One column a GPU, one row a category, in percent of the window; then phases, unknown kernels and notes."""
    shares = result.shares()
    head = [f"{pid}:{device}" for pid, device in shares.index]
    lines = [f"{'simulated ' if result.simulated else ''}trace {result.path}: {len(head)} GPUs, "
             f"window {result.window_s * 1e3:.3f} ms",
             f"{'% of the window':22}" + "".join(f"{h:>12}" for h in head)]
    for category in (*CATEGORIES, "idle"):
        values = shares[category]
        if values.any():
            lines.append(f"{TITLES[category]:22}" + "".join(f"{value * 100:12.2f}" for value in values))
    for row in result.step_summary():
        steps = "steps of unknown phase" if row["phase"] == "unknown" else f"{row['phase']} steps"
        lines.append(f"{steps}: {row['steps']}, mean {row['mean_s'] * 1e3:.3f} ms, "
                     f"idle {row['gap_share']:.1%} of the step, of it between its kernels "
                     f"{row['launch_bound_share']:.1%}")
    if result.waiting.paired:
        lines += [result.waiting.sentence, *(f"note: {note}" for note in result.waiting.notes)]
    for kernel in result.unknown_kernels[:5]:
        lines.append(f"unknown kernel, {kernel['share']:.1%} of kernel time: {kernel['name'][:80]} "
                     f"(add a rule with --rules)")
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def verdict_text(verdict: Verdict) -> str:
    """The verdict's sentences and its table by phase, in ms a step."""
    lines = [verdict.sentence, *verdict.sentences,
             f"{'ms a step':34}{'measured':>10}{'W4A16':>10}{'FP4 naive':>10}{'of roof':>9}  binds"]
    for row in verdict.table.itertuples():
        if row.measured_s or row.w4a16_s:
            roof = f"{row.of_roof:.0%}" if row.of_roof is not None and row.of_roof == row.of_roof else "-"
            lines.append(f"{row.phase + ' ' + TITLES[row.category]:34}{row.measured_s * 1e3:10.3f}"
                         f"{row.w4a16_s * 1e3:10.3f}{row.fp4_naive_s * 1e3:10.3f}{roof:>9}  {RESOURCES[row.binds]}")
    return "\n".join(lines)


def diff_text(result: Diff) -> str:
    """The comparison by category and the kernels that changed most, in us a unit."""
    lines = [result.sentence, f"{'us a ' + result.unit:34}{'A':>11}{'B':>11}{'change':>11}"]
    for row in result.categories.itertuples():
        lines.append(f"{row.phase + ' ' + TITLES[row.category]:34}{row.a_s * 1e6:11.3f}{row.b_s * 1e6:11.3f}"
                     f"{row.delta_s * 1e6:+11.3f}")
    for row in result.kernels[result.kernels.delta_s != 0].head(5).itertuples():
        lines.append(f"{row.delta_s * 1e6:+11.3f}  {row.name[:90]}")
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])
