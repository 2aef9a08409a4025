"""A cluster under test: hardware, engine, model, flags held fixed, what a search varies, SLOs, telemetry endpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from spoc_lib.config.access import Access, server_address, web_address, without_secret_flag
from spoc_lib.config.flags import FlagValue, load_catalogue, read_flags
from spoc_lib.config.shipped import beside, find, from_folder_of, name_of, project_dir
from spoc_lib.config.slo import Slo
from spoc_lib.config.specs import load_gpu, load_model
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import SHORT, Positive, PositiveInt, Strict


class Hardware(Strict):
    """The GPUs that one engine replica uses. `price_per_gpu_hour` in any currency, for ratios only."""

    gpu: str
    count: PositiveInt
    price_per_gpu_hour: Positive | None = None

    @property
    def gpu_name(self) -> str:
        """The GPU's name, also where `gpu` is the path of a file."""
        return name_of(self.gpu)


class Engine(Access):
    """How the engine under test comes to be.

    embedded: the twin, over HTTP on real time (and on the virtual clock for screening);
    process: `command` is started with the flags appended (`{project}` in it is the project's folder);
    container: `image` through docker or podman;
    remote: `base_url` is there already, its flags are fixed and a search is refused.
    What its requests carry (key, headers, fields, route) and how long they may take is `Access`'s.
    """

    kind: Literal["embedded", "process", "container", "remote"]
    base_url: str | None = None
    command: list[str] | None = None
    image: str | None = None
    environment: dict[str, str] = {}
    startup_timeout_s: Positive = 600
    served_model: str | None = Field(None, description="model name on the API; default: the model file's name")

    @field_validator("command")
    @classmethod
    def _in_project(cls, value: list[str] | None) -> list[str] | None:
        without_secret_flag(value or [])
        return value and [part.replace("{project}", str(project_dir())) for part in value]

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
        return value and server_address(value)

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
    """What the search varies. `space` narrows or replaces ranges of data/flags/vllm.yaml by flag name. Flags are named
    as vLLM does, with dashes or underscores."""

    target_users: PositiveInt = 100
    space: dict[str, list[FlagValue]] = {}
    forbidden: list[str] = Field([], description="flags that no launch may set")
    objective: Literal["throughput", "goodput"] = Field(
        "throughput", description="the first objective: output tokens/s, or requests/s that meet every SLO on latency")

    @field_validator("space", mode="before")
    @classmethod
    def _space(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        space: dict[str, Any] = {}
        for written, values in value.items():
            if not isinstance(values, list):
                raise InputError("bad-space", f"search.space: '{written}' wants the list of the values to try, such as "
                                 f"[1, 2, 4], not {SHORT.repr(values)}")
            if not values:
                raise InputError("bad-space", f"search.space: '{written}' has an empty range: list the values to try")
            read = [next(iter(read_flags({written: one}, "search.space").items())) for one in values]
            name = read[0][0]
            if len({(type(one), one) for _, one in read}) < len(read):
                raise InputError("bad-space", f"search.space: '{name}' lists a value twice")
            if name in space:
                raise InputError("flag-twice", f"search.space: '{name}' is given twice: keep one")
            if None in (found := [one for _, one in read]):
                raise InputError("bad-space", f"search.space: '{name}': null cannot be tried: name its values")
            space[name] = found
        return space

    @field_validator("forbidden")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        return [load_catalogue().name(written, "search.forbidden") for written in value]


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
    flags: dict[str, FlagValue] = Field({}, description="vLLM flags held fixed in every launch")
    search: SearchSpec = SearchSpec()
    ladder: LadderSpec
    slos: Annotated[list[Slo], Field(min_length=1)]
    telemetry: TelemetryEndpoints = TelemetryEndpoints()

    @field_validator("flags", mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in read_flags(value).items() if given is not None}

    def context_limit(self, flags: Mapping[str, Any] | None = None) -> int:
        """Longest context of a request in tokens, `flags` set over the cluster's own: max_model_len, else (also where
        that is `auto`) the model's own."""
        limit = {**self.flags, **(flags or {})}.get("max_model_len")
        return limit if isinstance(limit, int) and limit > 0 else load_model(self.model).max_model_len

    @property
    def model_name(self) -> str:
        """The model's name, also where `model` is the path of a file."""
        return name_of(self.model)

    @property
    def simulated(self) -> bool:
        """Whether the embedded twin stands for the engine."""
        return self.engine.kind == "embedded"


def load_cluster(name_or_path: str) -> Cluster:
    """A cluster by name or path, its model and GPU known; InputError with one sentence where one is not. Paths in the
    file are meant from the file's own folder."""
    file = find("clusters", name_or_path, "cluster")
    cluster = _placed(file, yamlfile.load(Cluster, file))
    load_model(cluster.model)
    load_gpu(cluster.hardware.gpu)
    return cluster


def _placed(file: Path, cluster: Cluster) -> Cluster:
    """The cluster with whole paths: a notebook's kernel reads it in another folder."""
    personas, recording = cluster.personas, cluster.personas.removeprefix("traces:")
    if personas == recording:
        personas = beside(file, personas)
    elif os.path.exists(found := from_folder_of(file, recording)):  # else a set on a hub
        personas = f"traces:{found}"
    return cluster.model_copy(update={
        "model": beside(file, cluster.model), "personas": personas,
        "hardware": cluster.hardware.model_copy(update={"gpu": beside(file, cluster.hardware.gpu)}),
        "corpus": cluster.corpus and from_folder_of(file, cluster.corpus)})


def price_per_gpu_hour(hardware: Hardware) -> float | None:
    """The cluster's own price, else its GPU's; None where neither file says one."""
    return hardware.price_per_gpu_hour or load_gpu(hardware.gpu).price_per_gpu_hour
