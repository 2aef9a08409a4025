"""Planning a step and applying its output: the rules of `scheduler`, on the fast state. Compiled by numba."""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast_cache import adopt, find_path, free, full_hit, publish, slide, sliding_hit, take
from spoc_lib.engine.fast_state import *


@njit
def plan(s, pieces, chains, entries, requests, work, queues, sums, request_log, b):
    """Plan a step into buffer `b`; returns its tokens."""
    batch = sums[b]
    batch[:] = 0.0
    s[S_PREEMPTED] = s[S_QUERIES] = s[S_HITS] = 0
    threshold = s[K_THRESHOLD] if s[S_RUNNING] + s[S_WAITING] > 1 else 0
    budget = plan_running(s, pieces, chains, entries, requests, work, queues, sums, b, threshold)
    if s[S_PREEMPTED] == 0 and s[S_WAITING] > 0:
        plan_waiting(s, pieces, chains, entries, requests, work, queues, sums, request_log, b, budget, threshold)
    batch[0] = batch[1] + batch[5]
    batch[10], batch[11] = s[S_RUNNING], s[S_WAITING]
    batch[12] = 1.0 - (s[S_UNHASHED] + s[S_HASHED]) / s[K_POOL]
    batch[13], batch[14], batch[15] = s[S_PREEMPTED], s[S_QUERIES], s[S_HITS]
    return int(batch[0])


@njit
def plan_running(s, pieces, chains, entries, requests, work, queues, sums, b, threshold):
    """The hot loop. Most requests decode one token, with no block that begins, slides out or becomes full."""
    q, batch, to = requests, sums[b], V_PLAN + 3 * b
    budget, max_len, size, window = s[K_BUDGET], s[K_MAX_LEN], s[K_BLOCK], s[K_BATCH_WINDOW]
    caching, asynchronous, sliding = s[K_CACHING] != 0, s[K_DEPTH] == 2, s[K_SLIDING] >= 0
    behind = s[K_WINDOW] - 1
    low = R_GROUPS + 3 * s[K_SLIDING]
    index = planned = decodes = context = windowed = samples = 0
    while index < s[S_RUNNING] and budget > 0:
        r = queues[index, V_RUNNING]
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
                victim = queues[s[S_RUNNING], V_RUNNING]
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
        queues[planned, to], queues[planned, to + 1], queues[planned, to + 2] = r, tokens, 0
        if ready >= known + coming:
            queues[planned, to + 2] = 1
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
def add_prefill(batch, before, tokens, window):
    """A prompt chunk in the sums of a batch."""
    growing = max(0, min(before + tokens, window) - before)
    batch[4] += 1
    batch[5] += tokens
    batch[6] += tokens * (before + (tokens + 1) / 2)
    batch[7] += growing * (before + (growing + 1) / 2) + (tokens - growing) * window
    batch[8] += before


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
    q = requests
    free(s, pieces, chains, entries, requests, work, r)
    q[r, R_STATUS] = PREEMPTED
    q[r, R_COMPUTED] = 0
    q[r, R_STALE] = q[r, R_IN_FLIGHT]
    q[r, R_PLACEHOLDERS] = 0
    q[r, R_PREEMPTIONS] += 1
    s[S_PREEMPTED] += 1
    push_waiting_head(s, queues, r)


@njit
def push_waiting_head(s, queues, r):
    s[S_WAIT_HEAD] = (s[S_WAIT_HEAD] - 1) % len(queues)
    queues[s[S_WAIT_HEAD], V_WAITING] = r
    s[S_WAITING] += 1


@njit
def pop_waiting(s, queues):
    s[S_WAIT_HEAD] = (s[S_WAIT_HEAD] + 1) % len(queues)
    s[S_WAITING] -= 1


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
    queues[index, to], queues[index, to + 1], queues[index, to + 2] = r, tokens, 0
    if before + tokens >= q[r, R_TOKENS] + q[r, R_PLACEHOLDERS]:
        queues[index, to + 2] = 1
        batch[9] += 1
        if s[K_DEPTH] == 2:
            q[r, R_PLACEHOLDERS] += 1


@njit
def plan_waiting(s, pieces, chains, entries, requests, work, queues, sums, request_log, b, budget, threshold):
    q = requests
    skipped = 0
    while s[S_WAITING] > 0 and budget > 0 and s[S_RUNNING] < s[K_MAX_SEQS]:
        r = queues[s[S_WAIT_HEAD], V_WAITING]
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
        tokens = min(tokens, budget)
        if not admit(s, pieces, chains, entries, requests, work, r, hit, tokens):
            break
        pop_waiting(s, queues)
        queues[s[S_RUNNING], V_RUNNING] = r
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


@njit
def apply(s, pieces, chains, entries, requests, work, queues, sums, clock, request_log, token_log, b, step):
    """Apply the output of planned step `b`, row `step` of the log, which ends now."""
    q, to = requests, V_PLAN + 3 * b
    asynchronous, caching, size, max_len = s[K_DEPTH] == 2, s[K_CACHING] != 0, s[K_BLOCK], s[K_MAX_LEN]
    finished = 0
    row = s[S_TOKENS]
    for index in range(int(sums[2, F_SIZE + b])):
        r, tokens = queues[index, to], queues[index, to + 1]
        stale = q[r, R_STALE] > 0
        q[r, R_IN_FLIGHT] -= tokens
        if stale:
            q[r, R_STALE] -= tokens
        if queues[index, to + 2] == 0:
            continue
        known = q[r, R_TOKENS] + 1
        q[r, R_TOKENS] = known
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
            finish(s, requests, queues, sums, clock, request_log, r)
            finished += 1
    s[S_TOKENS] = row
    if finished:
        drop_finished(s, requests, queues)


@njit
def finish(s, requests, queues, sums, clock, request_log, r):
    """The reply is complete now."""
    requests[r, R_STATUS] = ABSENT
    request_log[requests[r, R_NUMBER], Q_STATE] = 1
    s[S_LIVE] -= 1
    at = s[S_REPLIES]
    queues[at, V_REPLY], queues[at, V_REPLY_TOKENS] = r, requests[r, R_TOKENS] - requests[r, R_PROMPT]
    clock[at, X_REPLY] = sums[2, F_NOW]
    s[S_REPLIES] = at + 1


@njit
def drop_finished(s, requests, queues):
    """Out of the lines, order kept."""
    kept = 0
    for index in range(s[S_RUNNING]):
        r = queues[index, V_RUNNING]
        if requests[r, R_STATUS] != ABSENT:
            queues[kept, V_RUNNING] = r
            kept += 1
    s[S_RUNNING] = kept
    kept = 0
    size = len(queues)
    for index in range(s[S_WAITING]):
        r = queues[(s[S_WAIT_HEAD] + index) % size, V_WAITING]
        if requests[r, R_STATUS] != ABSENT:
            queues[(s[S_WAIT_HEAD] + kept) % size, V_WAITING] = r
            kept += 1
    s[S_WAITING] = kept
