"""The script that both drivers play: what a user appends to the history, how much it asks for, how long it thinks.

A script is pure and seeded: the same personas, corpus, seed and user number give the same turns on every machine.
It knows content by *identity* (stream and token count), never by text, so that the virtual clock plays millions of
tokens without touching one; `corpus.Corpus.text(segment)` gives the text of a segment for a real server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Layer = Literal["organisation", "repository", "directory", "files", "session", "turn"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
#: The levels that several users can share, from the root down.
SHARED_LAYERS = LAYERS[:4]
Kind = Literal["start", "agent", "human"]

#: Think time of a turn that is never due: the user is done (open arrivals, replay by timestamp).
NEVER_S = 1e9


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt text with an identity.

    stream: 64-bit identity of the text, shared by all users who share it; two segments carry the same tokens if
        and only if `stream` and `tokens` are equal, and of two lengths of one stream the shorter is a prefix;
    tokens: its exact length in the script's tokenizer;
    layer: which level of the Partial Common Ground it belongs to (`turn`: what a single turn adds).
    """

    stream: int
    tokens: int
    layer: Layer


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of one user.

    starts: the history is emptied first (a new conversation);
    append: segments added to the history before sending (the reply is added after it, by the driver);
    prompt_tokens: intended length of the whole prompt: history with the replies as they really came, plus `append`
        plus `overhead_tokens` of the chat template;
    output_tokens: budget, sent as max_tokens with ignore_eos;
    think_time_s: pause between the end of the previous reply and the sending of this turn;
    history: only with `starts` in mid-conversation (stationary start): (segment, reply_tokens) pairs of the turns
        that lie before this one, oldest first; the driver puts them into the history as if they had happened.
        reply_tokens 0: no reply follows, the next segment continues the same message.

    Segments of the shared layers (organisation to files) open the system message, the rest is a user message; a
    message costs `template.MESSAGE_TOKENS` and a prompt `template.PROMPT_TOKENS` beyond its content.
    """

    persona: str
    user: int
    conversation: int
    turn: int
    kind: Kind
    starts: bool
    append: tuple[Segment, ...]
    prompt_tokens: int
    output_tokens: int
    think_time_s: float
    history: tuple[tuple[Segment, int], ...] = ()


class UserScript(Protocol):
    """The turns of one user, without end. The driver reports how the history really grew."""

    persona: str
    user: int

    def next(self, history_tokens: int) -> Turn:
        """The next turn, given the tokens that the history holds now: segments and replies, without the template.

        When the turn would pass the persona's context limit, the conversation ends (or compacts) and the
        returned turn has `starts` set; `context_limit_hits` counts it.
        """
        ...


class ConversationScript(Protocol):
    """All users of a workload. Built by `workload.build_script`."""

    @property
    def seed(self) -> int:
        """What all sizes, gaps and choices are drawn from."""
        ...

    @property
    def salt(self) -> int:
        """What the identities of all private text depend on besides: another salt, foreign text of the same sizes."""
        ...

    def user(self, number: int) -> UserScript:
        """User `number` (0, 1, …); its persona follows from the shares by a low-discrepancy sequence, so any
        number of first users has the mix as nearly as whole users can."""
        ...

    def users(self, count: int) -> Iterator[UserScript]:
        """The first `count` users."""
        ...


class AroundScript(ABC):
    """Base of a `ConversationScript` made from another, `script`: a subclass says who `user` is."""

    script: ConversationScript

    @property
    def seed(self) -> int:
        """The script's own."""
        return self.script.seed

    @property
    def salt(self) -> int:
        """The script's own."""
        return self.script.salt

    @property
    def gap_cap_s(self) -> float:
        """Longest think time, s: the script's own; 60 where it does not say."""
        return getattr(self.script, "gap_cap_s", 60.0)

    @abstractmethod
    def user(self, number: int) -> UserScript:
        """User `number`, made from the script's."""

    def users(self, count: int) -> Iterator[UserScript]:
        """The first `count` users."""
        return (self.user(number) for number in range(count))
