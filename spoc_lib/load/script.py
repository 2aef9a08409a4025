"""The script that a plan means, and the text it needs: personas with a corpus, or fixed turns without either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from spoc_lib.core.errors import InputError
from spoc_lib.load.plan import FixedTurns, LoadPlan
from spoc_lib.workload.script import ConversationScript, Segment, Turn
from spoc_lib.workload.template import TEMPLATE_OVERHEAD, Overhead

if TYPE_CHECKING:
    from spoc_lib.workload.build import Script
    from spoc_lib.workload.traces.imported import ImportedScript


class History(Protocol):
    """A user's conversation as messages (`workload.messages.Conversation`)."""

    @property
    def history_tokens(self) -> int:
        """Tokens of the content so far, replies included, template not."""
        ...

    @property
    def echo(self) -> str:
        """What of an answer goes back into the history (`PersonaSet.echo`)."""
        ...

    def apply(self, turn: Turn) -> list[dict[str, Any]]:
        """Append a turn; the messages to send."""
        ...

    def add_reply(self, text: str, tokens: int | None = None, reasoning: str | None = None) -> None:
        """Append the server's answer."""
        ...

    def drop_last(self) -> None:
        """Take back the last turn, which got no answer."""
        ...


@dataclass(frozen=True)
class Material:
    """What the users of a plan play: their script, and the empty history that each begins with.

    overhead: what the server's chat template adds to a prompt, in tokens.
    """

    script: ConversationScript
    new_history: Callable[[], History]
    overhead: Overhead = TEMPLATE_OVERHEAD


def material(plan: LoadPlan) -> Material:
    """The script and the text of `plan`; the corpus is read once and shared by all histories.

    Recorded sessions bring their own text where the recording has text. InputError when the plan wants the target's
    tokens of a server without `/tokenize`, or of a recording, whose lengths are stated in its own tokens.
    """
    if plan.fixed is not None:
        return Material(FixedScript(plan.fixed, plan.seed, plan.salt), FixedHistory)
    from spoc_lib.workload.build import build_script
    from spoc_lib.workload.corpus import Corpus
    from spoc_lib.workload.messages import Conversation
    from spoc_lib.workload.personas import RecordedSet, load_personas
    from spoc_lib.workload.target import measure_target
    from spoc_lib.workload.traces.imported import ImportedScript

    personas = load_personas(plan.personas)
    overhead, limit = TEMPLATE_OVERHEAD, plan.context_limit
    if plan.tokenizer == "target":
        if isinstance(personas, RecordedSet):
            raise InputError("recorded-sizes", "recorded sessions keep the sizes that they were recorded with: play "
                             "them with tokenizer 'offline'")
        target = measure_target(plan.base_url, plan.model, plan.corpus, access=plan)
        corpus, overhead, limit = target.corpus, target.overhead, limit or target.context_limit
    else:
        corpus = Corpus.from_directory(plan.corpus)
    script = build_script(personas, plan.seed, salt=plan.salt, gap_cap_s=plan.gap_cap_s, start=plan.start,
                          context_limit=limit, scale=plan.scale, overhead=overhead)
    # recorded texts are asked for in the same words as a corpus
    texts = cast(Corpus, script.texts(corpus)) if isinstance(script, ImportedScript) else corpus
    return Material(_opened(script, plan), partial(Conversation, texts, personas.echo), overhead)


def arriving(personas: str, rate_per_s: float | None, cv: float, duration_s: float, seed: int) -> int:
    """How many users a plan with these arrivals needs."""
    from spoc_lib.workload.arrivals import arrival_times, kind_of
    from spoc_lib.workload.personas import RecordedSet, load_personas

    if rate_per_s is not None:
        return max(1, len(arrival_times(rate_per_s, duration_s, seed, kind=kind_of(cv), cv=cv)))
    recorded = load_personas(personas)
    return recorded.recorded.sessions if isinstance(recorded, RecordedSet) else 1


def _opened(script: Script | ImportedScript, plan: LoadPlan) -> ConversationScript:
    """The script with the plan's arrivals; InputError when there are more of them than users."""
    if plan.arrivals is None:
        return script
    from spoc_lib.workload.arrivals import kind_of, open_script, replayed

    if plan.arrivals.rate_per_s is None:
        return replayed(script)
    cv = plan.arrivals.cv
    opened = open_script(script, plan.arrivals.rate_per_s, plan.duration_s, kind=kind_of(cv), cv=cv)
    if len(opened.times_s) > plan.users:
        raise InputError("too-few-users", f"users must be at least {len(opened.times_s)}: so many conversations arrive "
                         f"in {plan.duration_s:g} s")
    return opened


def fixed_stream(salt: int, user: int, number: int) -> int:
    """Identity of the text of a fixed user's request; its 16 hexadecimal digits open the text."""
    return ((salt * 1_000_003 + user) * 1_000_003 + number) & (1 << 62) - 1


class FixedUser:
    """Endless single-turn conversations of one size."""

    persona = "fixed"

    def __init__(self, turns: FixedTurns, user: int, salt: int) -> None:
        self._turns, self.user, self._salt, self._count = turns, user, salt, 0

    def next(self, history_tokens: int) -> Turn:
        """The next request, always of the same size."""
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
        """User `number`."""
        return FixedUser(self.turns, number, self.salt)

    def users(self, count: int) -> Iterator[FixedUser]:
        """The first `count` users."""
        return (self.user(number) for number in range(count))


class FixedHistory:
    """Single messages of about the asked size: four characters a token, unlike for each stream."""

    echo: Literal["content", "reasoning"] = "content"

    def __init__(self) -> None:
        self.history_tokens = 0

    def apply(self, turn: Turn) -> list[dict[str, Any]]:
        """The one message of the turn; nothing before it is sent again."""
        segment = turn.append[0]
        text = f"{segment.stream:016x}".ljust(4 * segment.tokens, "x")
        self.history_tokens = segment.tokens
        return [{"role": "user", "content": text}]

    def add_reply(self, text: str, tokens: int | None = None, reasoning: str | None = None) -> None:
        """Count the answer's tokens."""
        self.history_tokens += tokens or 0

    def drop_last(self) -> None:
        """Forget the turn."""
        self.history_tokens = 0
