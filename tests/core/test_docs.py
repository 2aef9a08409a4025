"""The guides hold what they promise: every link leads somewhere, and every test that is named exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_every_named_test_exists(page):
    wrong = []
    for text, target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target).resolve()
        if not path.exists():
            wrong.append(f"{target} does not exist")
        elif text.startswith("test_") and f"def {text}(" not in path.read_text(encoding="utf-8"):
            wrong.append(f"{target} has no test {text}")
    assert not wrong, "\n".join(wrong)


def test_the_readme_leads_to_the_guides():
    targets = {target for _, target in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {"docs/use-it-on-your-cluster.md", "docs/how-the-numbers-are-made.md", "docs/faults.md"} <= targets


def test_the_definitions_are_all_held_by_a_test():
    rows = [line for line in (ROOT / "docs/how-the-numbers-are-made.md").read_text().splitlines()
            if line.startswith("| ") and "---" not in line and not line.startswith("| term")]
    assert len(rows) > 25 and all("[test_" in row for row in rows)
