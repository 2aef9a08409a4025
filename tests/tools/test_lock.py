"""Locked versions and conda's list are what pyproject.toml asks for; each version is exact."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tools import environment

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


def test_the_first_release_of_python_3_11_can_install_it():
    wrong = []
    for name, version in (line.split("==") for line in LINES):
        installed = next(iter(metadata.distributions(name=name)), None)
        if installed and installed.version == version:
            python = installed.metadata.get("Requires-Python")
            if python and not SpecifierSet(python).contains("3.11.0"):
                wrong.append(f"{name} {version} needs {python}")
    assert not wrong


def test_environment_yml_agrees_with_pyproject():
    assert (ROOT / "environment.yml").read_text() == environment.generate(ROOT / "pyproject.toml"), \
        "make environment.yml"
