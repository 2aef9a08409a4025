"""The closed loop on the fast state: arrivals, steps, replies, until Python has something to prepare.

What runs every step is inlined: a call with nine arrays costs as much as a step of three tokens.

One compiled entry point, cached on disk. Its cache key holds a digest of all compiled sources, because numba by
itself notices no change in a function that is called from another file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast.queues import heap_pop, heap_push
from spoc_lib.engine.fast.schedule import apply, plan
from spoc_lib.engine.fast.state import *
from spoc_lib.engine.steptime.compiled import step_seconds

#: Why `run` came back: the run is over; replies wait for turns to be prepared; arrays must grow.
OVER, PREPARE, GROW = range(3)


@njit(inline="always")
def planned_seconds(batch, table):
    """Duration of a planned step by the step-time model; 0 for a step without tokens."""
    tokens = int(batch[0])
    if tokens == 0:
        return 0.0
    return step_seconds(table, table[2], tokens, batch[1], batch[2], batch[3], batch[4], batch[5], batch[6], batch[7],
                        batch[8], int(batch[9]))


@njit
def depart(s, requests, queues, clock):
    """Users whose reply came think and will send; False when a next turn is not prepared yet."""
    for index in range(s[S_REPLIES]):
        if requests[queues[V_REPLY, index], T_READY] == 0:
            return False
    for index in range(s[S_REPLIES]):
        take_turn(s, requests, queues, clock, queues[V_REPLY, index], clock[index, X_REPLY])
    s[S_REPLIES] = 0
    return True


@njit
def take_turn(s, requests, queues, clock, user, now):
    """The prepared turn becomes the one that is under way."""
    q = requests
    q[user, R_CHAIN], q[user, R_PROMPT] = q[user, T_CHAIN], q[user, T_PROMPT]
    q[user, R_MOST] = q[user, T_PROMPT] + q[user, T_OUTPUT]
    q[user, T_READY] = 0
    send = now + clock[user, X_THINK]
    clock[user, X_SEND] = send
    heap_push(s, queues, clock, send + clock[user, X_WAY], user)


@njit
def arrive(s, requests, queues, clock, request_log, user, now):
    """The request reaches the scheduler; False when it is refused."""
    q = requests
    number = s[S_REQUESTS]
    s[S_REQUESTS] += 1
    row = request_log[number]
    row[Q_USER], row[Q_CACHED], row[Q_ADMIT], row[Q_STATE], row[Q_SEND] = user, NONE, NONE, 0, clock[user, X_SEND]
    refusal = 0
    if 0 <= s[K_QUEUE] < s[S_LIVE] + 1:
        refusal = 3
    elif 0 <= s[K_QUEUE_TOKENS] <= s[S_QUEUED_TOKENS]:
        refusal = 4
    elif q[user, R_PROMPT] >= s[K_MAX_LEN]:
        refusal = 2
    if refusal:
        row[Q_STATE] = refusal
        at = s[S_REPLIES]
        queues[V_REPLY, at], queues[V_REPLY_TOKENS, at] = user, 0
        clock[at, X_REPLY] = now
        s[S_REPLIES] = at + 1
        return False
    for column in range(R_TOKENS + 1, R_COLUMNS):
        q[user, column] = 0
    q[user, R_NUMBER], q[user, R_TOKENS] = number, q[user, R_PROMPT]
    q[user, R_STATUS], q[user, R_CACHED] = WAITING, NONE
    for group in range(s[K_GROUPS]):
        q[user, R_GROUPS + 3 * group + 1] = q[user, R_GROUPS + 3 * group + 2] = NONE
    queues[V_WAITING, (s[S_WAIT_HEAD] + s[S_WAITING]) % queues.shape[1]] = user
    s[S_WAITING] += 1
    s[S_LIVE] += 1
    s[S_QUEUED_TOKENS] += q[user, R_PROMPT]
    return True


@njit(inline="always")
def must_grow(s, pieces, entries, request_log, token_log, step_log):
    """Whether the arrays might not hold what one step adds."""
    return (s[S_PIECES] + s[K_MARGIN] > len(pieces) or s[S_ENTRIES] + s[K_MARGIN] > len(entries)
            or s[S_REQUESTS] + s[K_USERS] + 1 > len(request_log) or s[S_TOKENS] + s[K_USERS] > len(token_log)
            or s[S_STEPS] + 2 > len(step_log))


def _make_run(digest: int):
    @njit(cache=True, nogil=True)
    def run(s, pieces, chains, entries, requests, work, queues, sums, clock, request_log, token_log, step_log, table):
        if digest == 0:  # never: it keeps the digest part of the cache's key
            return OVER
        times = sums[2]
        while True:
            if s[S_REPLIES] > 0 and not depart(s, requests, queues, clock):
                return PREPARE
            if times[F_NOW] > times[F_END]:
                return OVER
            if must_grow(s, pieces, entries, request_log, token_log, step_log):
                return GROW
            refused = False
            while s[S_ARRIVALS] > 0 and clock[0, X_ARRIVAL] <= times[F_NOW]:
                time = clock[0, X_ARRIVAL]
                user = heap_pop(s, queues, clock)
                if not arrive(s, requests, queues, clock, request_log, user, time):
                    refused = True
                    break
            if refused:
                continue
            while s[S_PLANNED] < s[K_DEPTH] and s[S_RUNNING] + s[S_WAITING] > 0:
                tokens = plan(s, pieces, chains, entries, requests, work, queues, sums, request_log,
                              (s[S_PLAN_HEAD] + s[S_PLANNED]) % 2)
                if tokens == 0 and s[S_PLANNED] == 0:
                    break
                s[S_PLANNED] += 1
            if s[S_PLANNED] == 0:
                if s[S_ARRIVALS] == 0:
                    return OVER
                times[F_NOW] = clock[0, X_ARRIVAL]
                continue
            b = s[S_PLAN_HEAD]
            step = s[S_STEPS]
            step_log[step, 0] = times[F_NOW]
            times[F_NOW] += planned_seconds(sums[b], table)
            step_log[step, 1] = times[F_NOW]
            step_log[step, 2:] = sums[b]
            s[S_STEPS] = step + 1
            s[S_PLAN_HEAD] = (b + 1) % 2
            s[S_PLANNED] -= 1
            apply(s, pieces, chains, entries, requests, work, queues, sums, clock, request_log, token_log, b, step)

    return run


def _digest() -> int:
    """A number that changes with any of the compiled sources."""
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "steptime" / "compiled.py"]
    sources = b"".join(path.read_bytes() for path in files)
    return int.from_bytes(hashlib.blake2b(sources, digest_size=6).digest(), "little") | 1


run = _make_run(_digest())
