"""The fast core's state: plain arrays with named columns, so that compiled code and Python share it.

Block identity is symbolic: (chain, index). A *chain* is a stretch of token content; chains form a tree, a chain's own
blocks begin at `C_START` and everything before is its parent's. Two blocks are equal if and only if they are the same
index of the same chain. A *piece* is a run of equal-fated cached blocks of one chain in one KV group: one physical
copy, the same users, one place in the LRU. An *entry* is a range of hashed blocks that a request holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NONE = -1
NOT_IN_LRU = -2

# pieces: chain, group, first block, end block, users, publication number, neighbours in the chain's list (by first
# block), neighbours in the LRU (head is evicted first, each piece from its end), next piece of the same copy
P_CHAIN, P_GROUP, P_A, P_B, P_USERS, P_PUB, P_PREV, P_NEXT, P_LPREV, P_LNEXT, P_COPY = range(11)
P_COLUMNS = 11

# chains: parent, first own block, and by group the ends of the piece list and whether pieces overlap
C_PARENT, C_START, C_LISTS = 0, 1, 2
C_COLUMNS = 2 + 3 * 2

# entries: first piece, range, last piece known, neighbours
E_PIECE, E_A, E_B, E_LAST, E_PREV, E_NEXT = range(6)
E_COLUMNS = 6

# requests by user: number, leaf chain, prompt tokens, tokens, computed, placeholders, in flight, stale, most tokens,
# status, junction (tokens), cached (-1: not admitted yet), preemptions, blocks held (end), blocks hashed (end),
# and by group: first block held, entries' ends
(R_NUMBER, R_CHAIN, R_PROMPT, R_TOKENS, R_COMPUTED, R_PLACEHOLDERS, R_IN_FLIGHT, R_STALE, R_MOST, R_STATUS,
 R_JUNCTION, R_CACHED, R_PREEMPTIONS, R_END, R_HASHED, R_GROUPS) = range(16)
R_COLUMNS = R_GROUPS + 3 * 2
ABSENT, WAITING, RUNNING, PREEMPTED = range(4)

# the next turn of a user, prepared ahead: leaf chain, prompt tokens, output tokens, whether it is there
T_CHAIN, T_PROMPT, T_OUTPUT, T_READY = range(4)
T_COLUMNS = 4

# requests ever made: user, cached tokens, step of admission, state (runlog's)
Q_USER, Q_CACHED, Q_ADMIT, Q_STATE = range(4)
Q_COLUMNS = 4

# scalars: pool, free lists, counters
(S_UNHASHED, S_HASHED, S_LRU_HEAD, S_LRU_TAIL, S_PIECE_FREE, S_PIECES, S_ENTRY_FREE, S_ENTRIES, S_PUBLISHED,
 S_RUNNING, S_WAIT_HEAD, S_WAITING, S_REQUESTS, S_STEPS, S_TOKENS, S_ORDER, S_ARRIVALS, S_REPLIES, S_UNREADY,
 S_PLANNED, S_PLAN_HEAD, S_PREEMPTED, S_QUERIES, S_HITS, S_PATH, S_HITS_FULL, S_HITS_SLIDING, S_LIVE) = range(28)
S_COLUMNS = 28

# configuration
(K_BLOCK, K_GROUPS, K_FULL, K_SLIDING, K_WINDOW, K_NEED, K_CAP, K_POOL, K_CACHING, K_MAX_LEN, K_BUDGET, K_MAX_SEQS,
 K_THRESHOLD, K_RESERVE, K_DEPTH, K_WATERMARK, K_RETENTION, K_BATCH_WINDOW, K_QUEUE, K_AHEAD) = range(20)
K_COLUMNS = 20

# a planned step's sums: the batch, then the state after scheduling (runlog.STEP_COLUMNS without the times)
B_COLUMNS = 16


class State(NamedTuple):
    """All arrays. int64 but for `times` (now, end of the run), `heap_time`, `send`, `turn_time`, `reply_time`,
    `sums`, `step_log`."""

    k: np.ndarray             # (K_COLUMNS,)
    s: np.ndarray             # (S_COLUMNS,)
    times: np.ndarray         # (2,)
    pieces: np.ndarray        # (capacity, P_COLUMNS)
    chains: np.ndarray        # (capacity, C_COLUMNS)
    entries: np.ndarray       # (capacity, E_COLUMNS)
    requests: np.ndarray      # (users, R_COLUMNS)
    turns: np.ndarray         # (users, T_COLUMNS)
    turn_time: np.ndarray     # (users, 2): think time, time from sending to the scheduler
    send: np.ndarray          # (users,): send time of the turn under way
    running: np.ndarray       # (users,)
    waiting: np.ndarray       # (2 * users,) ring
    heap_time: np.ndarray     # (users,)
    heap: np.ndarray          # (users, 2): order, user
    replies: np.ndarray       # (users, 2): user, tokens
    reply_time: np.ndarray    # (users,)
    plan: np.ndarray          # (2, users, 3): user, tokens, samples
    plan_size: np.ndarray     # (2,)
    sums: np.ndarray          # (2, B_COLUMNS)
    hits: np.ndarray          # (2, longest, 3): piece, first, end
    path: np.ndarray          # (depth, 2): chain, first block
    scratch: np.ndarray       # (longest,)
    request_log: np.ndarray   # (capacity, Q_COLUMNS)
    request_send: np.ndarray  # (capacity,)
    token_log: np.ndarray     # (capacity, 2): request, step
    step_log: np.ndarray      # (capacity, 2 + B_COLUMNS)
    table: np.ndarray         # step time, see steptime_compiled
    coeffs: np.ndarray
