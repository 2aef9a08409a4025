"""The KV cache in extents: the rules of `kv_cache`, on runs of blocks instead of blocks. Compiled by numba.

What makes it exact: a piece is split wherever a range begins or ends inside it, so users and LRU order are as if kept
block by block; pieces are joined only where their eviction order stays the same and no other copy overlaps, so that
"the copy inserted first" needs no more than a publication number a piece.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast_state import *


@njit
def new_piece(s, pieces):
    p = s[S_PIECE_FREE]
    if p != NONE:
        s[S_PIECE_FREE] = pieces[p, P_LNEXT]
    else:
        p = s[S_PIECES]
        s[S_PIECES] += 1
    return p


@njit
def list_remove(s, pieces, chains, p):
    """Out of its chain's list, and recycled."""
    q = pieces
    at = C_LISTS + 3 * q[p, P_GROUP]
    before, after = q[p, P_PREV], q[p, P_NEXT]
    if before != NONE:
        q[before, P_NEXT] = after
    else:
        chains[q[p, P_CHAIN], at] = after
    if after != NONE:
        q[after, P_PREV] = before
    else:
        chains[q[p, P_CHAIN], at + 1] = before
    q[p, P_LNEXT] = s[S_PIECE_FREE]
    s[S_PIECE_FREE] = p


@njit
def list_insert(pieces, chains, p, before):
    """Into its chain's list behind `before` (NONE: at the head)."""
    q = pieces
    chain, at = q[p, P_CHAIN], C_LISTS + 3 * q[p, P_GROUP]
    after = chains[chain, at] if before == NONE else q[before, P_NEXT]
    q[p, P_PREV], q[p, P_NEXT] = before, after
    if before == NONE:
        chains[chain, at] = p
    else:
        q[before, P_NEXT] = p
    if after == NONE:
        chains[chain, at + 1] = p
    else:
        q[after, P_PREV] = p


@njit
def lru_remove(s, pieces, p):
    q = pieces
    before, after = q[p, P_LPREV], q[p, P_LNEXT]
    if before != NONE:
        q[before, P_LNEXT] = after
    else:
        s[S_LRU_HEAD] = after
    if after != NONE:
        q[after, P_LPREV] = before
    else:
        s[S_LRU_TAIL] = before
    q[p, P_LNEXT] = NOT_IN_LRU


@njit
def lru_append(s, pieces, p):
    q = pieces
    tail = s[S_LRU_TAIL]
    q[p, P_LPREV], q[p, P_LNEXT] = tail, NONE
    if tail == NONE:
        s[S_LRU_HEAD] = p
    else:
        q[tail, P_LNEXT] = p
    s[S_LRU_TAIL] = p


@njit
def split(s, pieces, chains, p, at):
    """Cut piece `p` at block `at`: `p` keeps the left part, the right part is returned. In the LRU the right part is
    evicted first."""
    q = pieces
    r = new_piece(s, pieces)
    for column in (P_CHAIN, P_GROUP, P_B, P_USERS, P_PUB, P_COPY):
        q[r, column] = q[p, column]
    q[r, P_A] = at
    q[p, P_B] = at
    q[p, P_COPY] = r
    before = p
    while q[before, P_NEXT] != NONE and q[q[before, P_NEXT], P_A] < at:
        before = q[before, P_NEXT]
    list_insert(pieces, chains, r, before)
    if q[p, P_USERS] == 0:
        ahead = q[p, P_LPREV]
        q[r, P_LPREV], q[r, P_LNEXT] = ahead, p
        q[p, P_LPREV] = r
        if ahead == NONE:
            s[S_LRU_HEAD] = r
        else:
            q[ahead, P_LNEXT] = r
    else:
        q[r, P_LNEXT] = NOT_IN_LRU
    return r


@njit
def release(s, pieces, chains, p):
    """One user less; the last one puts the piece at the end of the LRU."""
    q = pieces
    q[p, P_USERS] -= 1
    if q[p, P_USERS] > 0:
        return
    s[S_HASHED] += q[p, P_B] - q[p, P_A]
    t = s[S_LRU_TAIL]
    lru_append(s, pieces, p)
    if (t != NONE and q[t, P_CHAIN] == q[p, P_CHAIN] and q[t, P_GROUP] == q[p, P_GROUP] and q[t, P_A] == q[p, P_B]
            and chains[q[p, P_CHAIN], C_LISTS + 3 * q[p, P_GROUP] + 2] == 0):
        q[p, P_B] = q[t, P_B]
        q[p, P_PUB] = max(q[p, P_PUB], q[t, P_PUB])
        lru_remove(s, pieces, t)
        list_remove(s, pieces, chains, t)


@njit
def take(s, pieces, chains, count):
    """Take free blocks: unhashed ones, then from the head of the LRU."""
    fresh = min(count, s[S_UNHASHED])
    s[S_UNHASHED] -= fresh
    count -= fresh
    s[S_HASHED] -= count
    q = pieces
    while count > 0:
        p = s[S_LRU_HEAD]
        size = q[p, P_B] - q[p, P_A]
        if size > count:
            q[p, P_B] -= count
            return
        count -= size
        lru_remove(s, pieces, p)
        list_remove(s, pieces, chains, p)


@njit
def find_path(s, chains, work, leaf):
    """Chains from the root to `leaf` into `work`; their number into S_PATH."""
    depth = 0
    c = leaf
    while c != 0:
        depth += 1
        c = chains[c, C_PARENT]
    s[S_PATH] = depth
    c = leaf
    while depth > 0:
        depth -= 1
        work[depth, W_PATH] = c
        work[depth, W_START] = chains[c, C_START]
        c = chains[c, C_PARENT]


@njit
def full_hit(s, pieces, chains, work, most):
    """Blocks from the start that the full group has cached, at most `most`; the ranges into `work`."""
    q = pieces
    at = C_LISTS + 3 * s[K_FULL]
    found = 0
    pos = 0
    for level in range(s[S_PATH]):
        chain = work[level, W_PATH]
        limit = min(most, work[level + 1, W_START]) if level + 1 < s[S_PATH] else most
        p = chains[chain, at]
        copies = chains[chain, at + 2] != 0
        while pos < limit:
            end = limit
            if copies:
                p, end = first_copy(pieces, chains[chain, at], pos, limit)
            else:
                while p != NONE and q[p, P_B] <= pos:
                    p = q[p, P_NEXT]
                if p != NONE and q[p, P_A] > pos:
                    p = NONE
            if p == NONE:
                s[S_HITS_FULL] = found
                return pos
            end = min(end, q[p, P_B])
            work[found, W_FULL], work[found, W_FULL + 1], work[found, W_FULL + 2] = p, pos, end
            found += 1
            pos = end
    s[S_HITS_FULL] = found
    return pos


@njit
def first_copy(pieces, head, pos, limit):
    """Among overlapping copies the one of block `pos` inserted first, and up to where it stays the first."""
    q = pieces
    best = NONE
    p = head
    while p != NONE and q[p, P_A] <= pos:
        if q[p, P_B] > pos and (best == NONE or q[p, P_PUB] < q[best, P_PUB]):
            best = p
        p = q[p, P_NEXT]
    end = limit
    while best != NONE and p != NONE and q[p, P_A] < end:
        if q[p, P_PUB] < q[best, P_PUB]:
            end = q[p, P_A]
        p = q[p, P_NEXT]
    return best, end


@njit
def sliding_hit(s, pieces, chains, work, most):
    """The longest prefix, at most `most` blocks, that ends in `need` cached blocks of the sliding group, or a shorter
    run from block 0; the ranges, last first, into `work`."""
    q = pieces
    at = C_LISTS + 3 * s[K_SLIDING]
    need = s[K_NEED]
    found = 0
    end = most
    left = most
    for level in range(s[S_PATH] - 1, -1, -1):
        chain, start = work[level, W_PATH], work[level, W_START]
        copies = chains[chain, at + 2] != 0
        p = chains[chain, at + 1]
        while left > start:
            block = left - 1
            low = start  # how far left the copy found reaches as the first one, or the gap's left edge
            if copies:
                p, low = last_copy(pieces, chains[chain, at], block, start)
            else:
                while p != NONE and q[p, P_A] > block:
                    p = q[p, P_PREV]
            if p == NONE or q[p, P_B] <= block:
                if not copies and p != NONE:
                    low = max(start, q[p, P_B])
                end = left = low
                found = 0
                continue
            low = max(low, q[p, P_A], start, end - need)
            work[found, W_SLIDING], work[found, W_SLIDING + 1], work[found, W_SLIDING + 2] = p, low, left
            found += 1
            left = low
            if end - left >= need:
                s[S_HITS_SLIDING] = found
                return end
    if left > 0:
        end = found = 0
    s[S_HITS_SLIDING] = found
    return end


@njit
def last_copy(pieces, head, block, start):
    """The first-inserted copy of `block` and the left edge up to which it stays the first; NONE and the right edge of
    the next copy to the left where there is none."""
    q = pieces
    best = NONE
    p = head
    while p != NONE and q[p, P_A] <= block:
        if q[p, P_B] > block and (best == NONE or q[p, P_PUB] < q[best, P_PUB]):
            best = p
        p = q[p, P_NEXT]
    low = start
    p = head
    while p != NONE and q[p, P_A] <= block:
        if q[p, P_B] <= block and (best == NONE or q[p, P_PUB] < q[best, P_PUB]):
            low = max(low, q[p, P_B])
        p = q[p, P_NEXT]
    return best, low


@njit
def add_entry(s, entries, requests, r, group, piece, a, b):
    e = s[S_ENTRY_FREE]
    if e != NONE:
        s[S_ENTRY_FREE] = entries[e, E_NEXT]
    else:
        e = s[S_ENTRIES]
        s[S_ENTRIES] += 1
    at = R_GROUPS + 3 * group
    tail = requests[r, at + 2]
    entries[e, E_PIECE], entries[e, E_A], entries[e, E_B], entries[e, E_LAST] = piece, a, b, piece
    entries[e, E_PREV], entries[e, E_NEXT] = tail, NONE
    if tail == NONE:
        requests[r, at + 1] = e
    else:
        entries[tail, E_NEXT] = e
    requests[r, at + 2] = e


@njit
def adopt(s, pieces, chains, entries, requests, work, r, group, piece, a, b):
    """Hold blocks [a, b) of a cached piece."""
    q = pieces
    while q[piece, P_B] <= a:  # an earlier range of the same copy was cut off
        piece = q[piece, P_COPY]
    if q[piece, P_A] < a:
        piece = split(s, pieces, chains, piece, a)
    if q[piece, P_B] > b:
        split(s, pieces, chains, piece, b)
    if q[piece, P_USERS] == 0:
        lru_remove(s, pieces, piece)
        s[S_HASHED] -= b - a
    q[piece, P_USERS] += 1
    add_entry(s, entries, requests, r, group, piece, a, b)


@njit
def publish_run(s, pieces, chains, entries, requests, work, r, group, chain, a, b):
    """Blocks [a, b) of `chain`, which request `r` holds, become findable."""
    q = pieces
    at = C_LISTS + 3 * group
    s[S_PUBLISHED] += 1
    e = requests[r, R_GROUPS + 3 * group + 2]
    if e != NONE and entries[e, E_B] == a:
        p = entries[e, E_LAST]
        while q[p, P_B] < a:
            p = q[p, P_COPY]
        entries[e, E_LAST] = p
        after = q[p, P_NEXT]
        if (q[p, P_CHAIN] == chain and q[p, P_USERS] == 1 and q[p, P_B] == a and chains[chain, at + 2] == 0
                and (after == NONE or q[after, P_A] >= b)):
            q[p, P_B] = b
            entries[e, E_B] = b
            return
    p = new_piece(s, pieces)
    q[p, P_CHAIN], q[p, P_GROUP], q[p, P_A], q[p, P_B] = chain, group, a, b
    q[p, P_USERS], q[p, P_PUB], q[p, P_LNEXT], q[p, P_COPY] = 1, s[S_PUBLISHED], NOT_IN_LRU, NONE
    before = chains[chain, at + 1]
    while before != NONE and q[before, P_A] > a:
        before = q[before, P_PREV]
    list_insert(pieces, chains, p, before)
    after = q[p, P_NEXT]
    if (before != NONE and q[before, P_B] > a) or (after != NONE and q[after, P_A] < b):
        chains[chain, at + 2] = 1
    add_entry(s, entries, requests, r, group, p, a, b)


@njit
def publish_range(s, pieces, chains, entries, requests, work, r, group, a, b):
    """As `publish_run`, over all chains of the request's path (in `work`)."""
    for level in range(s[S_PATH]):
        start = max(a, work[level, W_START])
        end = min(b, work[level + 1, W_START]) if level + 1 < s[S_PATH] else b
        if start < end:
            publish_run(s, pieces, chains, entries, requests, work, r, group, work[level, W_PATH], start, end)


@njit
def publish(s, pieces, chains, entries, requests, work, r, tokens):
    """Make the full blocks of the first `tokens` tokens findable, as far as retention keeps them."""
    full = tokens // s[K_BLOCK]
    first = requests[r, R_HASHED]
    if full <= first:
        return
    requests[r, R_HASHED] = full
    find_path(s, chains, work, requests[r, R_CHAIN])
    for group in range(s[K_GROUPS]):
        if group == s[K_FULL]:
            publish_range(s, pieces, chains, entries, requests, work, r, group, first, full)
        else:
            publish_sliding(s, pieces, chains, entries, requests, work, r, group, max(first, requests[r, R_GROUPS + 3 * group]), full)


@njit
def publish_sliding(s, pieces, chains, entries, requests, work, r, group, first, full):
    """What retention keeps of [first, full): all, or the window's tails at the boundaries (and once a period)."""
    retention, need, size = s[K_RETENTION], s[K_NEED], s[K_BLOCK]
    if retention < 0:
        if first < full:
            publish_range(s, pieces, chains, entries, requests, work, r, group, first, full)
        return
    one = (requests[r, R_PROMPT] - 1) // size
    two = requests[r, R_JUNCTION] // size
    if two < one:
        one, two = two, one
    if retention == 0:
        end = min(one, full)
        start = max(one - need, first)
        if start < end:
            publish_range(s, pieces, chains, entries, requests, work, r, group, start, end)
            first = end
        start, end = max(two - need, first), min(two, full)
        if start < end:
            publish_range(s, pieces, chains, entries, requests, work, r, group, start, end)
        return
    period = retention // size
    start = NONE
    for block in range(first, full + 1):
        kept = block < full and (block % period >= period - need or one - need <= block < one
                                 or two - need <= block < two)
        if kept and start == NONE:
            start = block
        if not kept and start != NONE:
            publish_range(s, pieces, chains, entries, requests, work, r, group, start, block)
            start = NONE


@njit
def release_pieces(s, pieces, chains, entries, work, e, end):
    """Release the pieces of entry `e` before block `end`, last first; returns the piece that begins at `end`."""
    q = pieces
    count = 0
    p = entries[e, E_PIECE]
    rest = NONE
    while True:
        if q[p, P_B] > end:
            rest = split(s, pieces, chains, p, end)
        work[count, W_LIST] = p
        count += 1
        if q[p, P_B] >= end:
            if rest == NONE:
                rest = q[p, P_COPY]
            break
        p = q[p, P_COPY]
    for index in range(count - 1, -1, -1):
        release(s, pieces, chains, work[index, W_LIST])
    return rest


@njit
def slide(s, pieces, chains, entries, requests, work, r, computed):
    """Free the blocks of the sliding group that no token behind the first `computed` attends to."""
    group = s[K_SLIDING]
    at = R_GROUPS + 3 * group
    low = requests[r, at]
    high = min(max(0, computed - s[K_WINDOW] + 1) // s[K_BLOCK], requests[r, R_END])
    if high <= low:
        return
    requests[r, at] = high
    hashed = 0
    e = requests[r, at + 1]
    last = NONE
    while e != NONE and entries[e, E_A] < high:
        last = e
        e = entries[e, E_NEXT]
    while last != NONE:
        before = entries[last, E_PREV]
        a, b = entries[last, E_A], entries[last, E_B]
        end = min(b, high)
        hashed += end - a
        rest = release_pieces(s, pieces, chains, entries, work, last, end)
        if end < b:
            entries[last, E_PIECE] = rest
            entries[last, E_A] = end
            entries[last, E_LAST] = rest
        else:
            drop_entry(s, entries, requests, r, at, last)
        last = before
    s[S_UNHASHED] += high - low - hashed


@njit
def drop_entry(s, entries, requests, r, at, e):
    before, after = entries[e, E_PREV], entries[e, E_NEXT]
    if before == NONE:
        requests[r, at + 1] = after
    else:
        entries[before, E_NEXT] = after
    if after == NONE:
        requests[r, at + 2] = before
    else:
        entries[after, E_PREV] = before
    entries[e, E_NEXT] = s[S_ENTRY_FREE]
    s[S_ENTRY_FREE] = e


@njit
def free(s, pieces, chains, entries, requests, work, r):
    """Return all blocks of request `r`, group by group, each from its tail."""
    for group in range(s[K_GROUPS]):
        at = R_GROUPS + 3 * group
        held = requests[r, R_END] - requests[r, at]
        e = requests[r, at + 2]
        while e != NONE:
            before = entries[e, E_PREV]
            held -= entries[e, E_B] - entries[e, E_A]
            release_pieces(s, pieces, chains, entries, work, e, entries[e, E_B])
            drop_entry(s, entries, requests, r, at, e)
            e = before
        s[S_UNHASHED] += held
        requests[r, at] = 0
    requests[r, R_END] = 0
    requests[r, R_HASHED] = 0
