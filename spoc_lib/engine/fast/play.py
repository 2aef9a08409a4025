"""The fast core behind the virtual clock: same decisions as the plain core, in extents and compiled.

Python prepares turns ahead (what a user will send next does not depend on when), the compiled loop plays until it
lacks one. With a queue limit it does depend, on refusals: then turns are prepared when they are due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from spoc_lib.core.caches import one_compiles
from spoc_lib.engine.dialogue import Dialogue
from spoc_lib.engine.fast import state as fs
from spoc_lib.engine.fast.chains import MAX_DEPTH, Chains
from spoc_lib.engine.memory import kv_windows
from spoc_lib.engine.runlog import DONE, REFUSED, STEP_COLUMNS, WAITING, RunLog
from spoc_lib.engine.steptime.model import StepTimeModel
from spoc_lib.workload.script import ConversationScript, Turn, UserScript

if TYPE_CHECKING:
    from spoc_lib.engine.embedded import EmbeddedEngine

CACHE_LINE_BYTES = 64
#: Turns to prepare in one go, at least: each return from the compiled loop costs some 20 µs.
AT_ONCE = 32
_REFUSAL = {2: ("context_length", 400), 3: ("queue_full", 503), 4: ("queue_tokens_full", 503)}


def supports(engine: EmbeddedEngine) -> bool:
    """Whether the fast core knows this engine: at most one full and one sliding group (window above 1), a compiled
    step time."""
    windows = kv_windows(engine.model)
    sliding = [window for window in windows if window]
    return (len(sliding) <= 1 and len(windows) - len(sliding) <= 1 and all(window > 1 for window in sliding)
            and isinstance(engine.step_time, StepTimeModel))


class _User:
    __slots__ = ("chain", "dialogue", "leaf", "max_model_len", "script", "turns")

    def __init__(self, script: UserScript, max_model_len: int) -> None:
        self.script = script
        self.dialogue = Dialogue(script.user)
        self.max_model_len = max_model_len
        self.chain = self.leaf = 0
        self.turns: list[Turn] = []

    def answer(self) -> int:
        """Tokens that the last prepared turn will get for a reply, if it is not turned away by a full queue."""
        room = self.max_model_len - self.dialogue.prompt_tokens
        return min(self.turns[-1].output_tokens, room) if room > 0 else 0


class FastRun:
    """Plays a script on the compiled core; see `virtual.play`."""

    def __init__(self, engine: EmbeddedEngine, script: ConversationScript, users: int,
                 frontend: Callable[[int], float]) -> None:
        self.engine, self.frontend = engine, frontend
        self.flags = engine.flags
        self.ahead = self.flags.max_num_queued_reqs is None and self.flags.max_num_queued_tokens is None
        self.users = [_User(one, engine.max_model_len) for one in script.users(users)]
        self.chains = Chains(self.flags.block_size, 4096)
        self.m = _allocate(engine, users, self.chains.table)
        for number in range(users):
            self._prepare(number)
        self._sync()
        self._load()

    def _load(self) -> None:
        """Compile the loop, or load it from numba's cache: a run that ends before it begins."""
        from spoc_lib.engine.fast.loop import run

        self.m.sums[2, fs.F_END] = -1.0
        if run.signatures:
            run(*self.m)
            return
        with one_compiles("fast-loop"):
            run(*self.m)

    def run(self, duration_s: float) -> RunLog:
        """Play, and return the log."""
        from spoc_lib.engine.fast.loop import GROW, OVER, run

        self.m.sums[2, fs.F_END] = duration_s
        users = len(self.users)
        self.m.queues[fs.V_REPLY, :users] = np.arange(users)  # as if everybody had got a reply at time 0
        self.m.s[fs.S_REPLIES] = users
        while (why := run(*self.m)) != OVER:
            if why == GROW:
                self._grow()
            elif self.ahead:
                self._prepare_missing()
            else:
                self._prepare_due()
        return self._log(duration_s)

    # turns

    def _prepare_missing(self) -> None:
        """The next turns of those who have their reply or are getting it; a few more where these are few."""
        missing = np.flatnonzero(self.m.requests[:, fs.T_READY] == 0)
        soon = self.m.requests[missing, fs.R_STATUS] == fs.RUNNING
        soon |= np.isin(missing, self.m.queues[fs.V_REPLY, : self.m.s[fs.S_REPLIES]])
        numbers = missing[soon] if soon.sum() >= AT_ONCE else missing[np.argsort(~soon, kind="stable")[:AT_ONCE]]
        for number in numbers.tolist():
            user = self.users[number]
            user.dialogue.receive(user.answer())
            self._prepare(number)
        self._sync()

    def _prepare_due(self) -> None:
        for number, tokens in self.m.queues[fs.V_REPLY:fs.V_REPLY + 2, : self.m.s[fs.S_REPLIES]].T.tolist():
            self.users[number].dialogue.receive(tokens)
            self._prepare(number)
        self._sync()

    def _prepare(self, number: int) -> None:
        user = self.users[number]
        dialogue = user.dialogue
        turn = user.script.next(dialogue.content_tokens)
        user.turns.append(turn)
        dialogue.send(turn)
        if dialogue.begins:
            user.chain = self.chains.open(dialogue.new)
        else:
            if dialogue.aligned:  # the history goes on where the reply was generated
                user.chain = self.chains.adopt(user.chain, user.leaf)
            self.chains.extend(user.chain, dialogue.new)
        prompt = dialogue.prompt_tokens
        user.leaf = self.chains.reply(user.chain, prompt)
        self.m.requests[number, fs.T_CHAIN:fs.T_READY + 1] = user.leaf, prompt, turn.output_tokens, 1
        self.m.clock[number, fs.X_THINK:fs.X_WAY + 1] = turn.think_time_s, self.frontend(turn.prompt_tokens)

    # arrays

    def _sync(self) -> None:
        if self.m.chains is not self.chains.table:
            self.m = self.m._replace(chains=self.chains.table)

    def _grow(self) -> None:
        """Double what cannot hold one more step; the compiled loop asks before that happens."""
        s = self.m.s
        users, margin = int(s[fs.K_USERS]), int(s[fs.K_MARGIN])
        for name, used, room in (("pieces", fs.S_PIECES, margin), ("entries", fs.S_ENTRIES, margin),
                                 ("request_log", fs.S_REQUESTS, users + 1), ("token_log", fs.S_TOKENS, users),
                                 ("step_log", fs.S_STEPS, 2)):
            array = getattr(self.m, name)
            if int(s[used]) + room > len(array):
                longer = aligned((2 * len(array), *array.shape[1:]), array.dtype)
                longer[: s[used]] = array[: s[used]]
                self.m = self.m._replace(**{name: longer})

    # the log

    def _log(self, duration_s: float) -> RunLog:
        m, s = self.m, self.m.s
        log = m.request_log[: s[fs.S_REQUESTS]]
        made = [0] * len(self.users)
        turns: list[Turn] = []
        for user in log[:, fs.Q_USER].astype(int).tolist():
            turns.append(self.users[user].turns[made[user]])
            made[user] += 1
        # requests on their way to the scheduler
        heap = sorted((float(m.clock[at, fs.X_ARRIVAL]), *m.queues[fs.V_ORDER:fs.V_USER + 1, at].tolist())
                      for at in range(int(s[fs.S_ARRIVALS])))
        late = [user for _, _, user in heap if m.clock[user, fs.X_SEND] <= duration_s]
        turns += [self.users[user].turns[made[user]] for user in late]
        send_s = log[:, fs.Q_SEND].tolist() + [float(m.clock[user, fs.X_SEND]) for user in late]
        states = np.append(log[:, fs.Q_STATE], np.zeros(len(late)))
        state = np.where(states == 1, DONE, np.where(states >= 2, REFUSED, WAITING)).astype(np.int8)
        pad = np.full(len(late), fs.NONE)
        token_request, token_step = m.token_log[: s[fs.S_TOKENS]].T.astype(np.int64)
        steps = m.step_log[: s[fs.S_STEPS]]
        return RunLog(
            turns, send_s, state, np.append(log[:, fs.Q_CACHED], pad).astype(np.int64),
            np.append(log[:, fs.Q_ADMIT], pad).astype(np.int64), token_request, token_step,
            {name: steps[:, index].copy() for index, name in enumerate(STEP_COLUMNS)},
            {number: _REFUSAL[int(code)] for number, code in enumerate(states) if code >= 2},
        ).until(duration_s)


def _allocate(engine: EmbeddedEngine, users: int, chains: np.ndarray) -> fs.State:
    flags = engine.flags
    longest = engine.max_model_len // flags.block_size + 2

    def whole(*shape: int) -> np.ndarray:
        return aligned(shape, np.int32)

    if not isinstance(engine.step_time, StepTimeModel):
        raise TypeError("the fast core needs a step time that can be compiled")
    compiled = engine.step_time.compiled(max(flags.max_num_batched_tokens, users))
    table = np.zeros((3, max(compiled.table.shape[1], len(compiled.coeffs))))
    table[:2, :compiled.table.shape[1]] = compiled.table
    table[2, :len(compiled.coeffs)] = compiled.coeffs
    scalars = _configuration(engine, users)
    scalars[[fs.S_LRU_HEAD, fs.S_LRU_TAIL, fs.S_PIECE_FREE, fs.S_ENTRY_FREE]] = fs.NONE
    scalars[fs.S_UNHASHED] = engine.num_blocks - 1
    # pieces and entries that one step may add: a few for each request, and the splits of one long hit
    scalars[fs.K_MARGIN] = 24 * users + 2 * longest
    room = 4 * int(scalars[fs.K_MARGIN])
    return fs.State(
        s=scalars, pieces=whole(room, fs.P_COLUMNS), chains=chains, entries=whole(room, fs.E_COLUMNS),
        requests=whole(users, fs.U_COLUMNS), work=whole(longest + users + MAX_DEPTH, fs.W_COLUMNS),
        queues=whole(fs.V_ROWS, 2 * users), sums=np.zeros((3, fs.B_COLUMNS)),
        clock=np.zeros((users, fs.X_COLUMNS)), request_log=np.zeros((4 * users + 4096, fs.Q_COLUMNS)),
        token_log=whole(4 * users + 65536, 2), step_log=np.zeros((8192, 2 + fs.B_COLUMNS)), table=table)


def aligned(shape: tuple[int, ...], kind: type) -> np.ndarray:
    """Zeros that begin with a cache line, so that a row of a power of two spans as few lines as it can."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    room = np.zeros(size + CACHE_LINE_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % CACHE_LINE_BYTES
    return room[start:start + size].view(kind).reshape(shape)


def _configuration(engine: EmbeddedEngine, users: int) -> np.ndarray:
    """The scalars, with the constants of a run by `K_…`."""
    flags, model = engine.flags, engine.model
    windows = kv_windows(model)
    window = max(windows)
    size, max_len = flags.block_size, engine.max_model_len
    depth = 2 if flags.async_scheduling else 1
    in_flight = flags.max_num_batched_tokens * depth
    retention = flags.prefix_cache_retention_interval
    k = np.zeros(fs.S_COLUMNS, dtype=np.int64)
    k[fs.K_USERS] = users
    k[fs.K_BLOCK], k[fs.K_GROUPS] = size, len(windows)
    k[fs.K_FULL] = windows.index(0) if 0 in windows else fs.NONE
    k[fs.K_SLIDING] = windows.index(window) if window else fs.NONE
    k[fs.K_WINDOW], k[fs.K_NEED] = window, -(-(window - 1) // size) if window else 0
    k[fs.K_CAP] = -(-min(window - 1 + in_flight, max_len) // size) + 1
    k[fs.K_POOL], k[fs.K_CACHING], k[fs.K_MAX_LEN] = engine.num_blocks - 1, flags.enable_prefix_caching, max_len
    k[fs.K_BUDGET], k[fs.K_MAX_SEQS] = flags.max_num_batched_tokens, flags.active_seqs
    k[fs.K_THRESHOLD], k[fs.K_RESERVE] = flags.long_prefill_token_threshold, flags.scheduler_reserve_full_isl
    k[fs.K_ADAPTIVE], k[fs.K_CHUNKED] = flags.long_prefill_token_threshold_adaptive, flags.enable_chunked_prefill
    k[fs.K_DEPTH], k[fs.K_WATERMARK] = depth, int(flags.watermark * engine.num_blocks)
    k[fs.K_RETENTION] = fs.NONE if retention is None else retention
    k[fs.K_BATCH_WINDOW] = model.sliding_window or max_len
    k[fs.K_QUEUE] = fs.NONE if flags.max_num_queued_reqs is None else flags.max_num_queued_reqs
    k[fs.K_QUEUE_TOKENS] = fs.NONE if flags.max_num_queued_tokens is None else flags.max_num_queued_tokens
    return k
