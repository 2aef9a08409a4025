"""Partial Common Ground: which parts of their prompts users share, as a tree.

organisation root -> repository -> directory -> file set -> session. The shared parts come first in a prompt and in
this order, because a prefix cache can only reuse what stands before the first difference. A user takes the levels
down to its own depth; the rest of its first prompt is its own (`session`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from spoc_lib.core.yamlfile import Strict
from spoc_lib.workload.identity import mix, uniform
from spoc_lib.workload.model.distributions import Distribution
from spoc_lib.workload.script import SHARED_LAYERS, Segment
from spoc_lib.workload.template import MESSAGE_LEAD_TOKENS

Share = Annotated[float, Field(ge=0, le=1)]


class Level(Strict):
    """A level of the tree: `count` children under each parent, chosen by Zipf's law with exponent `zipf` (0: evenly),
    each with its own size."""

    count: Annotated[int, Field(ge=1)]
    zipf: Annotated[float, Field(ge=0)] = 1.0
    tokens: Distribution


class Depth(Strict):
    """How deep users share: the share of users whose common ground ends at each level. Sums to 1."""

    organisation: Share = 0
    repository: Share = 0
    directory: Share = 0
    files: Share = 0

    @model_validator(mode="after")
    def _whole(self) -> Depth:
        total = sum(self.weights)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of depth sum to {total:g}: they must sum to 1")
        return self

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares from the root down."""
        return self.organisation, self.repository, self.directory, self.files


class Geometry(Strict):
    """The tree of common ground.

    max_shared_ratio: at most this part of a first prompt is shared; what exceeds it is cut off at its end, deepest
        level first (a cut text is a prefix of the whole one, so it is still shared up to the cut);
    align_tokens: null, or a block size: shared levels then end on block edges of the prompt, template included.
    """

    organisation_tokens: Distribution
    repositories: Level
    directories: Level
    files: Level
    depth: Depth
    max_shared_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.8
    align_tokens: Annotated[int, Field(ge=1)] | None = None

    def levels(self) -> tuple[Level, Level, Level]:
        """The levels below the root, from the top down."""
        return self.repositories, self.directories, self.files


class Ground:
    """The tree under one seed: sizes and choices depend on `seed`, identities also on `salt`."""

    def __init__(self, geometry: Geometry, seed: int, salt: int, scale: float = 1.0) -> None:
        self.geometry = geometry
        self._seed, self._salt, self._scale = seed, salt, scale
        self._cumulative = [np.cumsum(_zipf(level.count, level.zipf)) for level in geometry.levels()]
        self._depths = np.cumsum(geometry.depth.weights)
        self._node = lru_cache(maxsize=None)(self._new_node)

    def depth(self, user: int, weights: tuple[float, ...] | None = None) -> int:
        """Levels that user `user` shares: 1 (the organisation only) to 4 (down to a file set)."""
        edges = self._depths if weights is None else np.cumsum(weights)
        return min(int(np.searchsorted(edges, uniform(self._seed, 11, user), side="right")), 3) + 1

    def path(self, user: int, conversation: int) -> tuple[int, int, int]:
        """(repository, directory, file set) of a conversation. A user keeps its repository."""
        draws = (uniform(self._seed, 12, user), uniform(self._seed, 13, user, conversation),
                 uniform(self._seed, 14, user, conversation))
        repository, directory, files = (min(int(np.searchsorted(edges, u, side="right")), len(edges) - 1)
                                        for edges, u in zip(self._cumulative, draws, strict=True))
        return repository, directory, files

    def shared(self, user: int, conversation: int, depth: int, prompt_tokens: int) -> tuple[Segment, ...]:
        """Shared segments that open a conversation whose first prompt holds `prompt_tokens`, outermost first."""
        room = int(prompt_tokens * self.geometry.max_shared_ratio)
        path = self.path(user, conversation)
        segments = []
        used = 0
        for level in range(depth):
            stream, size = self._node(level, path[:level])
            size = self._aligned(used, min(size, room - used))
            if size <= 0:
                break
            segments.append(Segment(stream, size, SHARED_LAYERS[level]))
            used += size
        return tuple(segments)

    def _aligned(self, used: int, size: int) -> int:
        block = self.geometry.align_tokens
        if block is None:
            return size
        end = (MESSAGE_LEAD_TOKENS + used + size) // block * block
        return end - MESSAGE_LEAD_TOKENS - used

    def _new_node(self, level: int, path: tuple[int, ...]) -> tuple[int, int]:
        """(stream, tokens) of a node of the tree; `path` names it below the root."""
        sizes = self.geometry.organisation_tokens if level == 0 else self.geometry.levels()[level - 1].tokens
        tokens = float(sizes.ppf(uniform(self._seed, 15, level, *path)))
        return mix(self._seed, self._salt, 16, level, *path), max(0, round(tokens * self._scale))


def _zipf(count: int, exponent: float) -> np.ndarray:
    weights = np.arange(1, count + 1, dtype=float) ** -exponent
    return weights / weights.sum()
