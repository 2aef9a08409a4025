"""The locked versions are exact, come from nowhere in particular, and are what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINES = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]


def test_every_line_is_one_exact_version():
    names = [line.partition("==")[0] for line in LINES]
    assert sorted(names) == names and len(names) > 100
    assert not [line for line in LINES if not re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!]+", line)]


def test_the_lock_agrees_with_pyproject():
    locked = dict(line.split("==") for line in LINES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"]["test"]]]
    wrong = [str(one) for one in wanted
             if not one.specifier.contains(locked.get(canonicalize_name(one.name), "0"), prereleases=True)]
    assert not wrong, f"{wrong}: make lock"
