"""What a persona file may hold (`data/personas/*.yaml`): shares, sizes, times and the common ground."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from spoc_lib.config import Slo
from spoc_lib.core.yamlfile import Strict
from spoc_lib.workload.model.distributions import Distribution
from spoc_lib.workload.model.geometry import Depth, Geometry, Share


class Persona(Strict):
    """A kind of user. Sizes in tokens, times in seconds.

    share: part of all users; shares of a set sum to 1;
    prompt_start_tokens: the first prompt of a conversation, common ground included;
    growth_tokens: how much the prompt grows from one turn to the next: the previous reply and what is appended to it
        (a tool's result or the human's words);
    opening_growth_tokens: the same for the first `opening_turns` turns after the first, when files are loaded;
    growth_follows_output: rank correlation (Gaussian copula) between a turn's growth and the reply before it;
    end_prompt_tokens: the prompt that a conversation comes to, were its context never cut back; the growths of its
        turns, drawn as above, are scaled to it, for long conversations grow less a turn (None: turns grow independently
        of each other and of their number);
    end_follows_turns, end_follows_start: weights of the normal scores of the number of turns and of the first prompt
        in that of the end (Gaussian copula); turns_follow_start: rank correlation of turns and first prompt;
    output_tokens: output budget of a turn, asked for exactly;
    turns: turns a conversation; steps_per_human_turn: of these, requests from one human turn to the next;
    agent_gap_s, human_gap_s: think time before a turn that follows a tool, or a human's reading and typing;
    rewrite_share: turns that resend a changed history, so that only the common ground stays reusable;
    pullback_share: turns that cut the history back to `compact_to_tokens` of their own accord;
    context_limit_tokens: prompt and output together; at_context_limit: `end` the conversation and start a new one, or
        `compact` it to `compact_to_tokens` and go on (but for `end_share_at_limit` of them, whose users give up);
    depth: overrides the geometry's depth of sharing for this persona.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]
    title: str
    share: Annotated[float, Field(gt=0, le=1)]
    prompt_start_tokens: Distribution
    growth_tokens: Distribution
    opening_growth_tokens: Distribution | None = None
    opening_turns: Annotated[int, Field(ge=0)] = 0
    growth_follows_output: Annotated[float, Field(ge=0, lt=1)] = 0.0
    end_prompt_tokens: Distribution | None = None
    end_follows_turns: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    end_follows_start: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    turns_follow_start: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    output_tokens: Distribution
    turns: Distribution
    steps_per_human_turn: Distribution
    agent_gap_s: Distribution
    human_gap_s: Distribution
    rewrite_share: Share = 0.0
    pullback_share: Share = 0.0
    context_limit_tokens: Annotated[int, Field(gt=0)]
    at_context_limit: Literal["end", "compact"] = "end"
    compact_to_tokens: Distribution | None = None
    end_share_at_limit: Share = 0.0
    depth: Depth | None = None
    slos: list[Slo] = []

    @model_validator(mode="after")
    def _consistent(self) -> Persona:
        if (self.opening_turns > 0) != (self.opening_growth_tokens is not None):
            raise ValueError("'opening_turns' and 'opening_growth_tokens' go together: give both or neither")
        if self.end_prompt_tokens is None and (self.end_follows_turns or self.end_follows_start):
            raise ValueError("'end_follows_turns' and 'end_follows_start' need 'end_prompt_tokens'")
        if self.end_variance >= 1:
            raise ValueError("'end_follows_turns' and 'end_follows_start' are too strong together: their squares, with "
                             "'turns_follow_start' reckoned in, must sum to less than 1")
        if (self.at_context_limit == "compact" or self.pullback_share) and self.compact_to_tokens is None:
            raise ValueError("a persona that compacts or pulls back needs 'compact_to_tokens'")
        for field in ("prompt_start_tokens", "compact_to_tokens"):
            sizes = getattr(self, field)
            if sizes is not None and sizes.quantile(50) >= self.context_limit_tokens:
                raise ValueError(f"the median of '{field}' ({sizes.quantile(50):.0f}) is not below "
                                 f"context_limit_tokens ({self.context_limit_tokens}): lower it or raise the limit")
        return self

    @property
    def end_variance(self) -> float:
        """How much of the end's normal score follows from the number of turns and the first prompt, 0 to 1."""
        a, b = self.end_follows_turns, self.end_follows_start
        return a * a + b * b + 2 * a * b * self.turns_follow_start


class PersonaSet(Strict):
    """A workload's users. `echo`: what of a reply returns in the history: its content, or also its reasoning."""

    name: str
    title: str
    source: str
    echo: Literal["content", "reasoning"] = "content"
    personas: Annotated[list[Persona], Field(min_length=1)]
    geometry: Geometry

    @field_validator("personas")
    @classmethod
    def _whole(cls, personas: list[Persona]) -> list[Persona]:
        total = sum(persona.share for persona in personas)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"their shares sum to {total:g}: they must sum to 1")
        names = [persona.name for persona in personas]
        if len(set(names)) != len(names):
            raise ValueError(f"two have the same name: {', '.join(names)}")
        return personas

    @property
    def slos(self) -> list[Slo]:
        """The personas' own SLOs, each on its persona; they join those of the cluster."""
        return [slo.model_copy(update={"persona": one.name}) for one in self.personas for slo in one.slos]

    def persona(self, name: str) -> Persona:
        """The persona of that name; StopIteration where there is none."""
        return next(persona for persona in self.personas if persona.name == name)
