"""A cluster under test: hardware, engine, model, flags held fixed, what a search varies, SLOs, telemetry endpoints."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator, model_validator

from spoc_lib.config.access import BEARER, Access, root_url, server_address, web_address, without_secret_flag
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
    def _address(cls, value: str | None, info: ValidationInfo) -> str | None:
        return value and server_address(value, info.data.get("api", "chat"))

    @model_validator(mode="after")
    def _complete(self) -> Engine:
        needed = {"process": "command", "container": "image", "remote": "base_url"}.get(self.kind)
        if needed and not getattr(self, needed):
            raise ValueError(f"an engine of kind {self.kind} needs '{needed}'")
        return self


class TelemetryEndpoints(Strict):
    """Where metrics are read, and whose they are. Absent: /metrics of the engine itself, scraped directly; no DCGM.

    One Prometheus may hold other servers' series, and one node other people's GPUs: `match` and `gpus`, `hosts` say
    which are the engine's; without them they are found by address, model, pod and activity, or the doubt is said.
    """

    prometheus_url: str | None = None
    dcgm_url: str | None = None
    metrics_url: str | None = Field(None, description="the engine's metrics page, where it is not /metrics of the API")
    match: dict[str, str] = Field({}, description="labels of the engine's series in Prometheus, each a value or a "
                                                  "regular expression for the whole value")
    gpus: list[int | str] = Field([], description="the engine's GPUs: indices, UUIDs, or UUID/GPU_I_ID (MIG)")
    hosts: list[str] = Field([], description="nodes whose GPUs are the engine's")
    auth_env: str | None = Field(None, description="name of the environment variable that holds Prometheus's bearer "
                                                   "token, or user:password")

    @field_validator("prometheus_url", "dcgm_url", "metrics_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return value and web_address(value)

    @field_validator("match")
    @classmethod
    def _labels(cls, value: dict[str, str]) -> dict[str, str]:
        for name, pattern in value.items():
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name, re.ASCII):
                raise ValueError(f"{name!r:.40} is no label of Prometheus's: letters, digits and _")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{name}: {pattern!r:.60} is no regular expression: {error}") from error
        return value

    def credential(self) -> dict[str, str]:
        """The header that carries what `auth_env` names; InputError when the variable holds nothing usable."""
        found = Access(api_key_env=self.auth_env).key()
        if found is None:
            return {}
        return {BEARER: f"Basic {base64.b64encode(found.encode()).decode()}" if ":" in found else f"Bearer {found}"}


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


def metrics_page(cluster: Cluster, base_url: str) -> tuple[str, Access]:
    """(the engine's metrics page, how it is reached). The API's key goes to the API's own host only."""
    page = cluster.telemetry.metrics_url
    if page is None or urlsplit(page).netloc == urlsplit(base_url).netloc:
        return page or f"{root_url(base_url)}/metrics", cluster.engine
    return page, Access(verify_tls=cluster.engine.verify_tls)


def price_per_gpu_hour(hardware: Hardware) -> float | None:
    """The cluster's own price, else its GPU's; None where neither file says one."""
    return hardware.price_per_gpu_hour or load_gpu(hardware.gpu).price_per_gpu_hour
