"""Prefix look-up in extents: the rules of `KVCache.look_up` for one full and one sliding group. Compiled by numba.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast.state import *


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
