"""The master of workers on other machines: `python -m spoc_lib.load.master plan.json FOLDER`.

To the parent it looks like one client process (the same JSON lines); to the workers it is Locust's master. It hands
out plan and shares, compares clocks, names one start, and writes what the workers send into `client-K` folders as if
they had run here. A worker that falls silent is lost: the others go on, its requests end as censored.
"""

from __future__ import annotations

import gevent.monkey

gevent.monkey.patch_all()  # before anything else is imported

import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import orjson  # noqa: E402
import pyarrow as pa  # noqa: E402
from gevent.threadpool import ThreadPool  # noqa: E402
from locust.env import Environment  # noqa: E402
from locust.runners import STATE_MISSING, MasterRunner  # noqa: E402

from spoc_lib.core.files import write_json  # noqa: E402
from spoc_lib.load.books import PLANNED, REPLIES, tried, writers  # noqa: E402
from spoc_lib.load.child import Parent, ended, say  # noqa: E402
from spoc_lib.load.plan import LoadPlan, host_and_port  # noqa: E402
from spoc_lib.load.wire import CLOCK_ROUNDS, ClockEstimate, moved, unpacked  # noqa: E402

START_IN_S = 0.5
WRITE_S = 1.0
#: Locust calls a worker missing after three seconds without a heartbeat. One that reads a corpus, or whose host is
#: busy, may be silent for so much longer before it is lost.
PREPARING_SILENCE_S = 60.0
RUNNING_SILENCE_S = 5.0
#: What a worker may need beyond the rung's bounds to send its last records.
LAST_WORDS_S = 10.0


class Share:
    """One worker as the master knows it, and the folder that holds its records."""

    def __init__(self, client_id: str, folder: Path) -> None:
        self.client_id, self.folder = client_id, folder
        self.clock = ClockEstimate()
        self.prepared = self.ended = False
        self.missing_since_s: float | None = None
        self.state: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._writers = writers(folder)
        self._due: list[dict[str, Any]] = []

    def take(self, data: dict[str, Any]) -> None:
        """A message came. What was planned is on record at once; tables wait for `write`, for syncing them to the disk
        must not keep the master from hearing the others."""
        with open(self.folder / PLANNED, "ab") as file:
            file.writelines(orjson.dumps(moved(row, self.clock.offset_s)) + b"\n" for row in data["planned"])
        self.state = data.get("state", self.state)
        if "tables" in data:
            self._due.append(data)
        self.ended = self.ended or "report" in data

    def write(self) -> None:
        """Put the tables that have come on disk, on our clock; in another thread, one call at a time."""
        due, self._due = self._due, []
        tables = [unpacked(data["tables"], self.clock.offset_s) for data in due]
        for name, writer in self._writers.items():
            parts = [table[name] for table in tables if name in table]
            if parts:
                writer.write(pa.concat_tables(parts))
        if due and "report" in due[-1]:
            self._close(**due[-1])

    def _close(self, report: dict[str, Any], replies: bytes, **_: Any) -> None:
        if replies:
            (self.folder / REPLIES).write_bytes(replies)
        write_json(self.folder / "client.json", {
            **report, "start_s": report["start_s"] - self.clock.offset_s, "worker": self.client_id,
            "clock_offset_s": self.clock.offset_s, "clock_error_s": self.clock.error_s})


class Master:
    """Locust's master runner with the shares of its workers."""

    def __init__(self, plan: LoadPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        if plan.master is None:
            raise ValueError("the plan names no address for its workers")
        host, port = host_and_port(plan.master)
        self.environment = Environment(stop_timeout=0)
        self.runner: MasterRunner = self.environment.create_master_runner(host, port)
        if plan.ui_port is not None:
            self.environment.create_web_ui("127.0.0.1", plan.ui_port)
        self.shares: dict[str, Share] = {}
        self.refused: dict[str, Any] | None = None
        self.failure: Exception | None = None
        self._disk = ThreadPool(1)
        for name, listener in (("prepared", self._on_prepared), ("refused", self._on_refused),
                               ("clock", self._on_clock), ("planned", self._on_rows), ("rows", self._on_rows),
                               ("end", self._on_rows)):
            self.runner.register_message(f"spoc_{name}", listener)

    def _on_prepared(self, environment: Environment, msg: Any, **_: Any) -> None:
        self.shares[msg.node_id].prepared = True

    def _on_refused(self, environment: Environment, msg: Any, **_: Any) -> None:
        self.refused = msg.data

    def _on_clock(self, environment: Environment, msg: Any, **_: Any) -> None:
        self.shares[msg.node_id].clock.add(msg.data["sent_s"], msg.data["theirs_s"], time.monotonic())

    def _on_rows(self, environment: Environment, msg: Any, **_: Any) -> None:
        self.shares[msg.node_id].take(msg.data)

    def tell(self, event: str, share: Share, **values: Any) -> None:
        """Send an event to one worker."""
        self.runner.send_message(f"spoc_{event}", values, share.client_id)

    def gather(self) -> dict[str, Any] | None:
        """Wait for the workers, hand out the shares, compare clocks; a refusal (code, message, status) or None."""
        wanted, deadline = self.plan.processes, time.monotonic() + self.plan.join_timeout_s
        while len(self.runner.clients.ready) < wanted:
            if time.monotonic() > deadline:
                return {"code": "no-workers", "status": 2, "message": f"{len(self.runner.clients.ready)} of {wanted} "
                        f"workers joined at {self.plan.master} within {self.plan.join_timeout_s:g} s: start 'spoc load "
                        "worker' on the other machines"}
            say("preparing", done=len(self.runner.clients.ready), of=wanted)
            gevent.sleep(0.2)
        for index, client_id in enumerate(sorted(node.id for node in self.runner.clients.ready)[:wanted]):
            self.shares[client_id] = Share(client_id, self.folder / f"client-{index}")
            self.tell("plan", self.shares[client_id], plan=self.plan.model_dump_json(), index=index)
        while not all(share.prepared for share in self.shares.values()):
            lost = [share for share in self.shares.values() if self.is_lost(share, PREPARING_SILENCE_S)]
            if self.refused or lost:
                return self.refused or {"code": "worker-lost", "status": 1,
                                        "message": f"the worker {lost[0].client_id} was lost before the start"}
            say("preparing", done=sum(share.prepared for share in self.shares.values()), of=wanted)
            gevent.sleep(0.2)
        for _ in range(CLOCK_ROUNDS):
            for share in self.shares.values():
                self.tell("clock", share, sent_s=time.monotonic())
            gevent.sleep(0.02)
        return None

    def is_lost(self, share: Share, silence_s: float = RUNNING_SILENCE_S) -> bool:
        """Whether the worker has left, or has been missing for `silence_s`."""
        node = self.runner.clients.get(share.client_id)
        if node is None:
            return True
        if node.state != STATE_MISSING:
            share.missing_since_s = None
            return False
        share.missing_since_s = share.missing_since_s or time.monotonic()
        return time.monotonic() - share.missing_since_s > silence_s

    def _write(self) -> None:
        """Once a second, while the master goes on listening."""
        while True:
            gevent.sleep(WRITE_S)
            self._write_all()

    def _write_all(self) -> None:
        for share in self.shares.values():
            failure = self._disk.spawn(tried, share.write).get()  # after what that thread still writes
            if failure is not None:
                self.failure = self.failure or failure
                self.stop()

    def run(self, parent: Parent) -> None:
        """From the start that the parent names to the last worker's end, or the bounds."""
        start_s = max(parent.start_time(self.plan.users), time.monotonic() + START_IN_S)
        gevent.spawn(parent.watch, self.stop)
        writing = gevent.spawn(self._write)
        for share in self.shares.values():
            self.tell("go", share, start_s=start_s + share.clock.offset_s)
        deadline = start_s + self.plan.duration_s + self.plan.stop_timeout_s + LAST_WORDS_S
        told = 0.0
        while time.monotonic() < deadline:
            if all([share.ended or self.is_lost(share) for share in self.shares.values()]):  # each is looked at
                break
            if time.monotonic() - told > 1.0:
                told = time.monotonic()
                say("progress", time_s=told, **self.combined())
            gevent.sleep(0.1)
        self.runner.quit()
        writing.kill()
        self._write_all()
        if self.failure is not None:
            raise self.failure
        stopped = [share.state["stopped_s"] - share.clock.offset_s for share in self.shares.values() if share.ended]
        say("end", **self.combined(), start_s=start_s, stopped_s=min(stopped, default=time.monotonic()))

    def combined(self) -> dict[str, Any]:
        """The workers' states as one: sums, and the worst TTFT."""
        states = [share.state for share in self.shares.values() if share.state]
        worst = [state["ttft_p95_s"] for state in states if state["ttft_p95_s"] is not None]
        return {**{name: sum(state[name] for state in states)
                   for name in ("live", "in_flight", "finished", "planned", "completed", "failed", "tokens")},
                "ttft_p95_s": max(worst, default=None)}

    def stop(self) -> None:
        """Interrupted: every worker stops and sends what it has."""
        for share in self.shares.values():
            self.tell("stop", share)


def main() -> int:
    """`python -m spoc_lib.load.master PLAN FOLDER`: gather the workers, share out the users; exit status."""
    plan, folder = LoadPlan.model_validate_json(Path(sys.argv[1]).read_bytes()), Path(sys.argv[2])
    master = Master(plan, folder)
    for number in (signal.SIGTERM, signal.SIGINT):
        gevent.signal_handler(number, master.stop)
    refusal = master.gather()
    if refusal:
        say("refused", **refusal)
        for share in master.shares.values():
            master.tell("stop", share)
        master.runner.quit()
        return refusal["status"]
    return ended(lambda: master.run(Parent(folder)))


if __name__ == "__main__":
    sys.exit(main())
