"""`spoc telemetry`."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, help="telemetry", rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Keeps the group a group while it holds a single command."""
