"""Sessions as other tools recorded them, in one form: sizes, times, and what each prompt keeps of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from spoc_lib.workload.script import Layer

Owner = tuple[int, int]
#: More than any context holds, and longer than any recording lasts: beyond these a record is broken.
MOST_TOKENS, MOST_S = 100_000_000, 1e8


@dataclass(frozen=True, slots=True)
class Message:
    """Text that a request appends, already counted. layer as in `script.Segment`."""

    text: str
    tokens: int
    layer: Layer


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded request.

    prompt_tokens, output_tokens: as the source states them (text formats: as the tokenizer counts them);
    kept_tokens: the longest prefix it shares with an earlier prompt, in whole blocks of the source;
    kept_from: which prompt that is, (session, request) as positions in the import; None: nothing is shared;
    own_tokens: the same, among prompts (and known replies) of its own session; None for a first request;
    gap_s: pause since the end of the previous reply, None where unknown; service_s: how long the server took;
    human: a human asked (else a tool's result came back); time_s: when it was sent, from the start of the trace;
    messages: what it appends, where the source has text.
    """

    prompt_tokens: int
    output_tokens: int
    kept_tokens: int
    kept_from: Owner | None
    own_tokens: int | None
    gap_s: float | None
    human: bool
    time_s: float | None = None
    service_s: float | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Session:
    """A conversation in the order of its requests. `root_tokens`: tools and system prompt, where stated; `parent`: the
    session whose sub-agent this is."""

    name: str
    format: str
    requests: tuple[Request, ...]
    root_tokens: tuple[int, ...] = ()
    parent: str | None = None


class Reject(ValueError):
    """A record that cannot be used; the text says why. It is skipped and counted, it never ends an import."""


@dataclass
class PrefixIndex:
    """Which prompt held a block at its place before. Block ids identify a block with all that stands before it."""

    _at: dict[int, tuple[int, Owner]] = field(default_factory=dict)

    def longest(self, ids: list[int]) -> tuple[int, Owner | None]:
        """(blocks shared from the start with earlier prompts, the prompt that last held the deepest of them)."""
        owner = None
        for place, block in enumerate(ids):
            seen = self._at.get(block)
            if seen is None or seen[0] != place:
                return place, owner
            owner = seen[1]
        return len(ids), owner

    def add(self, ids: list[int], owner: Owner, known: int = 0) -> None:
        """Enter a prompt; its first `known` blocks are in the index already."""
        for place in range(known, len(ids)):
            self._at[ids[place]] = (place, owner)


def shared_blocks(one: list[int], other: list[int]) -> int:
    """Blocks that two prompts have in common from their start."""
    shortest = min(len(one), len(other))
    if one[:shortest] == other[:shortest]:
        return shortest
    low, high = 0, shortest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low + (one[low] == other[low]) if low < shortest else low
