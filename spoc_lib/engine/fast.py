"""The fast core behind the virtual clock."""

from __future__ import annotations


def supports(engine) -> bool:
    """Whether the fast core knows this engine's cache layout."""
    return False
