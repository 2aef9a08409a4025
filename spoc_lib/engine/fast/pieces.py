"""Pieces: their place in the chain's list and in the LRU, splitting, joining, eviction. Compiled by numba.

What makes extents exact: a piece is split wherever a range begins or ends inside it, so users and LRU order are as if
kept block by block; pieces are joined only where their eviction order stays the same and no other copy overlaps, so
that "the copy inserted first" needs no more than a publication number a piece.
"""

from __future__ import annotations

# ruff: noqa: F403, F405 - the columns' names are taken over as a whole
from numba import njit

from spoc_lib.engine.fast.state import *


@njit
def new_piece(s, pieces):
    """An unused piece: one given back, else the next."""
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
    """Take piece `p` out of the list of free pieces."""
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
    """Put piece `p` at the end of the list of free pieces: evicted last."""
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
