"""What a user may write down: clusters, models, GPUs, profiles. Schemas, loading by name or path, no defaults
hidden in code that a file could state."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import Strict

Positive = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(gt=0)]
FlagValue = bool | int | float | str


def data_dir() -> Path:
    """The project's `data/` folder; `SPOC_DATA` overrides it."""
    return Path(os.environ.get("SPOC_DATA") or Path(__file__).resolve().parent.parent / "data")


#: Metrics of an SLO that are shares of requests: of failed ones, and of those that met every limit on latency.
SHARES = ("error_rate", "goodput")


def web_address(value: str) -> str:
    """`value` when it is an http(s) address; ValueError when not, or when a password stands in it."""
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f]", value):
        raise ValueError("must be an address like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise ValueError("must not hold a user or password: name an environment variable that holds the key")
    return value


class Slo(Strict):
    """One service-level objective on `persona`'s requests (`all`: everybody's).

    Latency (ttft, itl, tpot, e2e, and ttft_per_prompt_token, which is TTFT over the prompt's tokens): `percentile` of
    it is at most `limit_s`. error_rate: at most `limit_ratio` of the requests fail. goodput: at least `limit_ratio` of
    them meet every limit on latency that applies to them.
    """

    persona: str = "all"
    metric: Literal["ttft", "ttft_per_prompt_token", "itl", "tpot", "e2e", "error_rate", "goodput"]
    percentile: Annotated[float, Field(gt=0, le=100)] = 95
    limit_s: Positive = math.inf
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
        return slo_name(self.persona, self.metric, self.within_percent, self.limit_s)


def slo_name(persona: str, metric: str, percentile: float, limit_s: float) -> str:
    """What an SLO is called; `percentile`: of the samples, those that must lie within the limit."""
    if metric == "error_rate":
        return f"{persona} error_rate <= {100 - percentile:.4g} %"
    if metric == "goodput":
        return f"{persona} goodput >= {percentile:.4g} %"
    unit = "s/token" if metric == "ttft_per_prompt_token" else "s"
    return f"{persona} {metric} p{percentile:.6g} <= {limit_s:g} {unit}"


class Hardware(Strict):
    """The GPUs that one engine replica uses. `price_per_gpu_hour` in any currency, for ratios only."""

    gpu: str
    count: PositiveInt
    price_per_gpu_hour: Positive | None = None


class Engine(Strict):
    """How the engine under test comes to be.

    embedded: the twin, over HTTP on real time (and on the virtual clock for screening);
    process: `command` is started with the flags appended (`{project}` in it is the project's folder);
    container: `image` through docker or podman;
    remote: `base_url` is there already, its flags are fixed and a search is refused.
    """

    kind: Literal["embedded", "process", "container", "remote"]
    base_url: str | None = None
    command: list[str] | None = None
    image: str | None = None
    environment: dict[str, str] = {}
    api_key_env: str | None = Field(None, description="name of the environment variable that holds the API key")
    startup_timeout_s: Positive = 600
    served_model: str | None = Field(None, description="model name on the API; default: the model file's name")

    @field_validator("command")
    @classmethod
    def _in_project(cls, value: list[str] | None) -> list[str] | None:
        return value and [part.replace("{project}", str(data_dir().parent)) for part in value]

    @field_validator("image", "served_model")
    @classmethod
    def _no_option(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[\w./][\w./:@+-]*", value, re.ASCII):
            raise ValueError("must be a name of letters, digits and . / : @ + _ -, that begins with none of : @ + -")
        return value

    @field_validator("environment")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or "\0" in text:
                raise ValueError(f"{name!r:.40} cannot be an environment variable")
        return value

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return value and web_address(value)

    @model_validator(mode="after")
    def _complete(self) -> Engine:
        needed = {"process": "command", "container": "image", "remote": "base_url"}.get(self.kind)
        if needed and not getattr(self, needed):
            raise ValueError(f"an engine of kind {self.kind} needs '{needed}'")
        return self


class TelemetryEndpoints(Strict):
    """Where metrics are read. Absent: /metrics of the engine itself, scraped directly; no DCGM."""

    prometheus_url: str | None = None
    dcgm_url: str | None = None

    @field_validator("prometheus_url", "dcgm_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return value and web_address(value)


class SearchSpec(Strict):
    """What the search varies. `space` narrows or replaces ranges of data/flags/vllm.yaml by flag name."""

    target_users: PositiveInt = 100
    space: dict[str, list[FlagValue]] = {}
    forbidden: list[str] = Field([], description="flags that no launch may set")
    objective: Literal["throughput", "goodput"] = Field(
        "throughput", description="the first objective: output tokens/s, or requests/s that meet every SLO on latency")


class LadderSpec(Strict):
    """Users of the coarse ladder, ascending; the sweep refines between them."""

    users: list[PositiveInt]

    @model_validator(mode="after")
    def _ascending(self) -> LadderSpec:
        if not self.users or sorted(set(self.users)) != self.users:
            raise ValueError("'users' must be ascending, without repeats")
        return self


class Cluster(Strict):
    """A cluster under test (data/clusters/*.yaml)."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", description="also its runs' folders'")]
    title: str
    hardware: Hardware
    engine: Engine
    model: str
    personas: str = Field("spoc", description="a name in data/personas/ or the path of a YAML file")
    corpus: str | None = Field(None, description="folder that stands for the monorepo; default: Python's library")
    flags: dict[str, FlagValue] = Field({}, description="vLLM flags held fixed in every launch, snake_case")
    search: SearchSpec = SearchSpec()
    ladder: LadderSpec
    slos: Annotated[list[Slo], Field(min_length=1)]
    telemetry: TelemetryEndpoints = TelemetryEndpoints()

    @property
    def simulated(self) -> bool:
        return self.engine.kind == "embedded"


class MoeShape(Strict):
    """The experts of a mixture-of-experts layer."""

    experts: PositiveInt
    top_k: PositiveInt
    d_ff: PositiveInt
    weight_bits: Positive = Field(description="stored bits a weight, scales included (MXFP4: 4.25)")


class ModelSpec(Strict):
    """A transformer's shape (data/models/*.yaml), all that step time and memory need."""

    name: str
    source: str
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    d_ff: PositiveInt | None = Field(None, description="dense feed-forward width; null for a pure MoE")
    moe: MoeShape | None = None
    vocabulary: PositiveInt
    max_model_len: PositiveInt
    sliding_window: PositiveInt | None = None
    sliding_layers: Annotated[int, Field(ge=0)] = 0
    dense_weight_bits: Positive = 16
    kv_bits: Positive = 16
    weight_gib: Positive = Field(description="memory that loading takes, all GPUs together")


class GpuSpec(Strict):
    """A GPU's limits (data/gpus/*.yaml)."""

    name: str
    title: str
    source: str
    memory_gib: Positive
    dram_bytes_per_s: Positive
    bf16_flops_per_s: Positive
    fp8_flops_per_s: Positive | None = None
    fp4_flops_per_s: Positive | None = None
    link_bytes_per_s: Positive = Field(description="NVLink, one direction")
    power_w: Positive = 700
    sm_clock_mhz: Positive = 1980
    price_per_gpu_hour: Positive | None = Field(None, description="in any currency; a cluster's own price wins")


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


Kind = TypeVar("Kind", bound=Strict)


def names(folder: str) -> list[str]:
    """Names of what ships in data/<folder>."""
    return sorted(path.stem for path in (data_dir() / folder).glob("*.yaml"))


def find(folder: str, name_or_path: str, what: str) -> Path:
    """The file that `name_or_path` means: a path to YAML, or a name in data/<folder>."""
    if name_or_path.endswith((".yaml", ".yml")) or os.sep in name_or_path:
        path = Path(name_or_path)
    else:
        path = data_dir() / folder / f"{name_or_path}.yaml"
    if not path.is_file():
        raise InputError(
            f"unknown-{what}",
            f"unknown {what} '{name_or_path}': use one of {', '.join(names(folder))} or the path of a YAML file",
        )
    return path


def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by name or path, its model and GPU known; InputError with one sentence where one is not."""
    cluster = yamlfile.load(Cluster, find("clusters", name_or_path, "cluster"))
    load_model(cluster.model)
    load_gpu(cluster.hardware.gpu)
    return cluster


def load_model(name_or_path: str) -> ModelSpec:
    """A model's shape by name or path."""
    return yamlfile.load(ModelSpec, find("models", name_or_path, "model"))


def load_gpu(name_or_path: str) -> GpuSpec:
    """A GPU's limits by name or path."""
    return yamlfile.load(GpuSpec, find("gpus", name_or_path, "gpu"))


def price_per_gpu_hour(hardware: Hardware) -> float | None:
    """The cluster's own price, else its GPU's; None where neither file says one."""
    return hardware.price_per_gpu_hour or load_gpu(hardware.gpu).price_per_gpu_hour


def load_profile(name_or_path: str) -> Profile:
    """A profile by name or path."""
    return yamlfile.load(Profile, find("profiles", name_or_path, "profile"))
