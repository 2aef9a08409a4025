"""Chains of token content: which prompts begin alike, by identity of their pieces.

A context (everything until the history is emptied) is one chain; where its first blocks equal those of an older
context it hangs below that one. What a request generates is a chain of its own below its context, unless the script's
template puts the reply exactly where it was generated.

Equal content gets equal chains as long as whatever makes a context differ stands in its first prompt, which holds for
scripts: a user's own segments are streams of their own.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from spoc_lib.engine.fast.state import C_COLUMNS, C_LISTS, C_PARENT, C_START, NONE
from spoc_lib.engine.scheduling.content import Piece

ROOT = 0
#: Chains from the root to a leaf; a context adds one, and so does each turn whose reply is resent in place.
MAX_DEPTH = 4096


class Chains:
    """The tree of chains; `table` is the compiled core's array (it may be replaced by a longer one)."""

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block = block_size
        self.table = np.full((capacity, C_COLUMNS), NONE, dtype=np.int32)
        self.count = 1
        self.table[ROOT] = 0
        self._depth = [0]
        self._children: dict[tuple, int] = {}
        self._content: dict[int, _Content] = {ROOT: _Content()}

    def below(self, parent: int, start: int) -> int:
        """A new chain whose own blocks begin at `start`."""
        if self.count == len(self.table):
            longer = np.full((2 * self.count, C_COLUMNS), NONE, dtype=np.int32)
            longer[: self.count] = self.table
            self.table = longer
        self._depth.append(self._depth[parent] + 1)
        if self._depth[-1] > MAX_DEPTH:
            raise ValueError(f"a context of more than {MAX_DEPTH} turns without a chat template")
        chain = self.count
        self.count += 1
        row = self.table[chain]
        row[C_PARENT], row[C_START] = parent, start
        row[C_LISTS + 2] = row[C_LISTS + 5] = 0
        return chain

    def open(self, pieces: list[Piece]) -> int:
        """The chain of a context that begins with `pieces`."""
        content = _Content()
        content.extend(pieces)
        blocks = content.tokens // self._block
        node, at = ROOT, 0
        while at < blocks:
            key = (node, at, content.block(at, self._block))
            child = self._children.get(key)
            if child is None:
                chain = self._children[key] = self.below(node, at)
                self._content[chain] = content
                return chain
            at = min(blocks, self._content[child].common(content) // self._block)
            node = child
        chain = self.below(node, at)
        self._content[chain] = content
        return chain

    def extend(self, chain: int, pieces: list[Piece]) -> None:
        """The context of `chain` grows."""
        self._content[chain].extend(pieces)

    def adopt(self, chain: int, leaf: int) -> int:
        """The context of `chain` goes on in `leaf`, the chain of its last reply. What others share with it lies in
        its first prompt, so they still find it under `chain`."""
        self._content[leaf] = self._content[chain]
        return leaf

    def reply(self, chain: int, prompt_tokens: int) -> int:
        """The chain of what is generated behind a prompt."""
        return self.below(chain, prompt_tokens // self._block)


class _Content:
    """Pieces from a context's first token on."""

    __slots__ = ("ends", "pieces", "tokens")

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.ends: list[int] = []
        self.tokens = 0

    def extend(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            if piece.tokens:
                self.pieces.append(piece)
                self.tokens += piece.tokens
                self.ends.append(self.tokens)

    def block(self, index: int, size: int) -> tuple:
        """Identity of block `index`: its runs, merged where they continue."""
        at, end = index * size, (index + 1) * size
        runs: list[tuple[int, int, int]] = []
        number = bisect_right(self.ends, at)
        while at < end:
            piece = self.pieces[number]
            begins = self.ends[number] - piece.tokens
            until = min(end, self.ends[number])
            start = piece.start + at - begins
            if runs and runs[-1][0] == piece.stream and runs[-1][1] + runs[-1][2] == start:
                runs[-1] = (piece.stream, runs[-1][1], runs[-1][2] + until - at)
            else:
                runs.append((piece.stream, start, until - at))
            at = until
            number += 1
        return tuple(runs)

    def common(self, other: _Content) -> int:
        """Tokens that both begin with."""
        mine, theirs = _Cursor(self.pieces), _Cursor(other.pieces)
        total = 0
        while mine.left and theirs.left:
            if mine.stream != theirs.stream or mine.start != theirs.start:
                break
            step = min(mine.left, theirs.left)
            total += step
            mine.advance(step)
            theirs.advance(step)
        return total


class _Cursor:
    __slots__ = ("_number", "_pieces", "left", "start", "stream")

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces, self._number, self.left = pieces, -1, 0
        self.stream = self.start = 0
        self._next()

    def _next(self) -> None:
        self._number += 1
        if self._number < len(self._pieces):
            self.stream, self.start, self.left = self._pieces[self._number]

    def advance(self, tokens: int) -> None:
        self.start += tokens
        self.left -= tokens
        if not self.left:
            self._next()
