"""A Locust user that plays one user of the script: think, ask, read the answer, remember it. Child process only."""

from __future__ import annotations

import time

import gevent
from locust import FastHttpUser, task
from locust.event import EventHook
from locust.exception import StopUser

from spoc_lib.load.arrivals import ArrivalClientPool
from spoc_lib.load.exchange import Exchange, exchange
from spoc_lib.load.player import Player, Prepared
from spoc_lib.load.reader import token_shares
from spoc_lib.load.rung import Rung
from spoc_lib.workload.script import NEVER_S

#: After a failure a user waits at least this long, doubled at each further failure: a dead server must not turn
#: a closed loop into a flood.
FAILURE_PAUSE_S = 1.0
FAILURE_PAUSE_MAX_S = 15.0
#: Connections are ready so long before the request.
CONNECT_AHEAD_S = 0.05
#: The same turn is asked again after 429/503 with Retry-After, at most so often.
ASK_AGAIN = 5
RETRY_AFTER_MAX_S = 60.0


class ScriptedUser(FastHttpUser):
    """Locust starts one for each user of the script; its single task plays until the rung ends.

    `rung` is set on the class by the child before any user starts.
    """

    abstract = True
    rung: Rung
    client_pool: ArrivalClientPool

    def on_start(self) -> None:
        """Take over a player (Locust calls this)."""
        self.player: Player = self.rung.next_player()
        self.client.request_event = EventHook()  # `fire` tells Locust of whole answers; headers alone are no answer
        self.failures = 0

    @task
    def play(self) -> None:
        """The whole life of the user; ends by StopUser."""
        rung = self.rung
        started = False
        try:
            ready_s = rung.start_of(self.player.script.user)
            intended_s = ready_s + self.player.next.turn.think_time_s
            if rung.plan.arrivals is None:
                rung.wait_until(ready_s)
            else:  # a user is live from the arrival of its conversation to its end
                self._think(intended_s)
            rung.live += 1
            started = True
            while True:
                self._think(intended_s)
                ready_s = self._turn(intended_s)
                think_s = self.player.next.turn.think_time_s
                if think_s >= NEVER_S:
                    rung.finished += 1
                    raise StopUser()
                intended_s = ready_s + think_s
        except gevent.GreenletExit:
            raise
        except StopUser:
            raise
        except Exception as error:
            rung.crash(error)
            raise StopUser() from error
        finally:
            rung.live -= started

    def _think(self, until_s: float) -> None:
        """Wait; after a long thought the connection is opened anew, just ahead of the request."""
        if until_s - time.monotonic() > 2 * CONNECT_AHEAD_S:
            self.rung.wait_until(until_s - CONNECT_AHEAD_S)
            self.client_pool.reserve(self.rung.url)
        self.rung.wait_until(until_s)

    def _turn(self, intended_s: float) -> float:
        """Send the prepared turn and prepare the one after it; returns when the next think time starts."""
        rung, player, prepared = self.rung, self.player, self.player.next
        if rung.overflows(prepared.turn):
            rung.refuse_overflow(prepared.turn, intended_s)
            player.forget(overflow=True)
            return time.monotonic() + self._pause()
        result = self._ask(prepared, intended_s)
        asked = 1
        while result.retry_after_s is not None and result.status in (429, 503) and asked < ASK_AGAIN:
            rung.retries += 1
            intended_s = result.end_s + min(result.retry_after_s, RETRY_AFTER_MAX_S)
            self._think(intended_s)
            result, asked = self._ask(prepared, intended_s), asked + 1
        if result.error_class is None:
            self.failures = 0
            player.remember(result.reader)
            return result.end_s
        player.forget(overflow=result.error_class == "context_overflow")
        return result.end_s + self._pause()

    def _pause(self) -> float:
        self.failures += 1
        return min(FAILURE_PAUSE_S * 2 ** (self.failures - 1), FAILURE_PAUSE_MAX_S)

    def _ask(self, prepared: Prepared, intended_s: float) -> Exchange:
        """One request, in the books whatever happens."""
        rung = self.rung
        now = time.monotonic()
        planned = rung.planned_row(prepared.turn, intended_s, now)
        rung.late(intended_s, prepared.ready_s, now)
        rung.books.plan(planned)
        result = Exchange(planned["send_s"])
        rung.books.opened(planned["request"], result.reader.times_s)
        outcome = "censored"
        rung.in_flight += 1
        try:
            exchange(self.client, rung.url, prepared.body, rung.headers, rung.plan.request_timeout_s, result)
            outcome = "failed" if result.error_class else "completed"
        finally:
            rung.in_flight -= 1
            self._book(planned, result, outcome)
        return result

    def _book(self, planned: dict, result: Exchange, outcome: str) -> None:
        rung, reader = self.rung, result.reader
        if outcome == "censored":
            result.error_class = rung.cut_class
        total = reader.output_tokens
        source = "usage" if total is not None else ("tokenizer" if outcome == "completed" else "none")
        shares = token_shares(reader.texts, reader.running_tokens, total)
        if source == "tokenizer":
            rung.books.uncounted(planned["request"], reader.text)
        first_s = reader.times_s[0] if reader.times_s else None
        rung.books.end({
            **planned, "send_s": result.send_s, "first_token_s": first_s, "end_s": result.end_s,
            "ttft_s": None if first_s is None else first_s - result.send_s,
            "prompt_tokens": reader.count("prompt_tokens"), "output_tokens": total,
            "cached_tokens": reader.count("cached_tokens"), "tokens_source": source, "chunks": len(shares),
            "outcome": outcome, "error_class": result.error_class, "http_status": result.status,
            "finish_reason": reader.finish_reason,
        }, reader.times_s, shares)
        rung.saw(result, outcome)
        if result.status is not None and outcome != "censored":
            fire(self, planned["persona"], result, outcome)


def fire(user: ScriptedUser, persona: str, result: Exchange, outcome: str) -> None:
    """Tell Locust's own statistics and web page, one entry for the whole answer, named by persona."""
    error = None if outcome == "completed" else RuntimeError(result.error_class)
    user.environment.events.request.fire(
        request_type="answer", name=persona, response_time=(result.end_s - result.send_s) * 1000,
        response_length=sum(map(len, result.reader.texts)), exception=error, context={})
