"""The commands that start an engine: as arguments for a launch, and as a line that a user can paste."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spoc_lib.config import Cluster, load_model, read_flags
from spoc_lib.config.flags import load_catalogue, words
from spoc_lib.config.shipped import project_dir
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import write_text

Value = TypeVar("Value")
CONTAINER_PORT = 8000
CONTAINER_ENGINES = ("docker", "podman")
#: Passed into a container where set here, by name: the key of a model hub, and the one that vLLM asks its users for.
INHERITED = ("HF_TOKEN", "VLLM_API_KEY")


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """How to start an engine: arguments, environment to add, commands that remove what it leaves, and where
    (None: here)."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    cleanup: list[list[str]] = field(default_factory=list)
    directory: Path | None = None

    @property
    def program(self) -> str | None:
        """The program's path; None when it is not there."""
        if self.directory is not None:
            return str(self.directory / self.arguments[0])
        return shutil.which(self.arguments[0])


def flag_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Flags as `vllm serve` takes them: --name value; --name or --no-name for truth values; None left out. A value that
    begins with a dash is tied to its name, for it would be read as an option of its own. InputError for a name that
    can be no flag's."""
    arguments: list[str] = []
    for name, value in flags.items():
        dashed = name.lstrip("-").replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", dashed) or "\0" in str(value):
            raise InputError("bad-flag", f"{name!r:.60} cannot be a flag: write its name as vLLM does, for example "
                             "max_num_seqs")
        if isinstance(value, bool):
            arguments.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif value is not None:
            text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
            spec = load_catalogue().spec(name)
            if spec is not None and spec.type == "list":
                arguments += [f"--{dashed}", *(words(text) or ())]
            else:
                arguments += [f"--{dashed}={text}"] if text.startswith("-") else [f"--{dashed}", text]
    return arguments


def merged_flags(cluster: Cluster, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The cluster's fixed flags, then `flags`, as `config.read_flags` gives them."""
    return {**read_flags(cluster.flags), **read_flags(flags)}


def model_argument(cluster: Cluster) -> str:
    """The model as `vllm serve` wants it: `served_model` where the cluster says one, else the model file's source."""
    if cluster.engine.served_model:
        return cluster.engine.served_model
    source = load_model(cluster.model).source.split()[0]
    return source if "/" in source else cluster.model_name


def shell_command(cluster: Cluster, flags: Mapping[str, Any]) -> str:
    """The line that an operator pastes to get this engine: `vllm serve MODEL --…`."""
    return shlex.join(["vllm", "serve", model_argument(cluster), *flag_arguments(merged_flags(cluster, flags))])


def launch_command(cluster: Cluster, flags: Mapping[str, Any], port: int) -> list[str]:
    """The arguments that start the cluster's engine on `port` of 127.0.0.1 (see `prepare` for all of a launch).

    An embedded engine is started from a cluster name here; InputError for a remote engine.
    """
    kind = cluster.engine.kind
    if kind == "embedded":
        return _embedded(cluster.name, flags, port)
    if kind == "process":
        return [*required(cluster.engine.command, "command"), *flag_arguments(merged_flags(cluster, flags)),
                "--host", "127.0.0.1", "--port", str(port)]
    if kind == "container":
        return _container(cluster, flags, port).arguments
    raise InputError("remote-engine", f"the engine of cluster '{cluster.name}' is remote: it is never started from "
                     "here, and its flags are fixed")


def help_command(cluster: Cluster, question: str, engine: str | None = None) -> LaunchCommand:
    """What makes the cluster's engine (a process or a container) print its flags; `question`: --help or the like.

    A container sees the GPUs that a launch would give it: the engine looks for them before it prints anything.
    """
    environment = dict(cluster.engine.environment)
    if cluster.engine.kind == "container":
        engine = engine or container_engine()
        variables = [part for name in environment for part in ("--env", name)]
        return LaunchCommand([engine, "run", "--rm", *_gpus(cluster, engine), *variables,
                              required(cluster.engine.image, "image"), question], environment)
    command = required(cluster.engine.command, "command")
    return LaunchCommand([*command, question], environment, directory=_directory(command[0]))


def required(value: Value | None, field: str) -> Value:
    """`value`; InputError where the cluster file left the engine's `field` out."""
    if value is None:
        raise InputError("bad-field", f"engine: field '{field}' is needed for this kind of engine")
    return value


def prepare(cluster: Cluster, flags: Mapping[str, Any], port: int, folder: Path) -> LaunchCommand:
    """All that a launch needs; an embedded engine gets the cluster as it is in memory, through a file in `folder`."""
    if cluster.engine.kind == "embedded":
        path = write_text(folder / "cluster.yaml",
                          yamlfile.dump(cluster.model_dump(mode="json", exclude_none=True)))
        ready = ["--ready-file", str(folder / "ready.json")]
        return LaunchCommand(_embedded(str(path), flags, port) + ready, dict(cluster.engine.environment))
    if cluster.engine.kind == "container":
        return _container(cluster, flags, port)
    arguments = launch_command(cluster, flags, port)
    return LaunchCommand(arguments, dict(cluster.engine.environment), directory=_directory(arguments[0]))


def _directory(program: str) -> Path | None:
    """A relative program that is not below the current folder is looked for below the project's: a cluster file that
    ships means the same from a notebook's folder."""
    root = project_dir()
    if os.sep in program and not os.path.isabs(program) and not Path(program).exists() and (root / program).exists():
        return root
    return None


def _embedded(cluster: str, flags: Mapping[str, Any], port: int) -> list[str]:
    return [sys.executable, "-m", "spoc_lib", "engine", "serve", "--cluster", cluster, "--port", str(port), "--dev",
            *flag_arguments(flags)]


def container_engine() -> str:
    """docker or podman, whichever is there first; `docker` where neither is (a launch then says so)."""
    return next((name for name in CONTAINER_ENGINES if shutil.which(name)), CONTAINER_ENGINES[0])


def _container(cluster: Cluster, flags: Mapping[str, Any], port: int, engine: str | None = None) -> LaunchCommand:
    engine = engine or container_engine()
    name = f"spoc-{os.getpid()}-{port}"
    variables = [*cluster.engine.environment, *(one for one in INHERITED if os.environ.get(one))]
    arguments = [
        engine, "run", "--rm", "--name", name, *_gpus(cluster, engine), "--ipc", "host",
        "--publish", f"127.0.0.1:{port}:{CONTAINER_PORT}",
        *[part for variable in variables for part in ("--env", variable)],  # by name: no value on the command line
        required(cluster.engine.image, "image"), "--model", model_argument(cluster),
        *flag_arguments(merged_flags(cluster, flags)),
        "--port", str(CONTAINER_PORT),
    ]
    return LaunchCommand(arguments, dict(cluster.engine.environment), [[engine, "rm", "--force", name]])


def _gpus(cluster: Cluster, engine: str) -> Sequence[str]:
    if cluster.hardware.gpu == "cpu":
        return ()
    if engine == "podman":
        return [part for gpu in range(cluster.hardware.count) for part in ("--device", f"nvidia.com/gpu={gpu}")]
    return ("--gpus", str(cluster.hardware.count))
