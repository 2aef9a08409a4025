"""The guides hold what they promise: every link leads somewhere, and every test that is named exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from spoc_lib.cli.app import app

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
            if line.startswith("| ") and "---" not in line and not line.startswith(("| term", "| metric"))]
    assert len(rows) > 25 and all("[test_" in row for row in rows)


def _commands(text: str) -> list[list[str]]:
    """Each `spoc …` of a page, in a block or in a line, as words; what stands for a part left out (`…`) is skipped."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.partition("#")[0] for block in blocks for line in block.splitlines()]
    found = [*lines, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))]
    return [shlex.split(one)[1:] for one in found if one.startswith("spoc ") and "…" not in one]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_guides_is_one_that_spoc_takes(page):
    wrong = []
    for words in _commands(page.read_text(encoding="utf-8")):
        command, rest = typer.main.get_command(app), list(words)
        try:
            while hasattr(command, "resolve_command"):
                with command.make_context("spoc", rest[:1], resilient_parsing=True) as context:
                    _, command, rest = command.resolve_command(context, rest)
            command.make_context("spoc", rest)
        except Exception as error:  # of typer's own click: whatever it has to complain of
            wrong.append(f"spoc {shlex.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_guides_do_name_commands():
    assert sum(len(_commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 25
