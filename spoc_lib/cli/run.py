"""`spoc run`, `batch`, `report`, `check`: the notebooks as a pipeline."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the pipeline's commands to the top level."""


