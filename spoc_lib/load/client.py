"""One client process's rung: prepare, start the Locust users, keep time, put records on disk, end within bounds.

Child process only: whoever runs it (`child` for the parent's own processes, `worker` for other machines) must have
patched the interpreter before importing this module.
"""

from __future__ import annotations

import gc
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import gevent
import gevent.event
import gevent.monkey
import pyarrow as pa
from gevent.threadpool import ThreadPool
from locust.contrib.fasthttp import LocustUserAgent
from locust.env import Environment
from locust.runners import STATE_RUNNING, Runner

from spoc_lib.load.arrivals import KERNEL_STAMPS, ArrivalClientPool, WallOffset
from spoc_lib.load.bodies import BodyEncoder
from spoc_lib.load.books import tried
from spoc_lib.load.plan import LoadPlan
from spoc_lib.load.player import Player
from spoc_lib.load.rung import Rung
from spoc_lib.load.script import material
from spoc_lib.load.user import ScriptedUser

TICK_S = 0.01
FLUSH_S = 1.0
#: How long requests in flight may still run after an interrupt.
INTERRUPT_GRACE_S = 1.0
#: Requests in flight from which tokens are gathered, and for how long.
GATHER_FROM = 64
GATHER_S = 0.001
USER_CLASS = "ConversationUser"


class Boss(Protocol):
    """Whom this client works for: its parent process through pipes, or a master on another machine."""

    def preparing(self, done: int, of: int) -> None:
        """`done` of `of` users are ready."""
        ...

    def start_time(self, users: int) -> float:
        """Say that `users` are prepared; wait for the start of the rung (this host's monotonic seconds)."""
        ...

    def watch(self, interrupt: Any) -> None:
        """Call `interrupt` when the boss is gone; runs as a greenlet."""
        ...

    def progress(self, state: dict[str, Any], tables: dict[str, pa.Table]) -> None:
        """How the rung stands, with the rows since the last call."""
        ...

    def end(self, state: dict[str, Any], report: dict[str, Any], tables: dict[str, pa.Table]) -> None:
        """The rung is over: its last state and rows, and the client's report."""
        ...


def resident_bytes() -> float:
    """Memory that this process holds now (Linux; elsewhere its peak so far)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * float(resource.getpagesize())
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def prepare(plan: LoadPlan, rung: Rung, process: int, boss: Boss) -> None:
    """All first turns, text and bodies, before the clock starts: nothing of it may fall into the measurement."""
    played = material(plan)
    mine = range(process, plan.users, plan.processes)
    told = time.monotonic()
    for done, number in enumerate(mine):
        user, history = played.script.user(number), played.new_history()
        rung.players.append(Player(user, history, BodyEncoder(plan), played.overhead))
        if time.monotonic() - told > 0.5:
            told = time.monotonic()
            boss.preparing(done + 1, len(mine))
            gevent.sleep(0)


def user_class(plan: LoadPlan, rung: Rung) -> type[ScriptedUser]:
    """The Locust user class of this rung; one connection pool for all users, one connection a request in flight."""
    LocustUserAgent.valid_response_codes = frozenset(range(100, 1000))  # the status is read here, not raised by Locust
    LocustUserAgent.redirect_response_codes = frozenset()  # a POST must not become a GET, nor a TTFT hold two ways
    pool = ArrivalClientPool(concurrency=plan.users + 8, network_timeout=plan.idle_timeout_s,
                             connection_timeout=min(30.0, plan.idle_timeout_s), insecure=not plan.verify_tls,
                             ssl_context_factory=_tls(plan))
    return type(USER_CLASS, (ScriptedUser,), {
        "host": plan.api_url, "rung": rung, "client_pool": pool, "insecure": not plan.verify_tls, "abstract": False})


def _tls(plan: LoadPlan) -> Any:
    if not plan.base_url.startswith("https:"):
        return None
    import ssl

    # called with a file of authorities of the library's choice; the system's own, or SSL_CERT_FILE, are meant
    return lambda **_: ssl.create_default_context() if plan.verify_tls else ssl._create_unverified_context()


class Client:
    """Runs the rung in this process."""

    def __init__(self, plan: LoadPlan, rung: Rung, environment: Environment, runner: Runner, boss: Boss) -> None:
        self.plan, self.rung, self.runner, self.boss = plan, rung, runner, boss
        environment.user_classes = [user_class(plan, rung)]
        self.interrupted = False
        self._lags: list[float] = []
        self._disk = ThreadPool(1)
        self._ended = gevent.event.Event()

    def run(self) -> None:
        """Play the rung from the first user's preparation to the last answer."""
        rung, plan = self.rung, self.plan
        for number in (signal.SIGTERM, signal.SIGINT):
            gevent.signal_handler(number, self.interrupt)
        gc.collect()
        gc.freeze()  # histories and corpus are not garbage; a full collection would stop all users
        helpers = [gevent.spawn(self._tick)]
        users = len(rung.players)
        rung.start_s = self.boss.start_time(users)
        rung.end_s = rung.start_s + plan.duration_s
        helpers.append(gevent.spawn(self.boss.watch, self.interrupt))
        WallOffset.refresh()
        self._breathe()
        self.runner.spawn_users({USER_CLASS: users})
        self.runner.update_state(STATE_RUNNING)
        reporter = gevent.spawn(self._report)
        rung.stopping.wait(max(0.0, rung.end_s - time.monotonic()))
        rung.stopping.set()
        stopped_s = time.monotonic()
        self._drain()
        self.runner.user_greenlets.kill()  # whoever is still in flight books itself as censored
        self._ended.set()
        reporter.join()  # not killed: what it has taken from the books must still be told
        gevent.killall(helpers)
        tables = self._flush()
        rung.books.close()
        self.boss.end({**rung.state(), "stopped_s": stopped_s}, {
            "start_s": rung.start_s, "interrupted": self.interrupted, "crashed": rung.crashed, "errors": rung.errors,
            "error_samples": rung.error_samples, "retry_after": rung.retries, "kernel_stamped": rung.kernel_stamped,
            "read_streams": rung.read_streams, "hidden_tokens": rung.hidden_tokens, "odd_events": rung.odd_events,
            "clock_stepped_s": WallOffset.stepped_s}, tables)

    def _breathe(self) -> None:
        """With many streams, let a millisecond of tokens gather before each look at the sockets: one wake-up serves
        many, and the kernel's stamps stay what they are. Not where stamps are our own (TLS, other systems)."""
        if self.plan.base_url.startswith("https:") or not KERNEL_STAMPS:
            return
        sleep, rung = gevent.monkey.get_original("time", "sleep"), self.rung

        def gather() -> None:
            if rung.in_flight >= GATHER_FROM:
                sleep(GATHER_S)

        self._gatherer = gevent.get_hub().loop.prepare()
        self._gatherer.start(gather)

    def _drain(self) -> None:
        """Let what is in flight finish, `stop_timeout_s` at most (or the grace of an interrupt)."""
        began = time.monotonic()
        while self.rung.in_flight and not self.rung.crashed:
            limit = INTERRUPT_GRACE_S if self.interrupted else self.plan.stop_timeout_s
            if time.monotonic() - began > limit:
                break
            gevent.sleep(0.02)

    def interrupt(self) -> None:
        """End the rung now; answers under way are cut and recorded as such."""
        self.interrupted = True
        self.rung.cut_class = "interrupted"
        self.rung.stopping.set()

    def _tick(self) -> None:
        """How late this process's loop is: a 10 ms sleep, measured."""
        while True:
            before = time.monotonic()
            gevent.sleep(TICK_S)
            self._lags.append(time.monotonic() - before - TICK_S)

    def _report(self) -> None:
        try:
            while not self._ended.wait(FLUSH_S):
                self._flush(self.boss.progress)
        except Exception as error:  # a rung that is not written down must not go on as if it were
            self.rung.crash(error)

    def _flush(self, tell: Callable[[dict[str, Any], dict[str, pa.Table]], None] | None = None) -> dict[str, pa.Table]:
        """Sample the client's own state and put the last second on disk, in another thread; returns its tables. The
        boss is told at once: a slow disk must not keep from a master what happened."""
        WallOffset.refresh()
        lags, self._lags = sorted(self._lags) or [0.0], []
        use = resource.getrusage(resource.RUSAGE_SELF)
        rung, books = self.rung, self.rung.books
        books.sample(time.monotonic(), {
            "live_users": rung.live, "in_flight_users": rung.in_flight,
            "thinking_users": rung.live - rung.in_flight, "finished_users": rung.finished,
            "planned_total": books.planned,
            "completed_total": books.completed, "failed_total": books.failed, "tokens_total": books.tokens,
            "late_prepare_seconds_total": rung.late_prepare_s, "late_send_seconds_total": rung.late_send_s,
            "client_cpu_seconds_total": use.ru_utime + use.ru_stime, "client_memory_bytes": resident_bytes(),
            "client_loop_lag_p99_s": lags[int(len(lags) * 0.99)], "client_loop_lag_max_s": lags[-1],
        })
        tables = books.take()
        writing = self._disk.spawn(tried, books.write, tables)
        if tell is not None:
            tell(rung.state(), tables)
        failure = writing.get()
        if failure is not None:
            raise failure
        return tables


