"""How much work a run does."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from spoc_lib.config.shipped import find
from spoc_lib.core import yamlfile
from spoc_lib.core.yamlfile import Positive, PositiveInt, Strict


class Profile(Strict):
    """How much work a run does (data/profiles/*.yaml)."""

    name: str
    title: str
    audit_users: PositiveInt
    audit_turns: PositiveInt
    search_trials: PositiveInt = Field(description="screening trials on the virtual clock")
    search_population: PositiveInt
    search_finalists: PositiveInt = Field(description="finalists confirmed by real load over HTTP")
    screen_s: Positive = Field(description="simulated seconds a screening trial")
    rung_s: Positive = Field(description="seconds of a rung that are measured; simulated on the virtual clock")
    warmup_s: Positive = Field(description="seconds that pass, once every user had its first answer, before that")
    http_rung_s: Positive = Field(description="real seconds of a rung over HTTP")
    http_longest_s: Positive | None = Field(
        None, description="most real seconds that such a rung is extended to where its cold start or its turns need it")
    http_users: PositiveInt = Field(description="users of the HTTP rung that runs beside its virtual twin")
    http_launches: PositiveInt = Field(8, description="most launches of a real engine in a search")
    probes: PositiveInt = Field(description="most rungs of the sweep")
    seeds: PositiveInt = Field(1, description="repeats of a rung near the edge")
    trace_s: Positive = Field(description="seconds of engine steps written into the kernel trace")
    gap_cap_s: Positive = Field(description="cap on think time; it moves 'how many users', so it is printed")
    start: Literal["cold", "stationary"] = Field("stationary", description="where users stand when a rung starts")


def load_profile(name_or_path: str) -> Profile:
    """A profile by name or path."""
    return yamlfile.load(Profile, find("profiles", name_or_path, "profile"))
