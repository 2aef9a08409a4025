"""The script that a plan means, and the text it needs: personas with a corpus, or fixed turns without either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from spoc_lib.load.plan import FixedTurns, LoadPlan
from spoc_lib.workload.script import ConversationScript, Segment, Turn


class History(Protocol):
    """A user's conversation as messages (`workload.messages.Conversation`)."""

    history_tokens: int

    def apply(self, turn: Turn) -> list[dict[str, Any]]: ...

    def add_reply(self, text: str, tokens: int | None = None) -> None: ...

    def drop_last(self) -> None: ...


def script_of(plan: LoadPlan) -> ConversationScript:
    """The ConversationScript of `plan`."""
    if plan.fixed is not None:
        return FixedScript(plan.fixed, plan.seed, plan.salt)
    from spoc_lib.workload import build_script
    from spoc_lib.workload.personas import load_personas

    return build_script(load_personas(plan.personas), plan.seed, salt=plan.salt, gap_cap_s=plan.gap_cap_s,
                        start=plan.start, context_limit=plan.context_limit, scale=plan.scale)


class Histories:
    """Makes the empty history of each user; the corpus is read once and shared."""

    def __init__(self, plan: LoadPlan) -> None:
        self._corpus = None
        if plan.fixed is None:
            from spoc_lib.workload.corpus import Corpus

            self._corpus = Corpus.from_directory(plan.corpus)

    def new(self) -> History:
        if self._corpus is None:
            return FixedHistory()
        from spoc_lib.workload.messages import Conversation

        return Conversation(self._corpus)


def fixed_stream(salt: int, user: int, number: int) -> int:
    """Identity of the text of a fixed user's request; its 16 hexadecimal digits open the text."""
    return ((salt * 1_000_003 + user) * 1_000_003 + number) & (1 << 62) - 1


class FixedUser:
    """Endless single-turn conversations of one size."""

    persona = "fixed"

    def __init__(self, turns: FixedTurns, user: int, salt: int) -> None:
        self._turns, self.user, self._salt, self._count = turns, user, salt, 0

    def next(self, history_tokens: int) -> Turn:
        number, turns = self._count, self._turns
        self._count += 1
        stream = fixed_stream(self._salt, self.user, number)
        return Turn(persona=self.persona, user=self.user, conversation=number, turn=0, kind="start", starts=True,
                    append=(Segment(stream, turns.prompt_tokens, "turn"),), prompt_tokens=turns.prompt_tokens,
                    output_tokens=turns.output_tokens, think_time_s=turns.think_time_s)


class FixedScript:
    """`FixedTurns` as a ConversationScript."""

    def __init__(self, turns: FixedTurns, seed: int, salt: int) -> None:
        self.turns, self.seed, self.salt = turns, seed, salt

    def user(self, number: int) -> FixedUser:
        return FixedUser(self.turns, number, self.salt)

    def users(self, count: int) -> Iterator[FixedUser]:
        return (self.user(number) for number in range(count))


class FixedHistory:
    """Single messages of about the asked size: four characters a token, unlike for each stream."""

    history_tokens = 0

    def apply(self, turn: Turn) -> list[dict[str, Any]]:
        segment = turn.append[0]
        text = f"{segment.stream:016x}".ljust(4 * segment.tokens, "x")
        self.history_tokens = segment.tokens
        return [{"role": "user", "content": text}]

    def add_reply(self, text: str, tokens: int | None = None) -> None:
        self.history_tokens += tokens or 0

    def drop_last(self) -> None:
        self.history_tokens = 0
