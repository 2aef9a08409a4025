"""The virtual clock over the plain core: slow, and the measure of the fast one."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from spoc_lib.engine.dialogue import Dialogue
from spoc_lib.engine.runlog import DONE, REFUSED, STEP_COLUMNS, WAITING, RunLog
from spoc_lib.engine.scheduling.content import Piece, SymbolicContent
from spoc_lib.engine.scheduling.core import EngineCore, EngineLoop, StepResult
from spoc_lib.engine.scheduling.request import ContextLengthError, QueueFullError
from spoc_lib.workload.script import ConversationScript, Turn, UserScript

Frontend = Callable[[int], float]


class _User:
    """One live conversation: its script, its history, the turn that it is about to send or waits for."""

    def __init__(self, script: UserScript) -> None:
        self.script = script
        self.dialogue = Dialogue(script.user)
        self.pieces: list[Piece] = []
        self.turn: Turn = script.next(0)

    def next_turn(self) -> Turn:
        self.turn = self.script.next(self.dialogue.content_tokens)
        return self.turn


class PlainRun:
    """Plays a script against `EngineCore`. `frontend(prompt_tokens)`: seconds from sending to the scheduler."""

    def __init__(self, core: EngineCore, script: ConversationScript, users: int, frontend: Frontend) -> None:
        self.core, self.frontend = core, frontend
        self.loop = EngineLoop(core)
        self.users = [_User(one) for one in script.users(users)]
        self.turns: list[Turn] = []
        self.send_s: list[float] = []
        self.refusals: dict[int, tuple[str, int]] = {}
        self.state: list[int] = []
        self.cached: list[int] = []
        self.admit_step: list[int] = []
        self.owner: dict[int, _User] = {}
        self.token_request: list[int] = []
        self.token_step: list[int] = []
        self.steps: list[tuple] = []
        self._queries = self._hits = 0
        #: (time at the scheduler, order, send time, user); order makes ties deterministic: by user number at first,
        #: then as the turns come up
        self.arrivals: list[tuple[float, int, float, _User]] = []
        self._order = 0
        for user in self.users:
            self._plan(user, user.turn.think_time_s)

    def _plan(self, user: _User, send_s: float) -> None:
        heapq.heappush(self.arrivals, (send_s + self.frontend(user.turn.prompt_tokens), self._order, send_s, user))
        self._order += 1

    def run(self, duration_s: float) -> RunLog:
        """Play for `duration_s` virtual seconds."""
        now = 0.0
        while True:
            while self.arrivals and self.arrivals[0][0] <= now:
                self._arrive(*self.arrivals[0][2:], heapq.heappop(self.arrivals)[0])
            end = self.loop.start(now)
            if end is not None:
                now = end
                self._finish(self.loop.finish())
            elif self.arrivals:
                now = self.arrivals[0][0]
            else:
                break
            if now > duration_s:
                break
        for _, _, send_s, user in sorted(self.arrivals, key=lambda one: one[:2]):
            if send_s <= duration_s:  # on its way to the scheduler
                self._open(send_s, user.turn)
        return self._log().until(duration_s)

    def _arrive(self, send_s: float, user: _User, arrival_s: float) -> None:
        turn = user.turn
        number = self._open(send_s, turn)
        stream = user.dialogue.send(turn)
        user.pieces = [*([] if user.dialogue.begins else user.pieces), *user.dialogue.new]
        content = SymbolicContent([*user.pieces, Piece(stream, 0, turn.output_tokens)], self.core.flags.block_size)
        try:
            self.core.add_request(str(number), content, turn.output_tokens, num_prompt=user.dialogue.prompt_tokens)
        except (QueueFullError, ContextLengthError) as error:
            status = 503 if isinstance(error, QueueFullError) else 400
            self.refusals[number] = (error.code.replace("-", "_"), status)
            self.state[number] = REFUSED
            self._reply(user, 0, arrival_s)
            return
        self.owner[number] = user

    def _open(self, send_s: float, turn: Turn) -> int:
        self.turns.append(turn)
        self.send_s.append(send_s)
        self.state.append(WAITING)
        self.cached.append(-1)
        self.admit_step.append(-1)
        return len(self.turns) - 1

    def _finish(self, result: StepResult) -> None:
        step, output = len(self.steps), result.scheduled
        self.steps.append((result.start_s, result.end_s, *result.batch, output.running, output.waiting,
                           output.kv_usage, len(output.preempted), output.prefix_queries, output.prefix_hits))
        for name, cached in output.admitted.items():
            self.cached[int(name)] = cached
            self.admit_step[int(name)] = step
        for one in result.outputs:
            number = int(one.request_id)
            self.token_request.append(number)
            self.token_step.append(step)
            if one.finish_reason:
                self.state[number] = DONE
                self._reply(self.owner.pop(number), one.num_output, result.end_s)

    def _reply(self, user: _User, tokens: int, end_s: float) -> None:
        user.dialogue.receive(tokens)
        self._plan(user, end_s + user.next_turn().think_time_s)

    def _log(self) -> RunLog:
        table = np.array(self.steps, dtype=float).reshape(len(self.steps), len(STEP_COLUMNS))
        return RunLog(self.turns, self.send_s, np.array(self.state, dtype=np.int8),
                      np.array(self.cached, dtype=np.int64), np.array(self.admit_step, dtype=np.int64),
                      np.array(self.token_request, dtype=np.int64), np.array(self.token_step, dtype=np.int64),
                      {name: table[:, index] for index, name in enumerate(STEP_COLUMNS)}, self.refusals)
