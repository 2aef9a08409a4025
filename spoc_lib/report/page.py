"""The look of every page of the workbench: one style sheet, kept inside each page."""

from __future__ import annotations

from pathlib import Path

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
