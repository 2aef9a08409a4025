"""A run's folder and its `run.json`: parameters, provenance, the state of each stage; all that resuming needs."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spoc_lib.config.shipped import project_dir
from spoc_lib.core.clock import Anchor
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.core.files import read_record, write_json
from spoc_lib.core.yamlfile import SHORT

#: What may name a run, and so a folder.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def outputs_dir() -> Path:
    """`outputs/` of the project, or below the current folder; `SPOC_OUTPUTS` overrides it."""
    own = os.environ.get("SPOC_OUTPUTS")
    return Path(os.path.abspath(os.path.expanduser(own))) if own else project_dir() / "outputs"


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder. `run.json` is read afresh for each question, so two processes see the same state."""

    folder: Path

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.folder.name

    @classmethod
    def create(
        cls, name: str, run_id: str = "", facts: dict[str, Any] | None = None, inside: Path | None = None
    ) -> Run:
        """A new folder `outputs/<run_id>` (or `inside` another folder); by default `<name>-<date>-<time>`. `facts` go
        into run.json.

        The folder appears with its run.json in it or not at all, whoever else creates one at the same moment.
        """
        base = run_id or f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if not PLAIN_NAME.fullmatch(base):
            raise InputError(
                "bad-run-id",
                f"run id {base[:80]!r} must be a plain name of at most 200 letters, digits, '.', '_' and '-', without "
                "a folder",
            )
        inside = (inside or outputs_dir()).resolve()
        inside.mkdir(parents=True, exist_ok=True)
        for suffix in ["", *(f"-{n}" for n in range(2, 100))]:
            folder = inside / (base + suffix)
            with tempfile.TemporaryDirectory(dir=inside, prefix=".new-", ignore_cleanup_errors=True) as new:
                state = {"run_id": folder.name, "anchor": Anchor.now(), **(facts or {}), "stages": {}}
                write_json(Path(new) / "run.json", state)
                os.chmod(new, 0o755)
                try:
                    os.rename(new, folder)  # fails where a folder with something in it stands
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                        raise
                    if run_id:
                        raise InputError(
                            "run-exists",
                            f"run '{run_id}' exists: choose another --run-id, or add --resume to go on with it",
                        ) from None
                    continue
            return cls(folder)
        raise SpocError("run-exists", f"cannot find a free name for a run called {base}")

    @classmethod
    def open(cls, run_id_or_path: str | Path) -> Run:
        """An existing run, by id or folder."""
        path = Path(run_id_or_path)
        for folder in (path, outputs_dir() / path):
            if os.path.isfile(folder / "run.json"):
                return cls(folder.resolve())
        raise InputError("unknown-run", f"no run {SHORT.repr(str(run_id_or_path))}: no folder with a run.json in "
                         f"{outputs_dir()}")

    @classmethod
    def at(cls, folder: str, facts: dict[str, Any]) -> Run:
        """The run in `folder` (or of that id), created there where there is none yet: notebooks that a scheduler starts
        one by one share a run by its folder's name."""
        path = Path(os.path.expanduser(folder))
        if os.sep in folder and not os.path.isfile(path / "run.json") and os.path.isdir(path.parent):
            try:
                return cls.create(path.name, path.name, facts, path.parent.resolve())
            except InputError as error:
                if error.code != "run-exists":  # else somebody was faster, and it is there
                    raise
        return cls.open(folder)

    @classmethod
    def latest(cls, cluster: str) -> Run:
        """The newest run of a cluster; InputError where there is none."""
        runs = [run for run in cls.all() if run.state.get("cluster") == cluster]
        if not runs:
            raise InputError(
                "no-run-yet", f"there is no run of cluster '{cluster}' in {outputs_dir()}: begin one, without --resume"
            )
        return max(runs, key=lambda run: run.state["anchor"]["wall_s"])

    @classmethod
    def all(cls) -> list[Run]:
        """Every run in outputs/, by name; one whose run.json cannot be read is left out (the index lists it)."""
        return [run for path in sorted(outputs_dir().glob("[!.]*/run.json")) if (run := cls(path.parent)).readable]

    @property
    def readable(self) -> bool:
        """Whether its run.json is whole."""
        try:
            return bool(self.state)
        except InputError:
            return False

    @property
    def state_path(self) -> Path:
        """Its run.json."""
        return self.folder / "run.json"

    @property
    def state(self) -> dict[str, Any]:
        """run.json as it stands now."""
        return read_record(self.state_path, "run state", "run_id", "anchor", "stages")

    def update(self, **facts: Any) -> None:
        """Write facts into run.json, beside those that are there."""
        write_json(self.state_path, {**self.state, **facts})

    def stage_state(self, number: str) -> dict[str, Any]:
        """What run.json says of a stage; `state` is `absent` where it never began."""
        return self.state["stages"].get(number, {"state": "absent"})

    def finishes(self, number: str) -> int:
        """How many times a stage has come to its end in this run."""
        return int(self.stage_state(number).get("finishes", 0))

    def set_stage(self, number: str, **facts: Any) -> None:
        """Write facts of a stage into run.json, beside those that are there."""
        stages = self.state["stages"]
        stages[number] = {**stages.get(number, {}), **facts}
        self.update(stages=stages)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the run for one writer; InputError when another process is at work in it."""
        with open(self.folder / ".lock", "w") as handle:
            lock(handle, f"run '{self.id}': wait for it or choose another --run-id")
            for half in self.folder.rglob(".*.part"):  # what a killed writer had not finished
                half.unlink(missing_ok=True)
            yield


def lock(handle: IO[str] | int, what: str, *, wait_s: float = 0.0) -> None:
    """Lock an open file until it is closed; InputError when another process holds it for longer than `wait_s`."""
    until = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise InputError("run-busy", f"another process is working on {what}") from None
        time.sleep(0.2)
