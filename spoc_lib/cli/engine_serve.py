"""Commands of `spoc engine` that live in their own file."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to `spoc engine`."""
