"""`spoc compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit


def compare(
    runs: Annotated[list[str], typer.Argument(help="runs (ids or folders) with a finished sweep, the reference first")],
    fail_on_regression: Annotated[bool, typer.Option(
        "--fail-on-regression", help="exit 1 where a run holds fewer users than the reference, or cannot be compared"
    )] = False,
    json: JsonOption = None,
) -> None:
    """Runs against the first one: is the difference in users real, what else differs, and which SLO tells why.

    Notebook 05 draws the same: spoc report RUN RUN.
    Example: spoc compare vllm-0.32 vllm-0.33 --fail-on-regression
    """
    from spoc_lib.pipeline.runs import Run
    from spoc_lib.report import comparison
    from spoc_lib.report.answer import Answer

    found = comparison.compare_runs([Answer.read(Run.open(run).folder) for run in runs])
    lines = []
    for one in found:
        lines.append(one.sentence)
        lines += [f"   compared: {text}" for text in one.changed]
        lines += [f"   besides:  {text}" for text in one.notes]
        lines += [f"   {word}: {comparison.cause_text(cause)}" for cause in one.causes
                  for word in ({1: "worse", -1: "better", 0: "same"}[cause.apart],)]
    lines.append(f"test: {comparison.TEST}")
    result = [{**{name: getattr(one, name) for name in one.__dataclass_fields__}, "sentence": one.sentence,
               "regression": one.regression} for one in found]
    emit({"test": comparison.TEST, "compared": result}, json, "\n".join(lines))
    if fail_on_regression and any(one.regression or one.verdict in ("not comparable", "open") for one in found):
        raise typer.Exit(1)
