"""A capture inside a container that runs already: commands that reach into it, for Docker, Podman and Kubernetes.

nsys cannot begin to trace CUDA in a process that started without it. So the container's engine is started by `nsys
launch`, which traces nothing yet, and a session is opened and closed from outside, as often as wanted, with no need
for the engine's profiler endpoints.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

SESSION = "spoc"
_FOLDER = "/tmp"
#: What nsys traces of the engine: kernels and ranges of every rank, graphs node by node.
TRACED = ("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--trace-fork-before-exec=true")
#: What a collection is told: nothing of the CPU, and a report in the place of an older one.
COLLECTED = ("--sample=none", "--cpuctxsw=none", "--force-overwrite=true")


@dataclass(frozen=True)
class Inside:
    """A running container: program that reaches it, its name, and the namespace of a pod."""

    program: Literal["docker", "podman", "kubectl"]
    name: str
    namespace: str | None = None

    def run(self, *command: str) -> list[str]:
        """The command, executed in the container."""
        if self.program == "kubectl":
            return ["kubectl", "exec", *self._namespaced(), self.name, "--", *command]
        return [self.program, "exec", self.name, *command]

    def copy(self, path: str, target: str) -> list[str]:
        """A file of the container, copied here."""
        if self.program == "kubectl":
            return ["kubectl", "cp", *self._namespaced(), f"{self.name}:{path.lstrip('/')}", target]
        return [self.program, "cp", f"{self.name}:{path}", target]

    def _namespaced(self) -> list[str]:
        return ["--namespace", self.namespace] if self.namespace else []

    def window(self, output: str, seconds: float) -> str:
        """Open the session, wait, close it; the report then lies in the container."""
        start = self.run("nsys", "start", f"--session={SESSION}", *COLLECTED, f"--output={_FOLDER}/{output}")
        stop = self.run("nsys", "stop", f"--session={SESSION}")
        return f"{shlex.join(start)} && sleep {seconds:g} && {shlex.join(stop)}"

    def fetch(self, output: str) -> str:
        """Copy the report out of the container."""
        return shlex.join(self.copy(f"{_FOLDER}/{output}.nsys-rep", f"{output}.nsys-rep"))


def launch_command() -> list[str]:
    """What stands before the engine's command in the container."""
    return ["nsys", "launch", f"--session-new={SESSION}", *TRACED, "--wait=primary"]
