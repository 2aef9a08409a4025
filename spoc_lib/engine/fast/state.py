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

# requests by user: leaf chain, prompt tokens, most tokens, number, tokens, computed, placeholders, in flight, stale,
# status, blocks held (end), blocks hashed (end); by group: first block held, entries' ends; then junction (tokens),
# cached (-1: not admitted yet), preemptions. What a decode step touches lies in the row's first cache line.
(R_CHAIN, R_PROMPT, R_MOST, R_NUMBER, R_TOKENS, R_COMPUTED, R_PLACEHOLDERS, R_IN_FLIGHT, R_STALE, R_STATUS, R_END,
 R_HASHED, R_GROUPS) = range(13)
R_JUNCTION, R_CACHED, R_PREEMPTIONS, R_COLUMNS = range(R_GROUPS + 3 * 2, R_GROUPS + 3 * 2 + 4)
ABSENT, WAITING, RUNNING, PREEMPTED = range(4)

# further columns of requests: the user's next turn, prepared ahead: leaf chain, prompt tokens, output tokens, whether
# it is there
T_CHAIN, T_PROMPT, T_OUTPUT, T_READY = range(R_COLUMNS, R_COLUMNS + 4)
U_COLUMNS = 32  # two cache lines

# times by user: think time and time to the scheduler of the next turn, send time of the turn under way; and two heaps
# of times that belong to rows, not users: arrivals, replies
X_THINK, X_WAY, X_SEND, X_ARRIVAL, X_REPLY = range(5)
X_COLUMNS = 5

# queues, one a row: running; waiting (a ring over all rows); heap of arrivals: order, user; replies: user, tokens;
# two planned steps: user, tokens, whether it samples
(V_RUNNING, V_WAITING, V_ORDER, V_USER, V_REPLY, V_REPLY_TOKENS, V_PLAN) = range(7)
V_ROWS = V_PLAN + 2 * 3

# work space, by column: ranges of a full hit (piece, first, end), of a sliding hit, path (chain, first block), pieces
W_FULL, W_SLIDING, W_PATH, W_START, W_LIST = 0, 3, 6, 7, 8
W_COLUMNS = 9

# requests ever made: user, cached tokens, step of admission, state, send time
Q_USER, Q_CACHED, Q_ADMIT, Q_STATE, Q_SEND = range(5)
Q_COLUMNS = 5

# scalars: pool, free lists, counters
(S_UNHASHED, S_HASHED, S_LRU_HEAD, S_LRU_TAIL, S_PIECE_FREE, S_PIECES, S_ENTRY_FREE, S_ENTRIES, S_PUBLISHED,
 S_RUNNING, S_WAIT_HEAD, S_WAITING, S_REQUESTS, S_STEPS, S_TOKENS, S_ORDER, S_ARRIVALS, S_REPLIES,
 S_PLANNED, S_PLAN_HEAD, S_PREEMPTED, S_QUERIES, S_HITS, S_PATH, S_HITS_FULL, S_HITS_SLIDING, S_LIVE,
 S_QUEUED_TOKENS) = range(28)

# configuration, behind the scalars
(K_BLOCK, K_GROUPS, K_FULL, K_SLIDING, K_WINDOW, K_NEED, K_CAP, K_POOL, K_CACHING, K_MAX_LEN, K_BUDGET, K_MAX_SEQS,
 K_THRESHOLD, K_ADAPTIVE, K_CHUNKED, K_RESERVE, K_DEPTH, K_WATERMARK, K_RETENTION, K_BATCH_WINDOW, K_QUEUE,
 K_QUEUE_TOKENS, K_USERS, K_MARGIN) = range(30, 54)
S_COLUMNS = 54

# a planned step's sums: the batch, then the state after scheduling (runlog.STEP_COLUMNS without the times); the last
# row of `sums` holds the time now, the end of the run, and the number of requests in either plan
B_COLUMNS = 16
F_NOW, F_END, F_SIZE = 0, 1, 2


class State(NamedTuple):
    """All arrays, few and passed one by one: a compiled call pays for each."""

    s: np.ndarray             # int64 (S_COLUMNS,): scalars and configuration
    pieces: np.ndarray        # int32 (capacity, P_COLUMNS)
    chains: np.ndarray        # int32 (capacity, C_COLUMNS)
    entries: np.ndarray       # int32 (capacity, E_COLUMNS)
    requests: np.ndarray      # int32 (users, U_COLUMNS)
    work: np.ndarray          # int32 (longest, W_COLUMNS)
    queues: np.ndarray        # int32 (V_ROWS, 2 × users)
    sums: np.ndarray          # float64 (3, B_COLUMNS): two planned steps, times
    clock: np.ndarray         # float64 (users, X_COLUMNS), seconds
    request_log: np.ndarray   # float64 (capacity, Q_COLUMNS)
    token_log: np.ndarray     # int32 (capacity, 2): request, step
    step_log: np.ndarray      # float64 (capacity, 2 + B_COLUMNS)
    table: np.ndarray         # float64 (3, tokens): step time, see steptime.compiled; the last row its coefficients
