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
def new_piece(m):
    p = m.s[S_PIECE_FREE]
    if p != NONE:
        m.s[S_PIECE_FREE] = m.pieces[p, P_LNEXT]
    else:
        p = m.s[S_PIECES]
        m.s[S_PIECES] += 1
    return p


@njit
def list_remove(m, p):
    """Out of its chain's list, and recycled."""
    q = m.pieces
    at = C_LISTS + 3 * q[p, P_GROUP]
    before, after = q[p, P_PREV], q[p, P_NEXT]
    if before != NONE:
        q[before, P_NEXT] = after
    else:
        m.chains[q[p, P_CHAIN], at] = after
    if after != NONE:
        q[after, P_PREV] = before
    else:
        m.chains[q[p, P_CHAIN], at + 1] = before
    q[p, P_LNEXT] = m.s[S_PIECE_FREE]
    m.s[S_PIECE_FREE] = p


@njit
def list_insert(m, p, before):
    """Into its chain's list behind `before` (NONE: at the head)."""
    q = m.pieces
    chain, at = q[p, P_CHAIN], C_LISTS + 3 * q[p, P_GROUP]
    after = m.chains[chain, at] if before == NONE else q[before, P_NEXT]
    q[p, P_PREV], q[p, P_NEXT] = before, after
    if before == NONE:
        m.chains[chain, at] = p
    else:
        q[before, P_NEXT] = p
    if after == NONE:
        m.chains[chain, at + 1] = p
    else:
        q[after, P_PREV] = p


@njit
def lru_remove(m, p):
    q = m.pieces
    before, after = q[p, P_LPREV], q[p, P_LNEXT]
    if before != NONE:
        q[before, P_LNEXT] = after
    else:
        m.s[S_LRU_HEAD] = after
    if after != NONE:
        q[after, P_LPREV] = before
    else:
        m.s[S_LRU_TAIL] = before
    q[p, P_LNEXT] = NOT_IN_LRU


@njit
def lru_append(m, p):
    q = m.pieces
    tail = m.s[S_LRU_TAIL]
    q[p, P_LPREV], q[p, P_LNEXT] = tail, NONE
    if tail == NONE:
        m.s[S_LRU_HEAD] = p
    else:
        q[tail, P_LNEXT] = p
    m.s[S_LRU_TAIL] = p


@njit
def split(m, p, at):
    """Cut piece `p` at block `at`: `p` keeps the left part, the right part is returned. In the LRU the right part is
    evicted first."""
    q = m.pieces
    r = new_piece(m)
    for column in (P_CHAIN, P_GROUP, P_B, P_USERS, P_PUB, P_COPY):
        q[r, column] = q[p, column]
    q[r, P_A] = at
    q[p, P_B] = at
    q[p, P_COPY] = r
    before = p
    while q[before, P_NEXT] != NONE and q[q[before, P_NEXT], P_A] < at:
        before = q[before, P_NEXT]
    list_insert(m, r, before)
    if q[p, P_USERS] == 0:
        ahead = q[p, P_LPREV]
        q[r, P_LPREV], q[r, P_LNEXT] = ahead, p
        q[p, P_LPREV] = r
        if ahead == NONE:
            m.s[S_LRU_HEAD] = r
        else:
            q[ahead, P_LNEXT] = r
    else:
        q[r, P_LNEXT] = NOT_IN_LRU
    return r


@njit
def release(m, p):
    """One user less; the last one puts the piece at the end of the LRU."""
    q = m.pieces
    q[p, P_USERS] -= 1
    if q[p, P_USERS] > 0:
        return
    m.s[S_HASHED] += q[p, P_B] - q[p, P_A]
    t = m.s[S_LRU_TAIL]
    lru_append(m, p)
    if (t != NONE and q[t, P_CHAIN] == q[p, P_CHAIN] and q[t, P_GROUP] == q[p, P_GROUP] and q[t, P_A] == q[p, P_B]
            and m.chains[q[p, P_CHAIN], C_LISTS + 3 * q[p, P_GROUP] + 2] == 0):
        q[p, P_B] = q[t, P_B]
        q[p, P_PUB] = max(q[p, P_PUB], q[t, P_PUB])
        lru_remove(m, t)
        list_remove(m, t)


@njit
def take(m, count):
    """Take free blocks: unhashed ones, then from the head of the LRU."""
    fresh = min(count, m.s[S_UNHASHED])
    m.s[S_UNHASHED] -= fresh
    count -= fresh
    m.s[S_HASHED] -= count
    q = m.pieces
    while count > 0:
        p = m.s[S_LRU_HEAD]
        size = q[p, P_B] - q[p, P_A]
        if size > count:
            q[p, P_B] -= count
            return
        count -= size
        lru_remove(m, p)
        list_remove(m, p)


@njit
def find_path(m, leaf):
    """Chains from the root to `leaf` into m.path; their number into S_PATH."""
    depth = 0
    c = leaf
    while c != 0:
        depth += 1
        c = m.chains[c, C_PARENT]
    m.s[S_PATH] = depth
    c = leaf
    while depth > 0:
        depth -= 1
        m.path[depth, 0] = c
        m.path[depth, 1] = m.chains[c, C_START]
        c = m.chains[c, C_PARENT]


@njit
def full_hit(m, most):
    """Blocks from the start that the full group has cached, at most `most`; the ranges into m.hits[0]."""
    q = m.pieces
    at = C_LISTS + 3 * m.k[K_FULL]
    found = 0
    pos = 0
    for level in range(m.s[S_PATH]):
        chain = m.path[level, 0]
        limit = min(most, m.path[level + 1, 1]) if level + 1 < m.s[S_PATH] else most
        p = m.chains[chain, at]
        copies = m.chains[chain, at + 2] != 0
        while pos < limit:
            end = limit
            if copies:
                p, end = first_copy(m, m.chains[chain, at], pos, limit)
            else:
                while p != NONE and q[p, P_B] <= pos:
                    p = q[p, P_NEXT]
                if p != NONE and q[p, P_A] > pos:
                    p = NONE
            if p == NONE:
                m.s[S_HITS_FULL] = found
                return pos
            end = min(end, q[p, P_B])
            m.hits[0, found, 0], m.hits[0, found, 1], m.hits[0, found, 2] = p, pos, end
            found += 1
            pos = end
    m.s[S_HITS_FULL] = found
    return pos


@njit
def first_copy(m, head, pos, limit):
    """Among overlapping copies the one of block `pos` inserted first, and up to where it stays the first."""
    q = m.pieces
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
def sliding_hit(m, most):
    """The longest prefix, at most `most` blocks, that ends in `need` cached blocks of the sliding group, or a shorter
    run from block 0; the ranges, last first, into m.hits[1]."""
    q = m.pieces
    at = C_LISTS + 3 * m.k[K_SLIDING]
    need = m.k[K_NEED]
    found = 0
    end = most
    left = most
    for level in range(m.s[S_PATH] - 1, -1, -1):
        chain, start = m.path[level, 0], m.path[level, 1]
        copies = m.chains[chain, at + 2] != 0
        p = m.chains[chain, at + 1]
        while left > start:
            block = left - 1
            low = start  # how far left the copy found reaches as the first one, or the gap's left edge
            if copies:
                p, low = last_copy(m, m.chains[chain, at], block, start)
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
            m.hits[1, found, 0], m.hits[1, found, 1], m.hits[1, found, 2] = p, low, left
            found += 1
            left = low
            if end - left >= need:
                m.s[S_HITS_SLIDING] = found
                return end
    if left > 0:
        end = found = 0
    m.s[S_HITS_SLIDING] = found
    return end


@njit
def last_copy(m, head, block, start):
    """The first-inserted copy of `block` and the left edge up to which it stays the first; NONE and the right edge of
    the next copy to the left where there is none."""
    q = m.pieces
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
def add_entry(m, r, group, piece, a, b):
    e = m.s[S_ENTRY_FREE]
    if e != NONE:
        m.s[S_ENTRY_FREE] = m.entries[e, E_NEXT]
    else:
        e = m.s[S_ENTRIES]
        m.s[S_ENTRIES] += 1
    at = R_GROUPS + 3 * group
    tail = m.requests[r, at + 2]
    m.entries[e, E_PIECE], m.entries[e, E_A], m.entries[e, E_B], m.entries[e, E_LAST] = piece, a, b, piece
    m.entries[e, E_PREV], m.entries[e, E_NEXT] = tail, NONE
    if tail == NONE:
        m.requests[r, at + 1] = e
    else:
        m.entries[tail, E_NEXT] = e
    m.requests[r, at + 2] = e


@njit
def adopt(m, r, group, piece, a, b):
    """Hold blocks [a, b) of a cached piece."""
    q = m.pieces
    while q[piece, P_B] <= a:  # an earlier range of the same copy was cut off
        piece = q[piece, P_COPY]
    if q[piece, P_A] < a:
        piece = split(m, piece, a)
    if q[piece, P_B] > b:
        split(m, piece, b)
    if q[piece, P_USERS] == 0:
        lru_remove(m, piece)
        m.s[S_HASHED] -= b - a
    q[piece, P_USERS] += 1
    add_entry(m, r, group, piece, a, b)


@njit
def publish_run(m, r, group, chain, a, b):
    """Blocks [a, b) of `chain`, which request `r` holds, become findable."""
    q = m.pieces
    at = C_LISTS + 3 * group
    m.s[S_PUBLISHED] += 1
    e = m.requests[r, R_GROUPS + 3 * group + 2]
    if e != NONE and m.entries[e, E_B] == a:
        p = m.entries[e, E_LAST]
        while q[p, P_B] < a:
            p = q[p, P_COPY]
        m.entries[e, E_LAST] = p
        after = q[p, P_NEXT]
        if (q[p, P_CHAIN] == chain and q[p, P_USERS] == 1 and q[p, P_B] == a and m.chains[chain, at + 2] == 0
                and (after == NONE or q[after, P_A] >= b)):
            q[p, P_B] = b
            m.entries[e, E_B] = b
            return
    p = new_piece(m)
    q[p, P_CHAIN], q[p, P_GROUP], q[p, P_A], q[p, P_B] = chain, group, a, b
    q[p, P_USERS], q[p, P_PUB], q[p, P_LNEXT], q[p, P_COPY] = 1, m.s[S_PUBLISHED], NOT_IN_LRU, NONE
    before = m.chains[chain, at + 1]
    while before != NONE and q[before, P_A] > a:
        before = q[before, P_PREV]
    list_insert(m, p, before)
    after = q[p, P_NEXT]
    if (before != NONE and q[before, P_B] > a) or (after != NONE and q[after, P_A] < b):
        m.chains[chain, at + 2] = 1
    add_entry(m, r, group, p, a, b)


@njit
def publish_range(m, r, group, a, b):
    """As `publish_run`, over all chains of the request's path (m.path)."""
    for level in range(m.s[S_PATH]):
        start = max(a, m.path[level, 1])
        end = min(b, m.path[level + 1, 1]) if level + 1 < m.s[S_PATH] else b
        if start < end:
            publish_run(m, r, group, m.path[level, 0], start, end)


@njit
def publish(m, r, tokens):
    """Make the full blocks of the first `tokens` tokens findable, as far as retention keeps them."""
    full = tokens // m.k[K_BLOCK]
    first = m.requests[r, R_HASHED]
    if full <= first:
        return
    m.requests[r, R_HASHED] = full
    find_path(m, m.requests[r, R_CHAIN])
    for group in range(m.k[K_GROUPS]):
        if group == m.k[K_FULL]:
            publish_range(m, r, group, first, full)
        else:
            publish_sliding(m, r, group, max(first, m.requests[r, R_GROUPS + 3 * group]), full)


@njit
def publish_sliding(m, r, group, first, full):
    """What retention keeps of [first, full): all, or the window's tails at the boundaries (and once a period)."""
    retention, need, size = m.k[K_RETENTION], m.k[K_NEED], m.k[K_BLOCK]
    if retention < 0:
        if first < full:
            publish_range(m, r, group, first, full)
        return
    one = (m.requests[r, R_PROMPT] - 1) // size
    two = m.requests[r, R_JUNCTION] // size
    if two < one:
        one, two = two, one
    if retention == 0:
        end = min(one, full)
        start = max(one - need, first)
        if start < end:
            publish_range(m, r, group, start, end)
            first = end
        start, end = max(two - need, first), min(two, full)
        if start < end:
            publish_range(m, r, group, start, end)
        return
    period = retention // size
    start = NONE
    for block in range(first, full + 1):
        kept = block < full and (block % period >= period - need or one - need <= block < one
                                 or two - need <= block < two)
        if kept and start == NONE:
            start = block
        if not kept and start != NONE:
            publish_range(m, r, group, start, block)
            start = NONE


@njit
def release_pieces(m, e, end):
    """Release the pieces of entry `e` before block `end`, last first; returns the piece that begins at `end`."""
    q = m.pieces
    count = 0
    p = m.entries[e, E_PIECE]
    rest = NONE
    while True:
        if q[p, P_B] > end:
            rest = split(m, p, end)
        m.scratch[count] = p
        count += 1
        if q[p, P_B] >= end:
            if rest == NONE:
                rest = q[p, P_COPY]
            break
        p = q[p, P_COPY]
    for index in range(count - 1, -1, -1):
        release(m, m.scratch[index])
    return rest


@njit
def slide(m, r, computed):
    """Free the blocks of the sliding group that no token behind the first `computed` attends to."""
    group = m.k[K_SLIDING]
    at = R_GROUPS + 3 * group
    low = m.requests[r, at]
    high = min(max(0, computed - m.k[K_WINDOW] + 1) // m.k[K_BLOCK], m.requests[r, R_END])
    if high <= low:
        return
    m.requests[r, at] = high
    hashed = 0
    e = m.requests[r, at + 1]
    last = NONE
    while e != NONE and m.entries[e, E_A] < high:
        last = e
        e = m.entries[e, E_NEXT]
    while last != NONE:
        before = m.entries[last, E_PREV]
        a, b = m.entries[last, E_A], m.entries[last, E_B]
        end = min(b, high)
        hashed += end - a
        rest = release_pieces(m, last, end)
        if end < b:
            m.entries[last, E_PIECE] = rest
            m.entries[last, E_A] = end
            m.entries[last, E_LAST] = rest
        else:
            drop_entry(m, r, at, last)
        last = before
    m.s[S_UNHASHED] += high - low - hashed


@njit
def drop_entry(m, r, at, e):
    before, after = m.entries[e, E_PREV], m.entries[e, E_NEXT]
    if before == NONE:
        m.requests[r, at + 1] = after
    else:
        m.entries[before, E_NEXT] = after
    if after == NONE:
        m.requests[r, at + 2] = before
    else:
        m.entries[after, E_PREV] = before
    m.entries[e, E_NEXT] = m.s[S_ENTRY_FREE]
    m.s[S_ENTRY_FREE] = e


@njit
def free(m, r):
    """Return all blocks of request `r`, group by group, each from its tail."""
    for group in range(m.k[K_GROUPS]):
        at = R_GROUPS + 3 * group
        held = m.requests[r, R_END] - m.requests[r, at]
        e = m.requests[r, at + 2]
        while e != NONE:
            before = m.entries[e, E_PREV]
            held -= m.entries[e, E_B] - m.entries[e, E_A]
            release_pieces(m, e, m.entries[e, E_B])
            drop_entry(m, r, at, e)
            e = before
        m.s[S_UNHASHED] += held
        m.requests[r, at] = 0
    m.requests[r, R_END] = 0
    m.requests[r, R_HASHED] = 0
