"""Imports without what takes seconds and is never used."""

from __future__ import annotations

import sys


def import_jsonschema() -> None:
    """Import jsonschema without its check of the format `iri`: the grammar behind that check (rfc3987_syntax) takes
    three seconds to build, and no notebook's schema has the format. Call it before papermill, nbformat, nbconvert and
    plotly's renderers, which all import jsonschema; without effect where it is there already."""
    absent = "rfc3987_syntax" not in sys.modules
    if absent:
        sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # "cannot be imported", and jsonschema goes on
    try:
        import jsonschema  # noqa: F401
    except ImportError:  # whoever needs it says so
        pass
    finally:
        if absent:
            del sys.modules["rfc3987_syntax"]
