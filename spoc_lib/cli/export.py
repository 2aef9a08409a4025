"""`spoc export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spoc_lib.cli.output import JsonOption, emit


def export(
    run: Annotated[str, typer.Argument(help="a run (id or folder) with a finished sweep")],
    form: Annotated[Literal["llmd", "openmetrics", "csv"], typer.Option(
        "--format", help="llmd: llm-d's benchmark report, one a rung; openmetrics: text; csv: one file a table")],
    out: Annotated[Path | None, typer.Option(help="file (openmetrics) or folder; default: export/ in the run's folder")
                   ] = None,
    json: JsonOption = None,
) -> None:
    """A run's results for other programs.

    Example: spoc export sim-4xh100-20260101-120000 --format openmetrics --out /var/lib/node_exporter/spoc.prom
    """
    from spoc_lib.pipeline.runs import Run
    from spoc_lib.report import export as exports
    from spoc_lib.report import llmd
    from spoc_lib.report.answer import Answer

    answer = Answer.read(Run.open(run).folder)
    place = out or answer.folder / "export" / ("metrics.txt" if form == "openmetrics" else form)
    told = ""
    if form == "openmetrics":
        written = [exports.write_openmetrics(answer, place)]
    elif form == "csv":
        written = exports.csv_folder(answer, place)
    else:
        written = llmd.write(answer, place)
        version = llmd.validator()
        told = f"valid by llmd-benchmark-report {version}" if version else \
            "not validated: pip install llmd-benchmark-report"
    lines = [*map(str, written), *([told] if told else [])]
    emit({"format": form, "files": written, "validation": told}, json, "\n".join(lines))
