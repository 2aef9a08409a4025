"""What a prefix cache could reuse at best: by layer, without limit, and at every size of an LRU cache.

Prompts are laid out as runs (a segment or a reply, its template tokens with it) in a tree of prefixes, so two prompts
share exactly the runs from the root to where they part. Runs stand for their blocks: within a run the first block is
always used last, so an LRU cache that holds a run partly holds its beginning, and hits at every cache size follow from
one pass over the runs (Mattson's stack distances, weighted by tokens).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numba import njit

from spoc_lib.workload.identity import mix
from spoc_lib.workload.playback import Played
from spoc_lib.workload.script import SHARED_LAYERS, Segment, Turn
from spoc_lib.workload.template import MESSAGE_TOKENS

REPLY = "reply"


@dataclass(frozen=True)
class Sharing:
    """Ideal reuse of a set of prompts, in the order in which they are sent.

    prompt_tokens, hit_tokens: all prompts, and what an infinite prefix cache would give (whole blocks);
    layers: a row a layer (`organisation` … `turn`, `reply`): its tokens in the prompts, reused, and first seen;
    lru: hit ratio by cache size in tokens; unique_tokens: the cache that never evicts;
    human_hit_ratio, agent_hit_ratio: infinite cache, by who asks.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    unique_tokens: int
    unique_blocks: int
    layers: pd.DataFrame
    lru: pd.DataFrame
    human_hit_ratio: float
    agent_hit_ratio: float

    @property
    def hit_ratio(self) -> float:
        """Share of the prompt tokens that an endless cache would hold."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def measure(played: Iterable[Played], block_tokens: int = 16, sizes: int = 48) -> Sharing:
    """Sharing among all turns of `played`. `sizes`: points of the LRU curve."""
    turns = [p.turn for p in sorted(played, key=lambda p: (p.time_s, p.turn.user, p.turn.turn))]
    tree = _Tree(turns)
    contexts: dict[int, list[int]] = {}
    accesses, lengths, reused = [], [], []
    by_kind: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}
    seen: set[int] = set()
    for turn in turns:
        context = tree.extend(contexts.get(turn.user, []), turn)
        hit = 0
        for run in context:
            if run not in seen:
                break
            hit += tree.tokens[run]
        seen.update(context)
        reused.append(hit // block_tokens * block_tokens)
        tally = by_kind[turn.kind != "agent"]
        tally[0] += reused[-1]
        tally[1] += turn.prompt_tokens
        accesses.extend(context)
        lengths.append(len(context))
        contexts[turn.user] = tree.reply(context, turn)
    prompt = sum(turn.prompt_tokens for turn in turns)
    tokens = np.asarray(tree.tokens, dtype=np.int64)
    runs = np.asarray(accesses, dtype=np.int64)
    distance = _stack_distances(runs, np.asarray(lengths, dtype=np.int64), tokens)
    unique = int(tokens[np.unique(runs)].sum()) if len(runs) else 0
    return Sharing(
        requests=len(turns), prompt_tokens=prompt, hit_tokens=sum(reused), unique_tokens=unique,
        unique_blocks=-(-unique // block_tokens), layers=_by_layer(runs, distance, tokens, tree.layers),
        lru=_curve(distance, tokens[runs], prompt, unique, sizes),
        human_hit_ratio=_ratio(*by_kind[True]), agent_hit_ratio=_ratio(*by_kind[False]),
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def common_prefix_tokens(one: Turn, other: Turn) -> int:
    """Content tokens that two prompts share from their beginning (replies of different users are never equal)."""
    shared = 0
    pairs = zip(_opening(one), _opening(other), strict=False)
    for a, b in pairs:
        if a.stream != b.stream:
            break
        shared += min(a.tokens, b.tokens)
        if a.tokens != b.tokens:
            break
    return shared


def layout(before: list[tuple[int, int]] | None, turn: Turn,
           ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """A prompt as runs (stream, tokens with the template's), and the same with the reply; `before`: the history."""
    runs = [] if turn.starts or before is None else list(before)
    side = ""
    replies = [reply for _, reply in turn.history] + [0] * len(turn.append)
    for segment, reply in zip(_opening(turn), replies, strict=True):
        role = _role(segment, side)
        runs.append((segment.stream, segment.tokens + (MESSAGE_TOKENS if role != side else 0)))
        side = role
        if reply:
            runs.append((mix(segment.stream, 51), reply + MESSAGE_TOKENS))
            side = "assistant"
    return runs, [*runs, (mix(61, turn.user, turn.conversation, turn.turn), turn.output_tokens + MESSAGE_TOKENS)]


def _role(segment: Segment, side: str) -> str:
    """The message that a segment of an opening goes into; `side`: the one before it."""
    return "system" if segment.layer in SHARED_LAYERS and side in ("", "system") else "user"


def _opening(turn: Turn) -> list[Segment]:
    return [segment for segment, _ in turn.history] + list(turn.append)


class _Tree:
    """Runs as nodes of a prefix tree. A segment that others cut shorter is split at the cuts."""

    def __init__(self, turns: list[Turn]) -> None:
        self.tokens: list[int] = []
        self.layers: list[str] = []
        self._nodes: dict[tuple[int, int, int], int] = {}
        self._cuts: dict[tuple[int, int], set[int]] = defaultdict(set)
        for turn in turns:
            if turn.starts:
                chain = 0
                for segment in _opening(turn):
                    self._cuts[chain, segment.stream].add(segment.tokens)
                    chain = mix(chain, segment.stream, segment.tokens)
        self._sorted = {key: sorted(cuts) for key, cuts in self._cuts.items()}

    def extend(self, context: list[int], turn: Turn) -> list[int]:
        """The runs of the prompt of `turn`; `context`: those of the history before it."""
        if not turn.starts:
            parent = context[-1] if context else -1
            for k, segment in enumerate(turn.append):
                parent = self._node(parent, segment.stream, 0, segment.tokens + (MESSAGE_TOKENS if k == 0 else 0),
                                    segment.layer)
                context = [*context, parent]
            return context
        return self._open(turn)

    def reply(self, context: list[int], turn: Turn) -> list[int]:
        """The history after the reply to `turn`."""
        stream = mix(61, turn.user, turn.conversation, turn.turn)
        return [*context, self._node(context[-1], stream, 0, turn.output_tokens + MESSAGE_TOKENS, REPLY)]

    def _open(self, turn: Turn) -> list[int]:
        runs: list[int] = []
        parent, chain, side = -1, 0, ""
        replies = [reply for _, reply in turn.history] + [0] * len(turn.append)
        for segment, reply in zip(_opening(turn), replies, strict=True):
            role = _role(segment, side)
            lead = MESSAGE_TOKENS if role != side else 0
            side, start = role, 0
            for end in self._sorted[chain, segment.stream]:
                if end > segment.tokens:
                    break
                parent = self._node(parent, segment.stream, start, end - start + (lead if start == 0 else 0),
                                    segment.layer)
                runs.append(parent)
                start = end
            chain = mix(chain, segment.stream, segment.tokens)
            if reply:
                parent = self._node(parent, mix(segment.stream, 51), 0, reply + MESSAGE_TOKENS, REPLY)
                runs.append(parent)
                side = "assistant"
        return runs

    def _node(self, parent: int, stream: int, start: int, tokens: int, layer: str) -> int:
        key = (parent, stream, start)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = len(self.tokens)
            self.tokens.append(tokens)
            self.layers.append(layer)
        return node


def _by_layer(runs: np.ndarray, distance: np.ndarray, tokens: np.ndarray, layers: list[str]) -> pd.DataFrame:
    frame = pd.DataFrame({"layer": np.asarray(layers, dtype=object)[runs], "prompt_tokens": tokens[runs],
                          "reused_tokens": np.where(distance >= 0, tokens[runs], 0)})
    table = frame.groupby("layer", sort=False).sum()
    order = [layer for layer in (*SHARED_LAYERS, "session", "turn", REPLY) if layer in table.index]
    table = table.loc[order].reset_index()
    table["first_seen_tokens"] = table.prompt_tokens - table.reused_tokens
    table["reused_ratio"] = table.reused_tokens / table.prompt_tokens
    return table


def _curve(distance: np.ndarray, tokens: np.ndarray, prompt_tokens: int, unique: int, sizes: int) -> pd.DataFrame:
    """Hit ratio by LRU size: a run `d` tokens below the top of the stack gives min(size - d, tokens) hits."""
    again = distance >= 0
    d, w = distance[again], tokens[again]
    points = np.unique(np.geomspace(max(1, unique / 1000), max(2, unique), sizes).astype(np.int64))
    ratio = [float(np.clip(size - d, 0, w).sum()) / max(1, prompt_tokens) for size in points]
    return pd.DataFrame({"cache_tokens": points, "hit_ratio": ratio})


@njit(cache=True)
def _stack_distances(runs, lengths, tokens):
    """For each access the tokens used more recently than the run (-1: never used before).

    The accesses of one request are judged on the state before it and then renewed back to front, so that the front of
    a prompt is always more recent than what follows it. A Fenwick tree over access times holds the tokens.
    """
    total = len(runs)
    tree = np.zeros(total + 1, dtype=np.int64)
    last = np.full(len(tokens), -1, dtype=np.int64)
    distance = np.full(total, -1, dtype=np.int64)
    held = 0
    at = 0
    clock = 0
    for length in lengths:
        for k in range(at, at + length):
            stamp = last[runs[k]]
            if stamp >= 0:
                below = 0
                i = stamp + 1
                while i > 0:
                    below += tree[i]
                    i -= i & -i
                distance[k] = held - below
        for k in range(at + length - 1, at - 1, -1):
            run = runs[k]
            weight = tokens[run]
            if last[run] >= 0:
                i = last[run] + 1
                while i <= total:
                    tree[i] -= weight
                    i += i & -i
                held -= weight
            last[run] = clock
            i = clock + 1
            while i <= total:
                tree[i] += weight
                i += i & -i
            held += weight
            clock += 1
        at += length
    return distance
