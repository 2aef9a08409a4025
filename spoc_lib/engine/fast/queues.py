"""The lines that requests stand in, and what a chunk adds to a planned step. Compiled by numba.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast.state import *


@njit
def push_waiting_head(s, queues, r):
    """Put request `r` before all that wait."""
    s[S_WAIT_HEAD] = (s[S_WAIT_HEAD] - 1) % queues.shape[1]
    queues[V_WAITING, s[S_WAIT_HEAD]] = r
    s[S_WAITING] += 1


@njit
def pop_waiting(s, queues):
    """Take the first of the waiting away."""
    s[S_WAIT_HEAD] = (s[S_WAIT_HEAD] + 1) % queues.shape[1]
    s[S_WAITING] -= 1


@njit
def drop_finished(s, requests, queues, waited):
    """Out of the lines, order kept. waited: some of them finished while they waited (by a step from before their
    preemption), so that line has to be gone through as well."""
    kept = 0
    for index in range(s[S_RUNNING]):
        r = queues[V_RUNNING, index]
        if requests[r, R_STATUS] != ABSENT:
            queues[V_RUNNING, kept] = r
            kept += 1
    s[S_RUNNING] = kept
    if not waited:
        return
    kept = 0
    size = queues.shape[1]
    for index in range(s[S_WAITING]):
        r = queues[V_WAITING, (s[S_WAIT_HEAD] + index) % size]
        if requests[r, R_STATUS] != ABSENT:
            queues[V_WAITING, (s[S_WAIT_HEAD] + kept) % size] = r
            kept += 1
    s[S_WAITING] = kept


@njit
def heap_push(s, queues, clock, time, user):
    """An arrival; equal times keep the order in which they were planned."""
    order = s[S_ORDER]
    s[S_ORDER] += 1
    at = s[S_ARRIVALS]
    s[S_ARRIVALS] += 1
    while at > 0:
        up = (at - 1) // 2
        if clock[up, X_ARRIVAL] < time or (clock[up, X_ARRIVAL] == time and queues[V_ORDER, up] < order):
            break
        clock[at, X_ARRIVAL] = clock[up, X_ARRIVAL]
        queues[V_ORDER, at], queues[V_USER, at] = queues[V_ORDER, up], queues[V_USER, up]
        at = up
    clock[at, X_ARRIVAL] = time
    queues[V_ORDER, at], queues[V_USER, at] = order, user


@njit
def heap_pop(s, queues, clock):
    """The user who arrives next; its arrival is taken away."""
    user = queues[V_USER, 0]
    s[S_ARRIVALS] -= 1
    size = s[S_ARRIVALS]
    time, order, moved = clock[size, X_ARRIVAL], queues[V_ORDER, size], queues[V_USER, size]
    at = 0
    while 2 * at + 1 < size:
        down = 2 * at + 1
        right = down + 1
        if right < size and (clock[right, X_ARRIVAL] < clock[down, X_ARRIVAL] or (
                clock[right, X_ARRIVAL] == clock[down, X_ARRIVAL] and queues[V_ORDER, right] < queues[V_ORDER, down])):
            down = right
        if time < clock[down, X_ARRIVAL] or (time == clock[down, X_ARRIVAL] and order < queues[V_ORDER, down]):
            break
        clock[at, X_ARRIVAL] = clock[down, X_ARRIVAL]
        queues[V_ORDER, at], queues[V_USER, at] = queues[V_ORDER, down], queues[V_USER, down]
        at = down
    clock[at, X_ARRIVAL] = time
    queues[V_ORDER, at], queues[V_USER, at] = order, moved
    return user


@njit
def put(s, requests, queues, sums, b, r, tokens):
    """Add an admitted request's chunk to the plan and its sums, and count it as computed."""
    q, batch, to = requests, sums[b], V_PLAN + 3 * b
    before = q[r, R_COMPUTED]
    if tokens == 1 and before >= q[r, R_PROMPT]:
        batch[1] += 1
        batch[2] += before + 1
        batch[3] += min(before + 1, s[K_BATCH_WINDOW])
    else:
        add_prefill(batch, before, tokens, s[K_BATCH_WINDOW])
    q[r, R_COMPUTED] = before + tokens
    q[r, R_IN_FLIGHT] += tokens
    index = int(sums[2, F_SIZE + b])
    sums[2, F_SIZE + b] = index + 1
    queues[to, index], queues[to + 1, index], queues[to + 2, index] = r, tokens, 0
    if before + tokens >= q[r, R_TOKENS] + q[r, R_PLACEHOLDERS]:
        queues[to + 2, index] = 1
        batch[9] += 1
        if s[K_DEPTH] == 2:
            q[r, R_PLACEHOLDERS] += 1


@njit
def add_prefill(batch, before, tokens, window):
    """A prompt chunk in the sums of a batch."""
    growing = max(0, min(before + tokens, window) - before)
    batch[4] += 1
    batch[5] += tokens
    batch[6] += tokens * (before + (tokens + 1) / 2)
    batch[7] += growing * (before + (growing + 1) / 2) + (tokens - growing) * window
    batch[8] += before
