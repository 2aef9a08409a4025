"""The client process: `python -m spoc_lib.load.child plan.json FOLDER`. The only place that imports Locust.

Talks to its parent in JSON lines on standard output (preparing, ready, progress, end) and stops when told to: by
SIGTERM or SIGINT, or when its standard input closes because the parent is gone.
"""

from __future__ import annotations

import gevent.monkey

gevent.monkey.patch_all()  # before anything else is imported: Locust would do it too late for ssl

import gc  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import orjson  # noqa: E402
from gevent.threadpool import ThreadPool  # noqa: E402
from locust.env import Environment  # noqa: E402

from spoc_lib.core.clock import Anchor  # noqa: E402
from spoc_lib.core.errors import SpocError  # noqa: E402
from spoc_lib.core.files import write_json  # noqa: E402
from spoc_lib.load.arrivals import ArrivalClientPool, WallOffset  # noqa: E402
from spoc_lib.load.bodies import BodyEncoder  # noqa: E402
from spoc_lib.load.plan import LoadPlan  # noqa: E402
from spoc_lib.load.rung import Rung  # noqa: E402
from spoc_lib.load.script import Histories, script_of  # noqa: E402
from spoc_lib.load.user import Player, ScriptedUser  # noqa: E402

TICK_S = 0.01
FLUSH_S = 1.0
#: How long requests in flight may still run after an interrupt.
INTERRUPT_GRACE_S = 1.0


def say(event: str, **values: Any) -> None:
    """One line to the parent."""
    sys.stdout.write(orjson.dumps({"event": event, **values}).decode() + "\n")
    sys.stdout.flush()


def prepare(plan: LoadPlan, rung: Rung, process: int) -> None:
    """All first turns, text and bodies, before the clock starts: nothing of it may fall into the measurement."""
    script, histories = script_of(plan), Histories(plan)
    mine = range(process, plan.users, plan.processes)
    told = time.monotonic()
    for done, number in enumerate(mine):
        rung.players.append(Player(script.user(number), histories.new(), BodyEncoder(plan)))
        if time.monotonic() - told > 0.5:
            told = time.monotonic()
            say("preparing", done=done + 1, of=len(mine))


def user_class(plan: LoadPlan, rung: Rung) -> type[ScriptedUser]:
    """The Locust user class of this rung; one connection pool for all users, one connection a request in flight."""
    pool = ArrivalClientPool(concurrency=plan.users + 8, network_timeout=plan.idle_timeout_s,
                             connection_timeout=min(30.0, plan.idle_timeout_s), insecure=not plan.verify_tls,
                             ssl_context_factory=_tls(plan))
    return type("ConversationUser", (ScriptedUser,), {
        "host": plan.api_url, "rung": rung, "client_pool": pool, "insecure": not plan.verify_tls, "abstract": False})


def _tls(plan: LoadPlan) -> Any:
    if not plan.base_url.startswith("https:"):
        return None
    import ssl

    return ssl.create_default_context if plan.verify_tls else ssl._create_unverified_context


class Client:
    """Runs the rung in this process: starts the users, keeps time, puts records on disk, ends within its bounds."""

    def __init__(self, plan: LoadPlan, rung: Rung) -> None:
        self.plan, self.rung = plan, rung
        self.environment = Environment(user_classes=[user_class(plan, rung)], stop_timeout=0)
        self.interrupted = False
        self._lags: list[float] = []
        self._disk = ThreadPool(1)

    def run(self) -> None:
        rung, plan = self.rung, self.plan
        for number in (signal.SIGTERM, signal.SIGINT):
            gevent.signal_handler(number, self.interrupt)
        runner = self.environment.create_local_runner()
        if plan.ui_port is not None:
            self.environment.create_web_ui("127.0.0.1", plan.ui_port)
        gc.collect()
        gc.freeze()  # histories and corpus are not garbage; a full collection would stop all users
        watchers = [gevent.spawn(self._tick)]
        users = len(rung.players)
        say("prepared", users=users)
        rung.start_s = self._start_time()
        rung.end_s = rung.start_s + plan.duration_s
        WallOffset.refresh()
        watchers.append(gevent.spawn(self._watch_parent))
        runner.start(users, spawn_rate=max(1, users))
        reporter = gevent.spawn(self._report)
        rung.stopping.wait(max(0.0, rung.end_s - time.monotonic()))
        rung.stopping.set()
        stopped_s = time.monotonic()
        self._drain()
        runner.quit()
        gevent.killall([*watchers, reporter])
        self._flush()
        rung.books.close()
        say("end", **rung.state(), stopped_s=stopped_s, drained_s=time.monotonic())

    def _drain(self) -> None:
        """Let what is in flight finish, `stop_timeout_s` at most (or the grace of an interrupt)."""
        began = time.monotonic()
        while self.rung.in_flight and not self.rung.crashed:
            limit = INTERRUPT_GRACE_S if self.interrupted else self.plan.stop_timeout_s
            if time.monotonic() - began > limit:
                break
            gevent.sleep(0.02)

    def interrupt(self) -> None:
        self.interrupted = True
        self.rung.cut_class = "interrupted"
        self.rung.stopping.set()

    @staticmethod
    def _start_time() -> float:
        """The parent names one start for all client processes, on the clock that they share."""
        gevent.socket.wait_read(0)
        line = os.read(0, 4096)
        if not line:
            sys.exit(1)  # the parent is gone
        return orjson.loads(line)["start_s"]

    def _watch_parent(self) -> None:
        """Standard input is a pipe that the parent holds; its end means that nobody waits for us."""
        gevent.socket.wait_read(0)
        self.interrupt()

    def _tick(self) -> None:
        """How late this process's loop is: a 10 ms sleep, measured."""
        while True:
            before = time.monotonic()
            gevent.sleep(TICK_S)
            self._lags.append(time.monotonic() - before - TICK_S)

    def _report(self) -> None:
        while True:
            gevent.sleep(FLUSH_S)
            self._flush()
            say("progress", time_s=time.monotonic(), **self.rung.state())

    def _flush(self) -> None:
        """Sample the client's own state and put the last second on disk, in another thread."""
        WallOffset.refresh()
        lags, self._lags = sorted(self._lags) or [0.0], []
        use = resource.getrusage(resource.RUSAGE_SELF)
        rung, books = self.rung, self.rung.books
        books.sample(time.monotonic(), {
            "live_users": rung.live, "in_flight_users": rung.in_flight,
            "thinking_users": rung.live - rung.in_flight, "planned_total": books.planned,
            "completed_total": books.completed, "failed_total": books.failed, "tokens_total": books.tokens,
            "client_cpu_seconds_total": use.ru_utime + use.ru_stime, "client_memory_bytes": use.ru_maxrss * 1024.0,
            "client_loop_lag_p99_s": lags[int(len(lags) * 0.99)], "client_loop_lag_max_s": lags[-1],
        })
        self._disk.spawn(books.write, books.take()).get()


def main() -> int:
    plan_path, folder, process = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if sys.argv[3:] else 0
    plan = LoadPlan.model_validate_json(plan_path.read_bytes())
    rung = Rung(plan, folder, process)
    try:
        prepare(plan, rung, process)
    except SpocError as error:
        say("refused", code=error.code, message=error.message, status=error.exit_status)
        return error.exit_status
    client = Client(plan, rung)
    client.run()
    write_json(folder / "client.json", {
        "anchor": Anchor.now(), "start_s": rung.start_s, "interrupted": client.interrupted, "crashed": rung.crashed,
        "errors": rung.errors, "error_samples": rung.error_samples, "retry_after": rung.retries,
        "kernel_stamped": rung.kernel_stamped, "read_streams": rung.read_streams})
    return 1 if rung.crashed else 0


if __name__ == "__main__":
    sys.exit(main())
