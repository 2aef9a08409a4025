"""What requests hold, in extents: adopting hits, hashing, sliding, freeing, by the rules of `kv_cache`. Compiled by
numba.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast.lookup import find_path
from spoc_lib.engine.fast.pieces import list_insert, lru_remove, new_piece, release, split
from spoc_lib.engine.fast.state import *


@njit
def add_entry(s, entries, requests, r, group, piece, a, b):
    """Append the blocks [a, b) of a piece to the table of request `r` in a group."""
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
def drop_entry(s, entries, requests, r, at, e):
    """Take entry `e` out of the list that begins at column `at` of request `r`, and give it back."""
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
            held = requests[r, R_GROUPS + 3 * group]
            publish_sliding(s, pieces, chains, entries, requests, work, r, group, max(first, held), full)


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
