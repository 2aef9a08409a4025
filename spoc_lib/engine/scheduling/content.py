"""What a request's tokens *are*, as far as the prefix cache can tell: a chain of block keys.

Two blocks have equal keys if and only if their tokens and everything before them are equal, which is what vLLM's
block hash means: f(parent hash, the block's tokens). Real requests carry token ids (`TokenContent`); on the virtual
clock a token is only (stream, index) (`SymbolicContent`), so a 128k-token prompt costs no tokens at all.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

_DIGEST_BYTES = 16


class Content(Protocol):
    """The tokens of one request, prompt and output."""

    def key(self, index: int) -> bytes:
        """Key of the full block `index` (0 = first). The block must be full."""
        ...

    def append(self, token: int) -> None:
        """One more output token."""
        ...


def _chained(parent: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=parent).digest()


class TokenContent:
    """Token ids, hashed block by block, lazily and once."""

    def __init__(self, tokens: Iterable[int], block_size: int) -> None:
        self.tokens = array("q", tokens)
        self._block_size = block_size
        self._keys: list[bytes] = []

    def key(self, index: int) -> bytes:
        """Key of full block `index`, chained to those before it; IndexError where it is not full."""
        keys, size = self._keys, self._block_size
        while len(keys) <= index:
            start = len(keys) * size
            block = self.tokens[start:start + size]
            if len(block) < size:
                raise IndexError(f"block {len(keys)} is not full")
            keys.append(_chained(keys[-1] if keys else b"", block.tobytes()))
        return keys[index]

    def append(self, token: int) -> None:
        """One more token."""
        self.tokens.append(token)


class Piece(NamedTuple):
    """`tokens` tokens of the stream `stream`, from its token `start` on."""

    stream: int
    start: int
    tokens: int


class SymbolicContent:
    """Pieces of streams in order; the whole future output may already stand at its end.

    A driver that plays a conversation may keep one object and `extend` it turn by turn: keys once computed stay.
    """

    def __init__(self, pieces: Sequence[Piece], block_size: int) -> None:
        self._block_size = block_size
        self._pieces: list[Piece] = []
        self._keys: list[bytes] = []
        self._piece = 0  # the piece that the next key starts in, and how much of it is used
        self._used = 0
        self.extend(pieces)

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Add pieces at the end."""
        self._pieces.extend(piece for piece in pieces if piece.tokens > 0)

    def fork(self) -> SymbolicContent:
        """A copy that grows on its own."""
        other = SymbolicContent((), self._block_size)
        other._pieces, other._keys = list(self._pieces), list(self._keys)
        other._piece, other._used = self._piece, self._used
        return other

    def key(self, index: int) -> bytes:
        """Key of full block `index`, chained to those before it."""
        while len(self._keys) <= index:
            parent = self._keys[-1] if self._keys else b""
            self._keys.append(_chained(parent, self._next_block()))
        return self._keys[index]

    def append(self, token: int) -> None:
        """The output is already part of the pieces."""

    def _next_block(self) -> bytes:
        """The next block's identity: its runs, each (stream, start, tokens), merged where they continue."""
        runs = array("q")
        missing = self._block_size
        while missing:
            if self._piece >= len(self._pieces):
                raise IndexError(f"block {len(self._keys)} is not full")
            piece = self._pieces[self._piece]
            taken = min(missing, piece.tokens - self._used)
            start = piece.start + self._used
            if runs and runs[-3] == piece.stream and runs[-2] + runs[-1] == start:
                runs[-1] += taken
            else:
                runs.extend((piece.stream, start, taken))
            missing -= taken
            self._used += taken
            if self._used == piece.tokens:
                self._piece, self._used = self._piece + 1, 0
        return runs.tobytes()
