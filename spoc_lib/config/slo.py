"""A service-level objective: what of whose requests is held within which limit."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from spoc_lib.core.yamlfile import PositiveOrInf, Strict

#: Metrics of an SLO that are shares of requests: of failed ones, and of those that met every limit on latency.
SHARES = ("error_rate", "goodput")


class Slo(Strict):
    """One service-level objective on `persona`'s requests (`all`: everybody's).

    Latency (ttft, itl, tpot, e2e, and ttft_per_prompt_token, which is TTFT over the prompt's tokens): `percentile` of
    it is at most `limit_s`. error_rate: at most `limit_ratio` of the requests fail. goodput: at least `limit_ratio` of
    them meet every limit on latency that applies to them.
    """

    persona: str = "all"
    metric: Literal["ttft", "ttft_per_prompt_token", "itl", "tpot", "e2e", "error_rate", "goodput"]
    percentile: Annotated[float, Field(gt=0, le=100)] = 95
    limit_s: PositiveOrInf = math.inf
    limit_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Slo:
        share, bound = self.metric in SHARES, math.isfinite(self.limit_s)
        if share and (self.limit_ratio is None or bound or self.percentile != 95):
            raise ValueError(f"an SLO on {self.metric} takes 'limit_ratio' between 0 and 1, for example "
                             f"{0.01 if self.metric == 'error_rate' else 0.95}, and neither 'limit_s' nor 'percentile'")
        if not share and (not bound or self.limit_ratio is not None):
            raise ValueError(f"an SLO on {self.metric} takes 'limit_s' in seconds, not 'limit_ratio'")
        return self

    @property
    def allowed_ratio(self) -> float:
        """Share of the samples that may lie beyond the limit."""
        if self.limit_ratio is None:
            return 1 - self.percentile / 100
        return self.limit_ratio if self.metric == "error_rate" else 1 - self.limit_ratio

    @property
    def within_percent(self) -> float:
        """Per cent of the samples that must lie within the limit: the percentile, of a share what it leaves."""
        return self.percentile if self.limit_ratio is None else 100 * (1 - self.allowed_ratio)

    @property
    def name(self) -> str:
        """What it is called in tables and sentences, its limit included."""
        return slo_name(self.persona, self.metric, self.within_percent, self.limit_s)


def slo_name(persona: str, metric: str, percentile: float, limit_s: float) -> str:
    """What an SLO is called; `percentile`: of the samples, those that must lie within the limit."""
    if metric == "error_rate":
        return f"{persona} error_rate <= {100 - percentile:.4g} %"
    if metric == "goodput":
        return f"{persona} goodput >= {percentile:.4g} %"
    unit = "s/token" if metric == "ttft_per_prompt_token" else "s"
    return f"{persona} {metric} p{percentile:.6g} <= {limit_s:g} {unit}"
