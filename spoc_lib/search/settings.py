"""What a search was started with, written down before its first trial: its folder alone can be resumed."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spoc_lib.config import Cluster, Profile, SearchSpec
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.core.version import VERSION

SETTINGS = "search.json"


@contextmanager
def only_worker(folder: Path) -> Iterator[None]:
    """Hold the search in `folder` for one process: a second one would take the first one's running trial for a
    killed one. InputError when another is at it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("search-busy", f"another process is searching in {folder}: wait for it, or name another "
                             "folder (workers share a study through SPOC_STORAGE, each in its own folder)") from None
        yield


def write_settings(cluster: Cluster, profile: Profile, folder: Path, seed: int, trials: int, confirm: bool,
                   resume: bool) -> dict[str, Any]:
    """Write the settings into `folder`; InputError when it holds a search already and none is to be resumed."""
    if (folder / SETTINGS).is_file() and not resume:
        raise InputError("search-exists", f"{folder} holds a search already: resume it, or name another folder")
    settings = {"cluster": cluster.model_dump(mode="json"), "profile": profile.model_dump(mode="json"),
                "seed": seed, "trials": trials, "confirm": confirm, "workbench": VERSION}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SETTINGS, settings)
    return settings


def with_objective(cluster: Cluster, objective: str) -> Cluster:
    """The cluster with another first objective; InputError when there is no such one."""
    values = {**cluster.search.model_dump(), "objective": objective}
    return cluster.model_copy(update={"search": yamlfile.parse(SearchSpec, values, "search")})


def open_settings(folder: Path) -> dict[str, Any]:
    """The settings of the search in `folder`; InputError when there is none."""
    if not (Path(folder) / SETTINGS).is_file():
        raise InputError("no-search", f"{folder} holds no search: give the folder that `spoc search run` wrote")
    return read_json(Path(folder) / SETTINGS, "search settings")


def settings_models(settings: dict[str, Any]) -> tuple[Cluster, Profile]:
    """Cluster and profile as the search was started with, whatever became of their files."""
    return (yamlfile.parse(Cluster, settings["cluster"], SETTINGS),
            yamlfile.parse(Profile, settings["profile"], SETTINGS))
