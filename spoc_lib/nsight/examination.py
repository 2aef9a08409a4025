"""A trace examined: decomposition, roofline where the trace tells its batches, and the findings in sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.nsight.advice import advice
from spoc_lib.nsight.categories import TITLES, RuleBook
from spoc_lib.nsight.decompose import Decomposition, decompose
from spoc_lib.nsight.excerpt import excerpt
from spoc_lib.nsight.gates import gate_sentence, gates
from spoc_lib.nsight.idle import explain_idle
from spoc_lib.nsight.roofline import Verdict, roofline, shown_types

#: Shortest and longest stretch that is drawn kernel by kernel.
_LEAST_NS, _MOST_NS = 2_000_000, 60_000_000
_MOST_NAME = 96
_ARGUMENTS, _FLAGS = re.compile(r"(?<=>)\([^<]*\)$"), re.compile(r"(, (true|false|(\(\w+\))?[01])(?=[,>]))+")


@dataclass(frozen=True)
class Examination:
    """decomposition; verdict: the roofline's, or None with the `reason` why the trace cannot be held against it;
    expect_gpus: TP x PP of the engine, None where nobody said."""

    path: Path
    decomposition: Decomposition
    verdict: Verdict | None
    reason: str
    expect_gpus: int | None = None

    @property
    def simulated(self) -> bool:
        """Whether the twin wrote the trace."""
        return self.decomposition.simulated

    def gates(self) -> pd.DataFrame:
        """Whether the trace may be concluded from: gate, found, wanted, passed."""
        return gates(self.decomposition, self.expect_gpus)

    def gate_sentence(self) -> str:
        """The gates in one sentence."""
        return gate_sentence(self.gates())

    def advice(self) -> list[str]:
        """What to try next, the largest share of the window first."""
        return advice(self.decomposition, self.verdict)

    def few_steps(self, count: int = 3) -> pd.DataFrame:
        """Kernels of `count` steps from the middle of the window (`excerpt`); of a few ms where there are no steps."""
        first, last = self.decomposition.window_ns
        steps = self.decomposition.steps
        start, end = (first + last) // 2, (first + last) // 2 + _LEAST_NS
        if len(steps):
            order = steps.sort_values("start_ns").drop_duplicates("step")
            chosen = order.iloc[len(order) // 2 : len(order) // 2 + count]
            start, end = int(chosen.start_ns.min()), int((chosen.start_ns + chosen.duration_ns).max())
        return excerpt(self.path, start, min(end, start + _MOST_NS))

    def phases(self) -> pd.DataFrame:
        """One row a phase of the engine's steps: how many, mean and p95 ms, and the parts of a step without any kernel:
        all, and what lies between its own kernels (launches). Empty where the trace shows no steps."""
        return pd.DataFrame([{
            "phase": row["phase"], "steps": row["steps"], "mean_ms": row["mean_s"] * 1e3, "p95_ms": row["p95_s"] * 1e3,
            "idle_percent": 100 * (row["gap_share"] or 0.0),
            "launch_bound_percent": 100 * (row["launch_bound_share"] or 0.0),
        } for row in self.decomposition.step_summary()])

    def top_kernels(self, count: int = 12) -> pd.DataFrame:
        """The kernels that take longest, over all GPUs: category, name, launches, total and percent of the window."""
        window = self.decomposition.window_s * len(self.decomposition.totals())
        table = (
            self.decomposition.kernels.groupby(["category", "name"], observed=True, as_index=False)
            .agg(kernels=("kernels", "sum"), total_ns=("total_ns", "sum"))
            .nlargest(count, "total_ns")
        )
        return pd.DataFrame(
            {
                "category": table["category"],
                "kernel": table["name"].map(_short),
                "launches": table["kernels"],
                "total_ms": table["total_ns"] / 1e6,
                "percent_of_window": 100 * table["total_ns"] / 1e9 / window,
            }
        )

    def findings(self) -> list[str]:
        """The examination in sentences, the answer first."""
        found = self.decomposition
        shares = found.shares().mean().sort_values(ascending=False)
        busiest = [name for name in shares.index if name != "idle"][:3]
        named = ", ".join(f"{TITLES.get(c, c)} {shares[c]:.0%}" for c in busiest)
        kind = "a simulated trace" if self.simulated else "a real trace"
        said = [
            f"In {kind} of {found.window_s:.3g} s on {len(found.totals())} GPUs the time goes to {named}; "
            f"{shares['idle']:.0%} is idle."
        ]
        if self.verdict is None:
            said += [f"No roofline: {self.reason}.", f"{shown_types(found).sentence}."]
        else:
            said += [f"{self.verdict.sentence[0].upper()}{self.verdict.sentence[1:]}", *self.verdict.sentences]
        said.append(explain_idle(found).sentence)
        if found.waiting.paired:
            said += [found.waiting.sentence, *(f"{note[0].upper()}{note[1:]}." for note in found.waiting.notes)]
        if found.unknown_kernels:
            longest = found.unknown_kernels[0]["name"][:60]
            said.append(f"{len(found.unknown_kernels)} kernel names match no rule; the longest-running is {longest}.")
        return said

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "trace": self.path.name,
            "simulated": self.simulated,
            "decomposition": self.decomposition.to_dict(),
            "verdict": self.verdict and self.verdict.to_dict(),
            "no_verdict": self.reason or None,
            "types": shown_types(self.decomposition).to_dict(),
            "gates": self.gates().to_dict("records"),
            "advice": self.advice(),
        }


def _short(name: str) -> str:
    """A kernel's name in a table, without arguments and flags: templates differ at both ends, the middle gives way."""
    name = _FLAGS.sub("", _ARGUMENTS.sub("", name.removeprefix("void ")))
    return name if len(name) <= _MOST_NAME else f"{name[:_MOST_NAME // 2]} … {name[-_MOST_NAME // 2:]}"


def examine(path: str | Path, model: ModelSpec, gpu: GpuSpec, expect_gpus: int | None = None, *,
            tensor_parallel: int | None = None, batch: Batch | None = None, steps: int | None = None,
            rules: RuleBook | None = None, accept_graph_mode: bool = False) -> Examination:
    """Decompose a trace and hold it against the roofline of `model` on `gpu`; InputError where it cannot be read.

    expect_gpus: TP x PP of the engine; a trace of another number of GPUs fails its gate. tensor_parallel: GPUs that
    share the model (default: all of the trace). batch and steps: what an average step computed and how many the window
    holds, where the trace does not tell. accept_graph_mode: the program launched no graphs, whatever the capture's
    mode.
    """
    found = decompose(path, rules=rules, accept_graph_mode=accept_graph_mode)
    try:
        verdict = roofline(found, model, gpu, batch, gpu_count=tensor_parallel, steps=steps)
        return Examination(Path(path), found, verdict, "", expect_gpus)
    except InputError as error:
        return Examination(Path(path), found, None, error.message.removesuffix("."), expect_gpus)
