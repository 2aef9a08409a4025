"""Admission of waiting requests: the rules of `Scheduler` on the fast state. Compiled by numba.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast.cache import adopt, publish
from spoc_lib.engine.fast.lookup import find_path, full_hit, sliding_hit
from spoc_lib.engine.fast.pieces import take
from spoc_lib.engine.fast.queues import pop_waiting, push_waiting_head, put
from spoc_lib.engine.fast.state import *


@njit
def plan_waiting(s, pieces, chains, entries, requests, work, queues, sums, request_log, b, budget, threshold):
    """Admit waiting requests in order while sequences, budget and blocks last; what is left of the budget."""
    q = requests
    skipped = 0
    while s[S_WAITING] > 0 and budget > 0 and s[S_RUNNING] < s[K_MAX_SEQS]:
        r = queues[V_WAITING, s[S_WAIT_HEAD]]
        if q[r, R_STALE] > 0:
            # passed over: out of the line for now, behind the last row in use of the work space's list
            work[len(work) - 1 - skipped, W_LIST] = r
            skipped += 1
            pop_waiting(s, queues)
            continue
        hit = look_up(s, pieces, chains, requests, work, r)
        tokens = q[r, R_TOKENS] - hit * s[K_BLOCK]
        if 0 < threshold < tokens:
            tokens = threshold
        if tokens > budget and not s[K_CHUNKED]:
            break
        tokens = min(tokens, budget)
        if not admit(s, pieces, chains, entries, requests, work, r, hit, tokens):
            break
        pop_waiting(s, queues)
        queues[V_RUNNING, s[S_RUNNING]] = r
        s[S_RUNNING] += 1
        cached = hit * s[K_BLOCK]
        if s[K_CACHING] and q[r, R_PREEMPTIONS] == 0:
            s[S_QUERIES] += q[r, R_TOKENS]
            s[S_HITS] += cached
        if q[r, R_CACHED] < 0:
            q[r, R_CACHED] = cached
            request_log[q[r, R_NUMBER], Q_CACHED] = cached
            request_log[q[r, R_NUMBER], Q_ADMIT] = s[S_STEPS] + s[S_PLANNED]
        q[r, R_STATUS] = RUNNING
        q[r, R_COMPUTED] = cached
        put(s, requests, queues, sums, b, r, tokens)
        budget -= tokens
    for index in range(skipped - 1, -1, -1):
        push_waiting_head(s, queues, work[len(work) - 1 - index, W_LIST])


@njit
def look_up(s, pieces, chains, requests, work, r):
    """Blocks of the longest prefix that all groups have; fixes the junction."""
    requests[r, R_JUNCTION] = 0
    s[S_HITS_FULL] = s[S_HITS_SLIDING] = 0
    if not s[K_CACHING]:
        return 0
    find_path(s, chains, work, requests[r, R_CHAIN])
    hit = (requests[r, R_TOKENS] - 1) // s[K_BLOCK]
    longest = 0
    if s[K_FULL] >= 0:
        hit = longest = full_hit(s, pieces, chains, work, hit)
    if s[K_SLIDING] >= 0:
        hit = sliding_hit(s, pieces, chains, work, hit)
        if s[K_FULL] >= 0 and longest > hit:
            requests[r, R_JUNCTION] = longest * s[K_BLOCK]
    return hit


@njit
def evictable(pieces, work, column, found, hit):
    """Blocks of a hit that nobody uses: they count as free until they are taken."""
    total = 0
    for index in range(found):
        a, b = work[index, column + 1], min(work[index, column + 2], hit)
        if a < b and pieces[work[index, column], P_USERS] == 0:
            total += b - a
    return total


@njit
def wanted(s, tokens, hit, capped):
    """Blocks beyond the hit that must be free for a waiting request to hold `tokens` tokens."""
    required = (tokens + s[K_BLOCK] - 1) // s[K_BLOCK]
    total = 0
    if s[K_FULL] >= 0:
        total += max(required - hit, 0)
    if s[K_SLIDING] >= 0:
        if capped:
            required = min(required, s[K_CAP])
        total += max(required - hit, 0)
    return total


@njit
def admit(s, pieces, chains, entries, requests, work, r, hit, tokens):
    """Give a waiting request its hit and slots for the chunk; False when it does not fit."""
    q = requests
    size = s[K_BLOCK]
    available = s[S_UNHASHED] + s[S_HASHED]
    if s[S_RUNNING] > 0:
        available -= s[K_WATERMARK]
    available -= evictable(pieces, work, W_FULL, s[S_HITS_FULL], hit)
    available -= evictable(pieces, work, W_SLIDING, s[S_HITS_SLIDING], hit)
    if s[K_RESERVE] and wanted(s, min(q[r, R_TOKENS], s[K_MAX_LEN]), hit, True) > available:
        return False
    slots = min(hit * size + tokens, s[K_MAX_LEN])
    if wanted(s, slots, hit, False) > available:
        return False
    q[r, R_END] = q[r, R_HASHED] = hit
    for group in range(s[K_GROUPS]):
        at = R_GROUPS + 3 * group
        q[r, at], q[r, at + 1], q[r, at + 2] = 0, NONE, NONE
        if hit > 0 and group == s[K_FULL]:
            for index in range(s[S_HITS_FULL]):
                a, b = work[index, W_FULL + 1], min(work[index, W_FULL + 2], hit)
                if a < b:
                    adopt(s, pieces, chains, entries, requests, work, r, group, work[index, W_FULL], a, b)
        elif hit > 0:
            q[r, at] = max(0, hit * size - s[K_WINDOW] + 1) // size
            for index in range(s[S_HITS_SLIDING] - 1, -1, -1):
                adopt(s, pieces, chains, entries, requests, work, r, group, work[index, W_SLIDING],
                      work[index, W_SLIDING + 1], work[index, W_SLIDING + 2])
    end = (slots + size - 1) // size
    take(s, pieces, chains, max(0, end - hit) * s[K_GROUPS])
    q[r, R_END] = max(end, hit)
    if s[K_CACHING]:
        publish(s, pieces, chains, entries, requests, work, r, min(hit * size + tokens, q[r, R_TOKENS]))
    return True
