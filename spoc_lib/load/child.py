"""A client process of the parent's own host: `python -m spoc_lib.load.child plan.json FOLDER NUMBER`.

Talks to its parent in JSON lines on standard output (preparing, prepared, progress, end) and stops when told to: by
SIGTERM or SIGINT, or when its standard input closes because the parent is gone.
"""

from __future__ import annotations

import os

import gevent.monkey

gevent.monkey.patch_all()  # before anything else is imported: Locust would do it too late for ssl
# Arrow's own allocator keeps ever more pages of what one thread allocates and another frees, as happens each second
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"

import contextlib  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import orjson  # noqa: E402
import pyarrow as pa  # noqa: E402
from locust.env import Environment  # noqa: E402

from spoc_lib.core.errors import SpocError  # noqa: E402
from spoc_lib.core.files import write_json  # noqa: E402
from spoc_lib.load.client import Client, prepare  # noqa: E402
from spoc_lib.load.plan import LoadPlan  # noqa: E402
from spoc_lib.load.rung import Rung  # noqa: E402


def say(event: str, **values: Any) -> None:
    """One line to the parent. One that is gone hears nothing: whoever watches it ends the rung."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(orjson.dumps({"event": event, **values}).decode() + "\n")
        sys.stdout.flush()


def ended(work: Callable[[], None]) -> int:
    """Do `work`; exit status. The parent is told when the disk fails, for then the log says nothing."""
    try:
        work()
    except OSError as error:
        say("failed", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


class Parent:
    """The parent process at the other end of our pipes (a `client.Boss`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def preparing(self, done: int, of: int) -> None:
        """Say how many users are ready."""
        say("preparing", done=done, of=of)

    def start_time(self, users: int) -> float:
        """Say that all are ready; wait for the monotonic second at which to begin."""
        say("prepared", users=users)
        gevent.socket.wait_read(0)
        line = os.read(0, 4096)
        if not line:
            sys.exit(1)  # the parent is gone
        return orjson.loads(line)["start_s"]

    def watch(self, interrupt: Callable[[], None]) -> None:
        """Standard input is a pipe that the parent holds; its end means that nobody waits for us."""
        gevent.socket.wait_read(0)
        interrupt()

    def progress(self, state: dict[str, Any], tables: dict[str, pa.Table]) -> None:
        """Say how the rung stands."""
        say("progress", time_s=time.monotonic(), **state)

    def end(self, state: dict[str, Any], report: dict[str, Any], tables: dict[str, pa.Table]) -> None:
        """Leave the client's report and say the end."""
        write_json(self._folder / "client.json", report)
        say("end", **state)


def main() -> int:
    """`python -m spoc_lib.load.child PLAN FOLDER NUMBER`: play a share of the users; exit status."""
    plan_path, folder, process = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    plan = LoadPlan.model_validate_json(plan_path.read_bytes())
    rung, parent = Rung(plan, folder, process), Parent(folder)
    try:
        prepare(plan, rung, process, parent)
    except SpocError as error:
        say("refused", code=error.code, message=error.message, status=error.exit_status)
        return error.exit_status
    environment = Environment(stop_timeout=0)
    runner = environment.create_local_runner()
    if plan.ui_port is not None:
        environment.create_web_ui("127.0.0.1", plan.ui_port + process)
    return ended(Client(plan, rung, environment, runner, parent).run) or (1 if rung.crashed else 0)


if __name__ == "__main__":
    sys.exit(main())
