"""A client process on another machine: `python -m spoc_lib.load.worker HOST PORT` (`spoc load worker HOST:PORT`).

Joins a master, is told the plan and its share of the users, plays them and sends the records every second. A copy of
the records stays in a temporary folder until the rung has ended. The API key comes from this machine's environment.
"""

from __future__ import annotations

import os

import gevent.monkey

gevent.monkey.patch_all()  # before anything else is imported
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # as in `child`

import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pyarrow as pa  # noqa: E402
from gevent.event import AsyncResult, Event  # noqa: E402
from locust.env import Environment  # noqa: E402
from locust.runners import MASTER_HEARTBEAT_TIMEOUT, WorkerRunner  # noqa: E402

from spoc_lib.core.errors import SpocError  # noqa: E402
from spoc_lib.load.books import Books  # noqa: E402
from spoc_lib.load.client import Client, prepare  # noqa: E402
from spoc_lib.load.plan import LoadPlan  # noqa: E402
from spoc_lib.load.rung import Rung  # noqa: E402
from spoc_lib.load.wire import packed  # noqa: E402

#: Silence of the master after which a worker gives up.
MASTER_SILENCE_S = min(15, MASTER_HEARTBEAT_TIMEOUT)
#: The master hears of a request so soon after it was sent; should we be lost, it is censored rather than forgotten.
TELL_S = 0.1


class Master:
    """The master at the other end of Locust's connection (a `client.Boss`)."""

    def __init__(self, runner: WorkerRunner) -> None:
        self._runner = runner
        self.books: Books  # given by `main` as soon as the plan is known
        self.plan: AsyncResult = AsyncResult()
        self._go: AsyncResult = AsyncResult()
        self._stop = Event()
        for name, listener in (("plan", self._on_plan), ("clock", self._on_clock), ("go", self._on_go),
                               ("stop", self._on_stop)):
            runner.register_message(f"spoc_{name}", listener)

    def _on_plan(self, environment: Environment, msg: Any, **_: Any) -> None:
        self.plan.set(msg.data)

    def _on_clock(self, environment: Environment, msg: Any, **_: Any) -> None:
        self.tell("clock", sent_s=msg.data["sent_s"], theirs_s=time.monotonic())

    def _on_go(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._go.set(msg.data["start_s"])

    def _on_stop(self, environment: Environment, msg: Any, **_: Any) -> None:
        self._stop.set()

    def tell(self, event: str, **values: Any) -> None:
        """Send an event to the master."""
        self._runner.send_message(f"spoc_{event}", values)

    def preparing(self, done: int, of: int) -> None:
        """Nothing: Locust's heartbeat says that we live."""

    def start_time(self, users: int) -> float:
        """Say that all users are ready; wait for the second at which to begin."""
        self.tell("prepared", users=users)
        return self._go.get()

    def watch(self, interrupt: Callable[[], None]) -> None:
        """The master says stop, or is heard no more; meanwhile it is told of requests as they are sent."""
        while not self._stop.wait(TELL_S):
            planned = self.books.take_planned()
            if planned:
                self.tell("planned", planned=planned)
            heard = self._runner.last_heartbeat_timestamp
            if heard is not None and time.time() - heard > MASTER_SILENCE_S:
                break
        interrupt()

    def progress(self, state: dict[str, Any], tables: Mapping[str, pa.Table]) -> None:
        """Send the state and the rows so far."""
        self.tell("rows", state=state, tables=packed(tables), planned=self.books.take_planned())

    def end(self, state: dict[str, Any], report: dict[str, Any], tables: Mapping[str, pa.Table]) -> None:
        """Send what is left."""
        self.tell("end", state=state, report=report, tables=packed(tables), planned=self.books.take_planned(),
                  replies=self.books.replies())


def main() -> int:
    """`python -m spoc_lib.load.worker HOST PORT`: one rung for a master elsewhere; exit status."""
    host, port = sys.argv[1], int(sys.argv[2])
    environment = Environment(stop_timeout=0)
    runner = environment.create_worker_runner(host, port)
    master = Master(runner)
    told = master.plan.get()
    plan = LoadPlan.model_validate_json(told["plan"])
    with tempfile.TemporaryDirectory(prefix="spoc-worker-") as folder:
        try:
            rung = Rung(plan, Path(folder), told["index"])
            master.books = rung.books
            prepare(plan, rung, told["index"], master)
        except SpocError as error:
            master.tell("refused", code=error.code, message=error.message, status=error.exit_status)
            gevent.sleep(1.0)  # let the message out
            return error.exit_status
        Client(plan, rung, environment, runner, master).run()
        gevent.sleep(1.0)  # let the last message out
    return 1 if rung.crashed else 0


if __name__ == "__main__":
    sys.exit(main())
