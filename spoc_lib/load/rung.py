"""What the users of one client process share: the plan, the clock of the rung, the books, the counters.

Child process only (its waiting is gevent's).
"""

from __future__ import annotations

import time
import traceback
from collections import Counter, deque
from pathlib import Path
from typing import Any

import gevent.event
from locust.exception import StopUser

from spoc_lib.core.stats import percentile
from spoc_lib.load.books import Books
from spoc_lib.load.exchange import Exchange
from spoc_lib.load.layers import boundaries
from spoc_lib.load.plan import LoadPlan
from spoc_lib.load.player import Player
from spoc_lib.workload.script import Turn

#: Requests of client process k of P are numbered k, k + P, k + 2 P, …
RECENT = 400


class Rung:
    """One client process's part of a rung. `stopping` is set when no request may start any more; what is still in
    flight when the users are cut is censored with `cut_class`."""

    def __init__(self, plan: LoadPlan, folder: Path, process: int = 0) -> None:
        self.plan, self.process = plan, process
        self.books = Books(folder, process, far=plan.master is not None)
        self.stopping = gevent.event.Event()
        self.cut_class = "end_of_rung"
        self.players: deque[Player] = deque()
        self.start_s = self.end_s = 0.0
        self.live = self.in_flight = self.finished = self.retries = self.kernel_stamped = self.read_streams = 0
        self.hidden_tokens = 0
        self.odd_events: Counter[str] = Counter()
        self.late_prepare_s = self.late_send_s = 0.0
        self.recent_ttft_s: deque[float] = deque(maxlen=RECENT)
        self.recent_lag_s: deque[float] = deque(maxlen=RECENT)
        self.errors: dict[str, int] = {}
        self.error_samples: dict[str, str] = {}
        self.crashed: str | None = None
        self._serial = process
        self.url = f"{plan.api_url}/{plan.route}"
        self.headers = {**plan.request_headers(), "Content-Type": "application/json", "Accept": "text/event-stream",
                        "Accept-Encoding": "identity"}

    def next_player(self) -> Player:
        """The player of the user that begins next."""
        return self.players.popleft()

    def start_of(self, user: int) -> float:
        """When user `user` becomes live: at once, or spread evenly over the ramp."""
        return self.start_s + self.plan.ramp_s * user / self.plan.users

    def wait_until(self, time_s: float) -> None:
        """Sleep to `time_s`; StopUser when the rung ends first."""
        while not self.stopping.is_set():
            left = time_s - time.monotonic()
            if left <= 0:
                return
            self.stopping.wait(left)
        raise StopUser()

    def planned_row(self, turn: Turn, intended_s: float, now_s: float) -> dict[str, Any]:
        """The line that is written before the request is sent, so that a kill loses none."""
        request, self._serial = self._serial, self._serial + self.plan.processes
        return {"request": request, "persona": turn.persona, "user": turn.user, "conversation": turn.conversation,
                "turn": turn.turn, "kind": turn.kind, "intended_send_s": intended_s, "send_s": now_s,
                "intended_prompt_tokens": turn.prompt_tokens, "intended_output_tokens": turn.output_tokens,
                **boundaries(turn)}

    def late(self, intended_s: float, ready_s: float, now_s: float) -> None:
        """A request is sent now: how long its user waited for it to be prepared, and then for this process's turn."""
        ready_s = min(max(ready_s, intended_s), now_s)
        self.late_prepare_s += ready_s - intended_s
        self.late_send_s += now_s - ready_s

    def overflows(self, turn: Turn) -> bool:
        """Whether prompt and answer would pass the context limit."""
        limit = self.plan.context_limit
        return limit is not None and turn.prompt_tokens + turn.output_tokens > limit

    def refuse_overflow(self, turn: Turn, intended_s: float) -> None:
        """A turn that cannot fit the server's context is not sent; it is a failed request in the books."""
        now = time.monotonic()
        planned = self.planned_row(turn, intended_s, now)
        self.books.plan(planned)
        self.books.end({**planned, "first_token_s": None, "end_s": now, "ttft_s": None, "prompt_tokens": None,
                        "output_tokens": None, "cached_tokens": None, "tokens_source": "none", "chunks": 0,
                        "outcome": "failed", "error_class": "context_overflow", "http_status": None,
                        "finish_reason": None}, (), ())
        self._count_error("context_overflow", "not sent: prompt and budget pass the context limit")

    def saw(self, result: Exchange, outcome: str) -> None:
        """Keep what the progress line and the summary tell of a request."""
        if result.reader.times_s:
            self.recent_ttft_s.append(result.reader.times_s[0] - result.send_s)
            self.read_streams += 1
            self.kernel_stamped += result.kernel_stamps
            self.recent_lag_s.append(result.handled_late_s)
        self.hidden_tokens += result.reader.hidden_tokens
        self.odd_events.update(result.reader.odd)
        if outcome == "failed":
            self._count_error(result.error_class or "unknown", result.error_message or "")

    def _count_error(self, error_class: str, message: str) -> None:
        self.errors[error_class] = self.errors.get(error_class, 0) + 1
        if error_class not in self.error_samples:
            remedy = self.plan.remedy(message) if error_class.startswith(("http_4", "http_5")) else ""
            self.error_samples[error_class] = self.plan.redacted(message) + remedy

    def crash(self, error: Exception) -> None:
        """A fault of this client, not of the server: the rung ends and says so."""
        self.crashed = self.crashed or self.plan.redacted("".join(traceback.format_exception(error))[-2000:])
        self.stopping.set()

    def state(self) -> dict[str, Any]:
        """The numbers of one progress line."""
        books, recent = self.books, self.recent_ttft_s
        return {"live": self.live, "in_flight": self.in_flight, "finished": self.finished, "planned": books.planned,
                "completed": books.completed, "failed": books.failed, "censored": books.censored,
                "tokens": books.tokens, "ttft_p95_s": percentile(list(recent), 95) if recent else None,
                "lag_p95_s": percentile(list(self.recent_lag_s), 95) if recent else None}
