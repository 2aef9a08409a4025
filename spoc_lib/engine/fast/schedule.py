"""Planning a step and applying its output: the rules of `scheduler` on the fast state. Compiled by numba.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast.admission import plan_waiting
from spoc_lib.engine.fast.cache import free, publish, slide
from spoc_lib.engine.fast.pieces import take
from spoc_lib.engine.fast.queues import add_prefill, drop_finished, push_waiting_head
from spoc_lib.engine.fast.state import *


@njit(inline="always")
def plan(s, pieces, chains, entries, requests, work, queues, sums, request_log, b):
    """Plan a step into buffer `b`; returns its tokens."""
    batch = sums[b]
    batch[:] = 0.0
    s[S_PREEMPTED] = s[S_QUERIES] = s[S_HITS] = 0
    eligible = s[S_RUNNING] + s[S_WAITING]
    threshold = s[K_THRESHOLD] if eligible > 1 else 0
    if threshold > 0 and s[K_ADAPTIVE]:
        threshold = max(threshold, s[K_BUDGET] // eligible)
    budget = plan_running(s, pieces, chains, entries, requests, work, queues, sums, b, threshold)
    if s[S_PREEMPTED] == 0 and s[S_WAITING] > 0:
        plan_waiting(s, pieces, chains, entries, requests, work, queues, sums, request_log, b, budget, threshold)
    batch[0] = batch[1] + batch[5]
    batch[10], batch[11] = s[S_RUNNING], s[S_WAITING]
    batch[12] = 1.0 - (s[S_UNHASHED] + s[S_HASHED]) / s[K_POOL]
    batch[13], batch[14], batch[15] = s[S_PREEMPTED], s[S_QUERIES], s[S_HITS]
    return int(batch[0])


@njit(inline="always")
def plan_running(s, pieces, chains, entries, requests, work, queues, sums, b, threshold):
    """The hot loop. Most requests decode one token, with no block that begins, slides out or becomes full."""
    q, batch, to = requests, sums[b], V_PLAN + 3 * b
    budget, max_len, size, window = s[K_BUDGET], s[K_MAX_LEN], s[K_BLOCK], s[K_BATCH_WINDOW]
    caching, asynchronous, sliding = s[K_CACHING] != 0, s[K_DEPTH] == 2, s[K_SLIDING] >= 0
    behind = s[K_WINDOW] - 1
    low = R_GROUPS + 3 * s[K_SLIDING]
    index = planned = decodes = context = windowed = samples = 0
    while index < s[S_RUNNING] and budget > 0:
        r = queues[V_RUNNING, index]
        coming, computed, known = q[r, R_PLACEHOLDERS], q[r, R_COMPUTED], q[r, R_TOKENS]
        if coming > 0 and computed + 2 - coming >= q[r, R_MOST]:
            index += 1
            continue
        tokens = known + coming - computed
        if 0 < threshold < tokens:
            tokens = threshold
        tokens = min(tokens, budget, max_len - 1 - computed)
        if tokens <= 0:
            index += 1
            continue
        ready = computed + tokens
        if (ready > q[r, R_END] * size or (caching and min(ready, known) >= (q[r, R_HASHED] + 1) * size)
                or (sliding and computed - q[r, R_IN_FLIGHT] - behind >= (q[r, low] + 1) * size)):
            fits = grow(s, pieces, chains, entries, requests, work, r, tokens)
            while not fits:
                s[S_RUNNING] -= 1
                victim = queues[V_RUNNING, s[S_RUNNING]]
                preempt(s, pieces, chains, entries, requests, work, queues, victim)
                if victim == r:
                    break
                fits = grow(s, pieces, chains, entries, requests, work, r, tokens)
            if not fits:
                break
        if tokens == 1 and computed >= q[r, R_PROMPT]:
            decodes += 1
            context += ready
            windowed += min(ready, window)
        else:
            add_prefill(batch, computed, tokens, window)
        q[r, R_COMPUTED] = ready
        q[r, R_IN_FLIGHT] += tokens
        queues[to, planned], queues[to + 1, planned], queues[to + 2, planned] = r, tokens, 0
        if ready >= known + coming:
            queues[to + 2, planned] = 1
            samples += 1
            if asynchronous:
                q[r, R_PLACEHOLDERS] = coming + 1
        planned += 1
        budget -= tokens
        index += 1
    batch[1], batch[2], batch[3], batch[9] = decodes, context, windowed, samples
    sums[2, F_SIZE + b] = planned
    return budget


@njit
def grow(s, pieces, chains, entries, requests, work, r, tokens):
    """Slots for `tokens` more tokens of a running request; False when blocks lack."""
    size = s[K_BLOCK]
    computed = requests[r, R_COMPUTED]
    slots = min(computed + tokens, s[K_MAX_LEN])
    if s[K_SLIDING] >= 0:
        slide(s, pieces, chains, entries, requests, work, r, computed - requests[r, R_IN_FLIGHT])
    if slots > requests[r, R_END] * size:
        end = (slots + size - 1) // size
        need = (end - requests[r, R_END]) * s[K_GROUPS]
        if need > s[S_UNHASHED] + s[S_HASHED]:
            return False
        take(s, pieces, chains, need)
        requests[r, R_END] = end
    if s[K_CACHING]:
        publish(s, pieces, chains, entries, requests, work, r, min(computed + tokens, requests[r, R_TOKENS]))
    return True


@njit
def preempt(s, pieces, chains, entries, requests, work, queues, r):
    """Free all blocks of request `r` and put it before all that wait: it computes its tokens anew."""
    q = requests
    free(s, pieces, chains, entries, requests, work, r)
    q[r, R_STATUS] = PREEMPTED
    q[r, R_COMPUTED] = 0
    q[r, R_STALE] = q[r, R_IN_FLIGHT]
    q[r, R_PLACEHOLDERS] = 0
    q[r, R_PREEMPTIONS] += 1
    s[S_PREEMPTED] += 1
    push_waiting_head(s, queues, r)


@njit(inline="always")
def apply(s, pieces, chains, entries, requests, work, queues, sums, clock, request_log, token_log, b, step):
    """Apply the output of planned step `b`, row `step` of the log, which ends now."""
    q, to = requests, V_PLAN + 3 * b
    asynchronous, caching, size, max_len = s[K_DEPTH] == 2, s[K_CACHING] != 0, s[K_BLOCK], s[K_MAX_LEN]
    finished = waited = 0
    row = s[S_TOKENS]
    for index in range(int(sums[2, F_SIZE + b])):
        r, tokens = queues[to, index], queues[to + 1, index]
        stale = q[r, R_STALE] > 0
        q[r, R_IN_FLIGHT] -= tokens
        if stale:
            q[r, R_STALE] -= tokens
        if queues[to + 2, index] == 0:
            continue
        known = q[r, R_TOKENS] + 1
        q[r, R_TOKENS] = known
        if known == q[r, R_PROMPT] + 1:
            s[S_QUEUED_TOKENS] -= q[r, R_PROMPT]
        token_log[row, 0], token_log[row, 1] = q[r, R_NUMBER], step
        row += 1
        if asynchronous:
            if not stale:
                q[r, R_PLACEHOLDERS] -= 1
            if caching and q[r, R_STATUS] == RUNNING:
                ready = q[r, R_COMPUTED] - q[r, R_PLACEHOLDERS]
                if ready >= (q[r, R_HASHED] + 1) * size:
                    publish(s, pieces, chains, entries, requests, work, r, ready)
        if known >= max_len or known >= q[r, R_MOST]:
            if q[r, R_STATUS] == RUNNING:
                free(s, pieces, chains, entries, requests, work, r)
            else:
                waited += 1
            finish(s, requests, queues, sums, clock, request_log, r)
            finished += 1
    s[S_TOKENS] = row
    if finished:
        drop_finished(s, requests, queues, waited)


@njit
def finish(s, requests, queues, sums, clock, request_log, r):
    """The reply is complete now."""
    requests[r, R_STATUS] = ABSENT
    request_log[requests[r, R_NUMBER], Q_STATE] = 1
    s[S_LIVE] -= 1
    at = s[S_REPLIES]
    queues[V_REPLY, at], queues[V_REPLY_TOKENS, at] = r, requests[r, R_TOKENS] - requests[r, R_PROMPT]
    clock[at, X_REPLY] = sums[2, F_NOW]
    s[S_REPLIES] = at + 1
