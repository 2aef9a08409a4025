"""How a command gives its result: JSON where asked, else a few readable lines."""

from __future__ import annotations

import json as ascii_json
import sys
from typing import Annotated, Any

import typer

from spoc_lib.core.files import to_json, write_json

JsonOption = Annotated[str | None,
                       typer.Option("--json", metavar="FILE", help="write the result as JSON ('-' = standard output)")]


def emit(result: Any, json: str | None, text: str) -> None:
    """Print `text`, or put `result` as JSON on standard output ('-') or beside `text` into a file."""
    if json == "-":
        text = to_json(result)
        if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":  # its letters would be replaced one by one
            text = ascii_json.dumps(ascii_json.loads(text), indent=2)
        print(text)
        return
    if json:
        write_json(json, result)
    print(text)
