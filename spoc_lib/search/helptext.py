"""The engine's own word on its flags: `--help` of the very command, or container image, that will be launched."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

from spoc_lib.config import Cluster
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import write_text
from spoc_lib.search.space import FlagSpace
from spoc_lib.servers.commands import help_command

#: New engines print only groups on --help, and everything on --help=all; old ones know the first alone.
QUESTIONS = ("--help=all", "--help")
TIMEOUT_S = 180
#: An answer with fewer flags than this is no list of the engine's flags.
LEAST_FLAGS = 20
_OPTION = re.compile(r"(?<![\w-])--([a-z0-9][a-z0-9_-]*)")


def check_flags(cluster: Cluster, space: FlagSpace, folder: Path) -> str | None:
    """Hold all flags of the search against the engine's help text, kept as `folder`/help.txt.

    InputError naming a flag that the engine does not know. A sentence when it could not be asked, else None.
    """
    path = Path(folder) / "help.txt"
    text = path.read_text(encoding="utf-8") if path.is_file() else ask(cluster)
    if text is None:
        asked = shlex.join(help_command(cluster, QUESTIONS[-1]).arguments)
        return f"The flags were not checked against the engine's own help: '{asked}' printed no list of flags."
    write_text(path, text)
    refuse_unknown([*space.searched, *space.fixed], options(text), cluster.name)
    return None


def ask(cluster: Cluster) -> str | None:
    """The help text of the cluster's engine; None when it prints none."""
    for question in QUESTIONS:
        command = help_command(cluster, question)
        try:
            done = subprocess.run(command.arguments, capture_output=True,
                                  encoding="utf-8", errors="replace", timeout=TIMEOUT_S, check=False,
                                  env={**os.environ, **command.environment}, cwd=command.directory)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if len(options(done.stdout)) >= LEAST_FLAGS:
            return done.stdout
    return None


def options(text: str) -> set[str]:
    """Flags named in a help text, with underscores, without dashes; `--no-x` also stands for `--x`."""
    names = {name.replace("-", "_") for name in _OPTION.findall(text)}
    return names | {name.removeprefix("no_") for name in names}


def refuse_unknown(flags: Iterable[str], known: set[str], cluster: str) -> None:
    """InputError for the first of `flags` that `known` lacks."""
    for flag in flags:
        if flag not in known:
            raise InputError("unknown-flag", f"cluster '{cluster}': the engine's own --help does not know "
                             f"'--{flag.replace('_', '-')}': remove the flag, or use the engine's version that has it")
