"""The command line. One module a group of commands; each command is one library call and a result.

Rooms are imported inside the commands, so `spoc --help` answers at once.
"""

from __future__ import annotations

import sys

from spoc_lib.core.errors import SpocError


def main() -> None:
    """Entry point of `spoc`: what the workbench can explain becomes one sentence and an exit status."""
    from spoc_lib.cli.app import app

    try:
        app()
    except SpocError as error:
        print(f"spoc: {error.message}", file=sys.stderr)
        sys.exit(error.exit_status)
