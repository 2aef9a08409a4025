"""The tree of commands."""

from __future__ import annotations

import typer

from spoc_lib.cli import engine, load, nsight, run, search, sweep, telemetry, workload
from spoc_lib.cli.batch import batch
from spoc_lib.cli.compare import compare
from spoc_lib.cli.export import export

app = typer.Typer(
    name="spoc",
    help="How many users can this LLM server hold under this SLA, with which flags, and what stops it there?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
run.register(app)
app.command("batch")(batch)
app.command("compare")(compare)
app.command("export")(export)
for name, module in (("workload", workload), ("engine", engine), ("load", load), ("search", search),
                     ("sweep", sweep), ("telemetry", telemetry), ("nsight", nsight)):
    app.add_typer(module.app, name=name)
