"""The closed loop on the fast state: arrivals, steps, replies, until Python has something to prepare.

One compiled entry point, cached on disk. Its cache key holds a digest of all compiled sources, because numba by
itself notices no change in a function that is called from another file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast_schedule import apply, plan
from spoc_lib.engine.fast_state import *

#: Why `run` came back: the run is over; turns must be prepared (replies may wait for them); arrays must grow.
OVER, PREPARE, GROW = range(3)


@njit
def step_seconds(m, b):
    """Duration of planned step `b`: the formula of `steptime_compiled`, term for term."""
    sums, c = m.sums[b], m.coeffs
    tokens = int(sums[0])
    if tokens == 0:
        return 0.0
    time = (m.table[0, tokens] + m.table[1, int(sums[9])] + c[0] + c[2] * sums[1] + c[3] * sums[2]
            + c[4] * sums[3] + c[9] + c[10] * (sums[1] + sums[4]))
    if sums[4] > 0:
        time += (c[1] + c[5] * sums[5] + c[6] * sums[6] + c[7] * sums[7] + c[8] * sums[8] + c[11])
        if time < c[12]:
            time = c[12]
    return time


@njit
def heap_push(m, time, user):
    """An arrival; equal times keep the order in which they were planned."""
    order = m.s[S_ORDER]
    m.s[S_ORDER] += 1
    at = m.s[S_ARRIVALS]
    m.s[S_ARRIVALS] += 1
    while at > 0:
        up = (at - 1) // 2
        if m.heap_time[up] < time or (m.heap_time[up] == time and m.heap[up, 0] < order):
            break
        m.heap_time[at] = m.heap_time[up]
        m.heap[at, 0], m.heap[at, 1] = m.heap[up, 0], m.heap[up, 1]
        at = up
    m.heap_time[at] = time
    m.heap[at, 0], m.heap[at, 1] = order, user


@njit
def heap_pop(m):
    user = m.heap[0, 1]
    m.s[S_ARRIVALS] -= 1
    size = m.s[S_ARRIVALS]
    time, order, moved = m.heap_time[size], m.heap[size, 0], m.heap[size, 1]
    at = 0
    while 2 * at + 1 < size:
        down = 2 * at + 1
        right = down + 1
        if right < size and (m.heap_time[right] < m.heap_time[down] or (
                m.heap_time[right] == m.heap_time[down] and m.heap[right, 0] < m.heap[down, 0])):
            down = right
        if time < m.heap_time[down] or (time == m.heap_time[down] and order < m.heap[down, 0]):
            break
        m.heap_time[at] = m.heap_time[down]
        m.heap[at, 0], m.heap[at, 1] = m.heap[down, 0], m.heap[down, 1]
        at = down
    m.heap_time[at] = time
    m.heap[at, 0], m.heap[at, 1] = order, moved
    return user


@njit
def depart(m):
    """Users whose reply came think and will send; False when a next turn is not prepared yet."""
    s = m.s
    for index in range(s[S_REPLIES]):
        if m.turns[m.replies[index, 0], T_READY] == 0:
            return False
    for index in range(s[S_REPLIES]):
        user = m.replies[index, 0]
        take_turn(m, user, m.reply_time[index])
    s[S_REPLIES] = 0
    return True


@njit
def take_turn(m, user, now):
    """The prepared turn becomes the one that is under way."""
    q, t = m.requests, m.turns
    q[user, R_CHAIN], q[user, R_PROMPT] = t[user, T_CHAIN], t[user, T_PROMPT]
    q[user, R_MOST] = t[user, T_PROMPT] + t[user, T_OUTPUT]
    t[user, T_READY] = 0
    m.s[S_UNREADY] += 1
    m.send[user] = now + m.turn_time[user, 0]
    heap_push(m, m.send[user] + m.turn_time[user, 1], user)


@njit
def arrive(m, user, now):
    """The request reaches the scheduler; False when it is refused."""
    k, s, q = m.k, m.s, m.requests
    number = s[S_REQUESTS]
    s[S_REQUESTS] += 1
    m.request_log[number, Q_USER], m.request_log[number, Q_CACHED] = user, NONE
    m.request_log[number, Q_ADMIT], m.request_log[number, Q_STATE] = NONE, 0
    m.request_send[number] = m.send[user]
    full = 0 <= k[K_QUEUE] < s[S_LIVE] + 1
    if full or q[user, R_PROMPT] >= k[K_MAX_LEN]:
        m.request_log[number, Q_STATE] = 3 if full else 2
        m.replies[s[S_REPLIES], 0], m.replies[s[S_REPLIES], 1] = user, 0
        m.reply_time[s[S_REPLIES]] = now
        s[S_REPLIES] += 1
        return False
    q[user, R_NUMBER], q[user, R_TOKENS] = number, q[user, R_PROMPT]
    for column in range(R_COLUMNS):
        if column > R_TOKENS and column != R_MOST:
            q[user, column] = 0
    q[user, R_STATUS], q[user, R_CACHED] = WAITING, NONE
    for group in range(k[K_GROUPS]):
        q[user, R_GROUPS + 3 * group + 1] = q[user, R_GROUPS + 3 * group + 2] = NONE
    m.waiting[(s[S_WAIT_HEAD] + s[S_WAITING]) % len(m.waiting)] = user
    s[S_WAITING] += 1
    s[S_LIVE] += 1
    return True


@njit
def must_grow(m):
    """Whether the arrays might not hold what one step adds."""
    s = m.s
    users = len(m.running)
    return (s[S_PIECES] + 24 * users + 2 * len(m.scratch) > len(m.pieces)
            or s[S_ENTRIES] + 24 * users + 2 * len(m.scratch) > len(m.entries)
            or s[S_REQUESTS] + users + 1 > len(m.request_log) or s[S_TOKENS] + users > len(m.token_log)
            or s[S_STEPS] + 2 > len(m.step_log))


def _make_run(digest: int):
    @njit(cache=True, nogil=True)
    def run(m):
        if digest == 0:  # never: it keeps the digest part of the cache's key
            return OVER
        s, k = m.s, m.k
        while True:
            if s[S_REPLIES] > 0 and not depart(m):
                return PREPARE
            if m.times[0] > m.times[1]:
                return OVER
            if must_grow(m):
                return GROW
            refused = False
            while s[S_ARRIVALS] > 0 and m.heap_time[0] <= m.times[0]:
                time = m.heap_time[0]
                user = heap_pop(m)
                if not arrive(m, user, time):
                    refused = True
                    break
            if refused:
                continue
            if k[K_AHEAD] and s[S_UNREADY] >= k[K_AHEAD]:
                return PREPARE
            while s[S_PLANNED] < k[K_DEPTH] and s[S_RUNNING] + s[S_WAITING] > 0:
                tokens = plan(m, (s[S_PLAN_HEAD] + s[S_PLANNED]) % 2)
                if tokens == 0 and s[S_PLANNED] == 0:
                    break
                s[S_PLANNED] += 1
            if s[S_PLANNED] == 0:
                if s[S_ARRIVALS] == 0:
                    return OVER
                m.times[0] = m.heap_time[0]
                continue
            b = s[S_PLAN_HEAD]
            step = s[S_STEPS]
            row = m.step_log[step]
            row[0] = m.times[0]
            m.times[0] += step_seconds(m, b)
            row[1] = m.times[0]
            row[2:] = m.sums[b]
            s[S_STEPS] = step + 1
            s[S_PLAN_HEAD] = (b + 1) % 2
            s[S_PLANNED] -= 1
            apply(m, b, step, m.times[0])

    return run


def _digest() -> int:
    """A number that changes with any of the compiled sources."""
    folder = Path(__file__).parent
    sources = b"".join((folder / f"fast_{name}.py").read_bytes() for name in ("state", "cache", "schedule", "loop"))
    return int.from_bytes(hashlib.blake2b(sources, digest_size=6).digest(), "little") | 1


run = _make_run(_digest())
