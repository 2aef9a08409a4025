"""Planning a step and applying its output: the rules of `scheduler`, on the fast state. Compiled by numba."""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast_cache import adopt, find_path, free, full_hit, publish, slide, sliding_hit, take
from spoc_lib.engine.fast_state import *


@njit
def plan(m, b):
    """Plan a step into buffer `b`; returns its tokens."""
    k, s = m.k, m.s
    m.plan_size[b] = 0
    m.sums[b, :] = 0.0
    s[S_PREEMPTED] = s[S_QUERIES] = s[S_HITS] = 0
    threshold = k[K_THRESHOLD] if s[S_RUNNING] + s[S_WAITING] > 1 else 0
    budget = plan_running(m, b, threshold)
    if s[S_PREEMPTED] == 0 and s[S_WAITING] > 0:
        plan_waiting(m, b, budget, threshold)
    sums = m.sums[b]
    sums[0] = sums[1] + sums[5]
    sums[10], sums[11] = s[S_RUNNING], s[S_WAITING]
    sums[12] = 1.0 - (s[S_UNHASHED] + s[S_HASHED]) / k[K_POOL]
    sums[13], sums[14], sums[15] = s[S_PREEMPTED], s[S_QUERIES], s[S_HITS]
    return int(sums[0])


@njit
def plan_running(m, b, threshold):
    k, s, requests = m.k, m.s, m.requests
    budget, max_len = k[K_BUDGET], k[K_MAX_LEN]
    index = 0
    while index < s[S_RUNNING] and budget > 0:
        r = m.running[index]
        coming, computed = requests[r, R_PLACEHOLDERS], requests[r, R_COMPUTED]
        if coming > 0 and computed + 2 - coming >= requests[r, R_MOST]:
            index += 1
            continue
        tokens = requests[r, R_TOKENS] + coming - computed
        if 0 < threshold < tokens:
            tokens = threshold
        tokens = min(tokens, budget, max_len - 1 - computed)
        if tokens <= 0:
            index += 1
            continue
        fits = grow(m, r, tokens)
        while not fits:
            victim = m.running[s[S_RUNNING] - 1]
            s[S_RUNNING] -= 1
            preempt(m, victim)
            if victim == r:
                break
            fits = grow(m, r, tokens)
        if not fits:
            break
        put(m, b, r, tokens)
        budget -= tokens
        index += 1
    return budget


@njit
def grow(m, r, tokens):
    """Slots for `tokens` more tokens of a running request; False when blocks lack. Mostly nothing is to do: no block
    begins, none slides out, none becomes full."""
    k, q = m.k, m.requests
    size = k[K_BLOCK]
    computed = q[r, R_COMPUTED]
    slots = min(computed + tokens, k[K_MAX_LEN])
    if k[K_SLIDING] >= 0:
        seen = computed - q[r, R_IN_FLIGHT]
        if seen - k[K_WINDOW] + 1 >= (q[r, R_GROUPS + 3 * k[K_SLIDING]] + 1) * size:
            slide(m, r, seen)
    if slots > q[r, R_END] * size:
        end = (slots + size - 1) // size
        need = (end - q[r, R_END]) * k[K_GROUPS]
        if need > m.s[S_UNHASHED] + m.s[S_HASHED]:
            return False
        take(m, need)
        q[r, R_END] = end
    if k[K_CACHING]:
        known = min(computed + tokens, q[r, R_TOKENS])
        if known >= (q[r, R_HASHED] + 1) * size:
            publish(m, r, known)
    return True


@njit
def preempt(m, r):
    q, s = m.requests, m.s
    free(m, r)
    q[r, R_STATUS] = PREEMPTED
    q[r, R_COMPUTED] = 0
    q[r, R_STALE] = q[r, R_IN_FLIGHT]
    q[r, R_PLACEHOLDERS] = 0
    q[r, R_PREEMPTIONS] += 1
    s[S_PREEMPTED] += 1
    push_waiting_head(m, r)


@njit
def push_waiting_head(m, r):
    s = m.s
    s[S_WAIT_HEAD] = (s[S_WAIT_HEAD] - 1) % len(m.waiting)
    m.waiting[s[S_WAIT_HEAD]] = r
    s[S_WAITING] += 1


@njit
def put(m, b, r, tokens):
    """Add a request's chunk to the plan and its sums, and count it as computed."""
    q, sums, k = m.requests, m.sums[b], m.k
    before = q[r, R_COMPUTED]
    window = k[K_BATCH_WINDOW]
    if tokens == 1 and before >= q[r, R_PROMPT]:
        sums[1] += 1
        sums[2] += before + 1
        sums[3] += min(before + 1, window)
    else:
        sums[4] += 1
        sums[5] += tokens
        sums[6] += tokens * (before + (tokens + 1) / 2)
        growing = max(0, min(before + tokens, window) - before)
        sums[7] += growing * (before + (growing + 1) / 2) + (tokens - growing) * window
        sums[8] += before
    q[r, R_COMPUTED] = before + tokens
    q[r, R_IN_FLIGHT] += tokens
    samples = 0
    if before + tokens >= q[r, R_TOKENS] + q[r, R_PLACEHOLDERS]:
        samples = 1
        sums[9] += 1
        if k[K_DEPTH] == 2:
            q[r, R_PLACEHOLDERS] += 1
    index = m.plan_size[b]
    m.plan[b, index, 0], m.plan[b, index, 1], m.plan[b, index, 2] = r, tokens, samples
    m.plan_size[b] = index + 1


@njit
def plan_waiting(m, b, budget, threshold):
    k, s, q = m.k, m.s, m.requests
    skipped = 0
    while s[S_WAITING] > 0 and budget > 0 and s[S_RUNNING] < k[K_MAX_SEQS]:
        r = m.waiting[s[S_WAIT_HEAD]]
        if q[r, R_STALE] > 0:
            m.scratch[skipped] = r
            skipped += 1
            pop_waiting(m)
            continue
        hit = look_up(m, r)
        tokens = q[r, R_TOKENS] - hit * k[K_BLOCK]
        if 0 < threshold < tokens:
            tokens = threshold
        tokens = min(tokens, budget)
        if not admit(m, r, hit, tokens):
            break
        pop_waiting(m)
        m.running[s[S_RUNNING]] = r
        s[S_RUNNING] += 1
        cached = hit * k[K_BLOCK]
        if k[K_CACHING] and q[r, R_PREEMPTIONS] == 0:
            s[S_QUERIES] += q[r, R_TOKENS]
            s[S_HITS] += cached
        if q[r, R_CACHED] < 0:
            q[r, R_CACHED] = cached
            m.request_log[q[r, R_NUMBER], Q_CACHED] = cached
            m.request_log[q[r, R_NUMBER], Q_ADMIT] = s[S_STEPS] + s[S_PLANNED]
        q[r, R_STATUS] = RUNNING
        q[r, R_COMPUTED] = cached
        put(m, b, r, tokens)
        budget -= tokens
    for index in range(skipped - 1, -1, -1):
        push_waiting_head(m, m.scratch[index])


@njit
def pop_waiting(m):
    m.s[S_WAIT_HEAD] = (m.s[S_WAIT_HEAD] + 1) % len(m.waiting)
    m.s[S_WAITING] -= 1


@njit
def look_up(m, r):
    """Blocks of the longest prefix that all groups have; fixes the junction."""
    k, q = m.k, m.requests
    q[r, R_JUNCTION] = 0
    m.s[S_HITS_FULL] = m.s[S_HITS_SLIDING] = 0
    if not k[K_CACHING]:
        return 0
    find_path(m, q[r, R_CHAIN])
    hit = (q[r, R_TOKENS] - 1) // k[K_BLOCK]
    longest = 0
    if k[K_FULL] >= 0:
        hit = longest = full_hit(m, hit)
    if k[K_SLIDING] >= 0:
        hit = sliding_hit(m, hit)
        if k[K_FULL] >= 0 and longest > hit:
            q[r, R_JUNCTION] = longest * k[K_BLOCK]
    return hit


@njit
def evictable(m, which, found, hit):
    """Blocks of a hit that nobody uses: they count as free until they are taken."""
    total = 0
    for index in range(found):
        a, b = m.hits[which, index, 1], min(m.hits[which, index, 2], hit)
        if a < b and m.pieces[m.hits[which, index, 0], P_USERS] == 0:
            total += b - a
    return total


@njit
def wanted(m, tokens, hit, capped):
    """Blocks beyond the hit that must be free for a waiting request to hold `tokens` tokens."""
    k = m.k
    required = (tokens + k[K_BLOCK] - 1) // k[K_BLOCK]
    total = 0
    if k[K_FULL] >= 0:
        total += max(required - hit, 0)
    if k[K_SLIDING] >= 0:
        if capped:
            required = min(required, k[K_CAP])
        total += max(required - hit, 0)
    return total


@njit
def admit(m, r, hit, tokens):
    """Give a waiting request its hit and slots for the chunk; False when it does not fit."""
    k, s, q = m.k, m.s, m.requests
    size = k[K_BLOCK]
    available = s[S_UNHASHED] + s[S_HASHED]
    if s[S_RUNNING] > 0:
        available -= k[K_WATERMARK]
    available -= evictable(m, 0, s[S_HITS_FULL], hit) + evictable(m, 1, s[S_HITS_SLIDING], hit)
    if k[K_RESERVE] and wanted(m, min(q[r, R_TOKENS], k[K_MAX_LEN]), hit, True) > available:
        return False
    slots = min(hit * size + tokens, k[K_MAX_LEN])
    if wanted(m, slots, hit, False) > available:
        return False
    q[r, R_END] = q[r, R_HASHED] = hit
    for group in range(k[K_GROUPS]):
        at = R_GROUPS + 3 * group
        q[r, at], q[r, at + 1], q[r, at + 2] = 0, NONE, NONE
        if hit > 0 and group == k[K_FULL]:
            for index in range(s[S_HITS_FULL]):
                a, b = m.hits[0, index, 1], min(m.hits[0, index, 2], hit)
                if a < b:
                    adopt(m, r, group, m.hits[0, index, 0], a, b)
        elif hit > 0:
            q[r, at] = max(0, hit * size - k[K_WINDOW] + 1) // size
            for index in range(s[S_HITS_SLIDING] - 1, -1, -1):
                adopt(m, r, group, m.hits[1, index, 0], m.hits[1, index, 1], m.hits[1, index, 2])
    end = (slots + size - 1) // size
    take(m, max(0, end - hit) * k[K_GROUPS])
    q[r, R_END] = max(end, hit)
    if k[K_CACHING]:
        publish(m, r, min(hit * size + tokens, q[r, R_TOKENS]))
    return True


@njit
def apply(m, b, step, now):
    """Apply the output of planned step `b`, which ended at `now` as row `step` of the log."""
    k, s, q = m.k, m.s, m.requests
    finished = 0
    for index in range(m.plan_size[b]):
        r, tokens = m.plan[b, index, 0], m.plan[b, index, 1]
        stale = q[r, R_STALE] > 0
        q[r, R_IN_FLIGHT] -= tokens
        if stale:
            q[r, R_STALE] -= tokens
        if m.plan[b, index, 2] == 0:
            continue
        q[r, R_TOKENS] += 1
        m.token_log[s[S_TOKENS], 0] = q[r, R_NUMBER]
        m.token_log[s[S_TOKENS], 1] = step
        s[S_TOKENS] += 1
        if k[K_DEPTH] == 2:
            if not stale:
                q[r, R_PLACEHOLDERS] -= 1
            if k[K_CACHING] and q[r, R_STATUS] == RUNNING:
                known = q[r, R_COMPUTED] - q[r, R_PLACEHOLDERS]
                if known >= (q[r, R_HASHED] + 1) * k[K_BLOCK]:
                    publish(m, r, known)
        if q[r, R_TOKENS] >= k[K_MAX_LEN] or q[r, R_TOKENS] >= q[r, R_MOST]:
            finish(m, r, now)
            finished += 1
    if finished:
        drop_finished(m)


@njit
def finish(m, r, now):
    q, s = m.requests, m.s
    if q[r, R_STATUS] == RUNNING:
        free(m, r)
    q[r, R_STATUS] = ABSENT
    m.request_log[q[r, R_NUMBER], Q_STATE] = 1
    s[S_LIVE] -= 1
    m.replies[s[S_REPLIES], 0] = r
    m.replies[s[S_REPLIES], 1] = q[r, R_TOKENS] - q[r, R_PROMPT]
    m.reply_time[s[S_REPLIES]] = now
    s[S_REPLIES] += 1


@njit
def drop_finished(m):
    """Out of the queues, order kept."""
    s, q = m.s, m.requests
    kept = 0
    for index in range(s[S_RUNNING]):
        r = m.running[index]
        if q[r, R_STATUS] != ABSENT:
            m.running[kept] = r
            kept += 1
    s[S_RUNNING] = kept
    kept = 0
    size = len(m.waiting)
    for index in range(s[S_WAITING]):
        r = m.waiting[(s[S_WAIT_HEAD] + index) % size]
        if q[r, R_STATUS] != ABSENT:
            m.waiting[(s[S_WAIT_HEAD] + kept) % size] = r
            kept += 1
    s[S_WAITING] = kept
