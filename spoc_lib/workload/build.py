"""`build_script`: personas into a script that both drivers play (`script.ConversationScript`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.workload.identity import mix, uniform
from spoc_lib.workload.model import plan as plans
from spoc_lib.workload.model.geometry import Geometry, Ground
from spoc_lib.workload.model.persona import Persona, PersonaSet
from spoc_lib.workload.model.plan import MIN_SESSION_TOKENS, Plan
from spoc_lib.workload.personas import RecordedSet, load_personas
from spoc_lib.workload.script import Kind, Segment, Turn
from spoc_lib.workload.template import TEMPLATE_OVERHEAD, Overhead
from spoc_lib.workload.traces.imported import ImportedScript

#: Conversations among which a stationary start chooses by their length in time.
_CANDIDATES = 12
#: Users whose place in mid-conversation is kept, some 15 KB each: a search plays the same users again and again.
_KEPT_STARTS = 4096


def build_script(
    personas: PersonaSet | str,
    seed: int,
    *,
    salt: int = 0,
    gap_cap_s: float = 60.0,
    start: str = "stationary",
    context_limit: int | None = None,
    geometry: Geometry | dict[str, Any] | None = None,
    scale: float = 1.0,
    overhead: Overhead = TEMPLATE_OVERHEAD,
) -> Script | ImportedScript:
    """The script of a persona set, or of recorded sessions (`personas`: `traces:PATH`, see `personas.RecordedSet`).

    seed: sizes, times and choices; salt: identities only (the same conversations, foreign to any warm cache);
    gap_cap_s: longest think time, in seconds; it moves "how many users", so say it wherever users are counted;
    start: `stationary` puts each user in mid-conversation, with its history and the rest of its think time, as a long
        running crowd is found; `cold` starts every user with a new conversation;
    context_limit: the server's max_model_len, in tokens; it caps every persona's own limit;
    geometry: replaces the set's common ground; scale: multiplies all token sizes (and context limits);
    overhead: what the target's chat template adds.
    """
    personas = load_personas(personas) if isinstance(personas, str) else personas
    if isinstance(personas, RecordedSet):
        return personas.recorded.script(seed, salt=salt, gap_cap_s=gap_cap_s, context_limit=context_limit, start=start)
    if start not in ("stationary", "cold"):
        raise InputError("bad-start", f"start must be 'stationary' or 'cold', not '{start}'")
    if not gap_cap_s > 0:
        raise InputError("bad-gap-cap", f"gap_cap_s must be above 0 seconds, not {gap_cap_s:g}")
    if not scale > 0:
        raise InputError("bad-scale", f"scale must be above 0, not {scale:g}")
    if isinstance(geometry, dict):
        geometry = yamlfile.parse(Geometry, geometry, "geometry")
    script = Script(personas, geometry or personas.geometry, seed, salt, float(gap_cap_s), start, context_limit,
                    float(scale), overhead)
    for persona in personas.personas:
        smallest = overhead.tokens(2) + 2 * MIN_SESSION_TOKENS
        if script.limit(persona) < smallest:
            raise InputError("context-limit-too-small", f"context_limit of {script.limit(persona)} tokens leaves no "
                             f"room for a turn of persona {persona.name}: it must be at least {smallest}")
    return script


@dataclass(frozen=True)
class Script:
    """A `ConversationScript` from personas. Parameters as in `build_script`."""

    personas: PersonaSet
    geometry: Geometry
    seed: int
    salt: int
    gap_cap_s: float
    start: str
    context_limit: int | None
    scale: float
    overhead: Overhead

    _ground: Ground = field(init=False, repr=False, compare=False)
    _sequence: _Shares = field(init=False, repr=False, compare=False)
    _specs: list[_Spec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ground", Ground(self.geometry, self.seed, self.salt, self.scale))
        object.__setattr__(self, "_sequence", _Shares([p.share for p in self.personas.personas]))
        object.__setattr__(self, "_specs", [_Spec(p.model_dump_json(), p) for p in self.personas.personas])

    #: To worker processes go the parameters; the tree of common ground is grown again there.
    def __reduce__(self) -> tuple[type[Script], tuple[Any, ...]]:
        return Script, tuple(getattr(self, one.name) for one in fields(self) if one.init)

    def user(self, number: int) -> User:
        """User `number` (see `script.ConversationScript`)."""
        return User(self, self._ground, self._specs[self._sequence[number]], number)

    def users(self, count: int) -> Iterator[User]:
        """The first `count` users."""
        return (self.user(number) for number in range(count))

    def limit(self, persona: Persona) -> int:
        """Context limit of a persona on this server, prompt and output together, in tokens."""
        own = round(persona.context_limit_tokens * self.scale)
        return own if self.context_limit is None else min(own, self.context_limit)

    def with_gap_cap(self, gap_cap_s: float) -> Script:
        """The same sessions with another cap on think time."""
        return replace(self, gap_cap_s=gap_cap_s)

    def from_the_beginning(self) -> Script:
        """The same script, every user starting cold."""
        return replace(self, start="cold")

    def describe(self) -> dict[str, Any]:
        """The parameters that decide what the script is, for provenance."""
        return {"personas": self.personas.name, "seed": self.seed, "salt": self.salt, "gap_cap_s": self.gap_cap_s,
                "start": self.start, "context_limit": self.context_limit, "scale": self.scale,
                "echo": self.personas.echo}


@dataclass(frozen=True, slots=True)
class _Spec:
    """A persona that is compared by its text."""

    text: str
    persona: Persona = field(compare=False)


class _Shares:
    """A low-discrepancy sequence of persona indices: each next one is furthest behind its share."""

    def __init__(self, shares: list[float]) -> None:
        self._shares = shares
        self._counts = [0] * len(shares)
        self._order: list[int] = []

    def __getitem__(self, number: int) -> int:
        while len(self._order) <= number:
            n = len(self._order) + 1
            behind = [round(share * n - count, 9)
                      for share, count in zip(self._shares, self._counts, strict=True)]
            chosen = behind.index(max(behind))
            self._counts[chosen] += 1
            self._order.append(chosen)
        return self._order[number]


class User:
    """The turns of one user, without end (`script.UserScript`).

    context_limit_hits: how often a turn would have passed the context limit; compactions: how often the history was
    compacted for it.
    """

    def __init__(self, script: Script, ground: Ground, spec: _Spec, number: int) -> None:
        persona = spec.persona
        self.persona, self.user = persona.name, number
        self.context_limit_hits = self.compactions = 0
        self._script, self._ground, self._spec = script, ground, spec
        self._limit = script.limit(persona)
        self._depth = ground.depth(number, persona.depth.weights if persona.depth else None)
        self._conversation = -1
        self._plan: Plan
        self._turn = 0
        self._base = 0
        self._messages = 0

    def next(self, history_tokens: int) -> Turn:
        """The next turn. `history_tokens`: content of the history now, replies included, template excluded."""
        if self._conversation < 0 and self._script.start == "stationary":
            return self._stationary()
        if self._conversation < 0 or self._turn >= self._plan.turns:
            return self._new_conversation()
        plan, turn = self._plan, self._turn
        append, output = plan.append_tokens[turn], plan.output_tokens[turn]
        prompt = history_tokens + append + self._script.overhead.tokens(self._messages + 2)
        if prompt + output > self._limit:
            self.context_limit_hits += 1
            if plan.gives_up[turn]:
                return self._new_conversation()
            self.compactions += 1
            return self._restart(turn, min(plan.compact_tokens[turn], self._limit - output), self._kind(turn))
        if plan.pullback[turn]:
            return self._restart(turn, min(plan.compact_tokens[turn], prompt), self._kind(turn))
        if plan.rewrite[turn]:
            return self._restart(turn, prompt - self._script.overhead.tokens(self._messages)
                                 + self._script.overhead.tokens(0), self._kind(turn))
        self._turn += 1
        self._messages += 2
        segment = Segment(self._stream(turn), append, "turn")
        return Turn(self.persona, self.user, self._conversation, turn, self._kind(turn), False, (segment,), prompt,
                    output, plan.gap_s[turn])

    def _kind(self, turn: int) -> Kind:
        return "start" if turn == 0 else "human" if self._plan.human[turn] else "agent"

    def _stream(self, turn: int, what: int = 0) -> int:
        return mix(self._script.seed, self._script.salt, 31, self.user, self._conversation, turn, what)

    def _new_plan(self, conversation: int) -> Plan:
        script = self._script
        return plans.draw(self._spec.persona, script.seed, self.user, conversation, limit=self._limit,
                          gap_cap_s=script.gap_cap_s, scale=script.scale)

    def _new_conversation(self) -> Turn:
        self._conversation += 1
        self._plan = self._new_plan(self._conversation)
        return self._restart(0, self._plan.start_tokens, "start")

    def _restart(self, turn: int, prompt_tokens: int, kind: Kind) -> Turn:
        """A turn that begins a context: a new conversation, a rewritten or a compacted history."""
        plan = self._plan
        append = self._opening(turn, prompt_tokens)
        self._turn, self._base = turn + 1, turn
        prompt = sum(segment.tokens for segment in append) + self._script.overhead.tokens(self._messages)
        return Turn(self.persona, self.user, self._conversation, turn, kind, True, append, prompt,
                    min(plan.output_tokens[turn], self._limit - prompt), plan.gap_s[turn])

    def _opening(self, turn: int, prompt_tokens: int) -> tuple[Segment, ...]:
        """Common ground and the user's own part of a prompt of `prompt_tokens`, template included."""
        overhead = self._script.overhead
        content = max(MIN_SESSION_TOKENS, prompt_tokens - overhead.tokens(2))
        shared = self._ground.shared(self.user, self._conversation, self._depth, content)
        self._messages = 2 if shared else 1
        own = max(MIN_SESSION_TOKENS, prompt_tokens - overhead.tokens(self._messages) - sum(s.tokens for s in shared))
        return (*shared, Segment(self._stream(turn, 1), own, "session"))

    def _stationary(self) -> Turn:
        """The first turn of a user found in mid-conversation."""
        script = self._script
        self._plan, standing, left_s = _found(self._spec, script.seed, self.user, self._limit, script.gap_cap_s,
                                              script.scale)
        self._conversation = 0
        return self._resume(standing, left_s)

    def _resume(self, standing: plans.Standing, left_s: float) -> Turn:
        plan, turn, base = self._plan, standing.turn, standing.base
        opening = self._opening(base, standing.base_tokens)
        if turn == base:
            history: list[tuple[Segment, int]] = []
            append = opening
        else:
            history = [(segment, 0) for segment in opening[:-1]] + [(opening[-1], plan.output_tokens[base])]
            history += [(Segment(self._stream(k), plan.append_tokens[k], "turn"), plan.output_tokens[k])
                        for k in range(base + 1, turn)]
            append = (Segment(self._stream(turn), plan.append_tokens[turn], "turn"),)
            self._messages += 2 * (turn - base)
        held = sum(segment.tokens + reply for segment, reply in history) + sum(s.tokens for s in append)
        prompt = held + self._script.overhead.tokens(self._messages)
        self._turn, self._base = turn + 1, base
        output = max(1, min(plan.output_tokens[turn], self._limit - prompt))
        return Turn(self.persona, self.user, self._conversation, turn, self._kind(turn), True, append, prompt, output,
                    left_s, tuple(history))


@lru_cache(maxsize=_KEPT_STARTS)
def _found(spec: _Spec, seed: int, user: int, limit: int, gap_cap_s: float,
           scale: float) -> tuple[Plan, plans.Standing, float]:
    """Where an instant finds a user: the conversation's plan, the turn that comes next, the think time left in seconds.

    An instant falls into a gap with a chance that grows with its length, so a conversation is chosen by its total think
    time, a turn by its gap, and the think time that is left is a uniform part of that gap.
    """
    candidates = [plans.draw(spec.persona, seed, user, -1 - k, limit=limit, gap_cap_s=gap_cap_s, scale=scale)
                  for k in range(_CANDIDATES)]
    walks = [plans.walk(plan, limit) for plan in candidates]
    spans = [sum(plan.gap_s[: len(walk)]) or 1e-9 * len(walk) for plan, walk in zip(candidates, walks, strict=True)]
    chosen = _pick(spans, uniform(seed, 32, user))
    plan, walk = candidates[chosen], walks[chosen]
    turn = _pick(plan.gap_s[: len(walk)], uniform(seed, 33, user))
    return plan, walk[turn], round(plan.gap_s[turn] * uniform(seed, 34, user), 6)


def _pick(weights: list[float], u: float) -> int:
    """Index chosen with chances proportional to `weights`, by one uniform number."""
    left = u * sum(weights)
    for index, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return index
    return len(weights) - 1
