"""Fixtures of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared():
    """`shared("data/…")`: a path in the folder of real recordings beside the checkout; skips where it is absent."""
    base = (ROOT / os.environ.get("SPOC_SHARED", "../shared")).resolve()

    def find(relative: str) -> Path:
        path = base / relative
        if not path.exists():
            pytest.skip(f"the real recording {relative} is not beside this checkout")
        return path

    return find
