"""Identities and uniform numbers from integers: the same on every machine, in any order of asking."""

from __future__ import annotations

import math

import numpy as np

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """A 63-bit identity of a tuple of integers (SplitMix64's finaliser, chained; positive, so it fits int64)."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def uniform(*parts: int) -> float:
    """A number in (0, 1) that belongs to a tuple of integers."""
    return ((mix(*parts) >> 10) + 0.5) / (1 << 53)


class Uniforms:
    """A stream of numbers in [0, 1) that belongs to a tuple of integers.

    Philox is counter-based and specified bit by bit, and its raw bits are turned into numbers here: another version of
    numpy may draw its own distributions anew, but cannot change these.
    """

    def __init__(self, *parts: int) -> None:
        self._bits = np.random.Philox(key=[mix(*parts), mix(*parts, 1)])

    def draw(self, *shape: int) -> np.ndarray:
        """The next numbers, as an array of this shape."""
        raw = self._bits.random_raw(math.prod(shape))
        return ((raw >> np.uint64(11)) * 2.0**-53).reshape(shape)


def generator(*parts: int) -> np.random.Generator:
    """A random generator that belongs to a tuple of integers (Philox: counter-based, equal on every platform)."""
    return np.random.Generator(np.random.Philox(key=[mix(*parts), mix(*parts, 1)]))
