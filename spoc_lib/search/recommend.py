"""What the user takes home: the knee against the defaults, and the ready command in three forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import pandas as pd
import yaml

from spoc_lib.config import Cluster
from spoc_lib.metrics import METRICS
from spoc_lib.search.pareto import GOODPUT, THROUGHPUT, Objectives
from spoc_lib.search.space import Flags
from spoc_lib.servers.commands import flag_arguments, model_argument, shell_command

Format = Literal["shell", "compose", "kubernetes"]
FORMATS: tuple[Format, ...] = get_args(Format)
IMAGE = "vllm/vllm-openai:latest"
PORT = 8000
LABELS = {THROUGHPUT: ("output tokens/s", METRICS[THROUGHPUT].better),
          GOODPUT: ("goodput, requests/s", METRICS[GOODPUT].better),
          **{f"{name}_p95_s": (f"p95 {METRICS[name].title}, s", METRICS[name].better) for name in ("ttft", "itl")}}


def point(figures: Mapping[str, Any], objectives: Objectives) -> str:
    """A trial's objectives for readers."""
    good = f"{figures[GOODPUT]:,.2f} requests/s within the limits, " if objectives[0] == GOODPUT else ""
    return (f"{good}{figures[THROUGHPUT]:,.0f} output tokens/s, p95 TTFT {figures['ttft_p95_s']:.2f} s, p95 ITL "
            f"{1000 * figures['itl_p95_s']:.1f} ms")


def command(cluster: Cluster, flags: Flags, form: Format = "shell") -> str:
    """The ready command that serves `cluster`'s model with `flags` (fixed flags included)."""
    if form == "shell":
        return shell_command(cluster, flags)
    image = cluster.engine.image or IMAGE
    args = ["--model", model_argument(cluster), *flag_arguments(flags)]
    devices = cluster.hardware.count
    if form == "compose":
        gpus = {"driver": "nvidia", "count": devices, "capabilities": ["gpu"]}
        service = {"image": image, "command": args, "ports": [f"127.0.0.1:{PORT}:{PORT}"], "ipc": "host",
                   "deploy": {"resources": {"reservations": {"devices": [gpus]}}}}
        return yaml.safe_dump({"services": {"vllm": service}}, sort_keys=False)
    container = {"name": "vllm", "image": image, "args": args, "ports": [{"containerPort": PORT}],
                 "resources": {"limits": {"nvidia.com/gpu": devices}},
                 "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}}}
    return yaml.safe_dump({"containers": [container]}, sort_keys=False)


def changed_flags(defaults: Flags, chosen: Flags) -> pd.DataFrame:
    """Columns flag, default, chosen: the flags that the knee sets otherwise than the engine would."""
    rows = [{"flag": name, "default": defaults[name], "chosen": value}
            for name, value in chosen.items() if value != defaults[name]]
    return pd.DataFrame(rows, columns=["flag", "default", "chosen"], dtype=object)


def effects(defaults: Mapping[str, Any] | None, chosen: Mapping[str, Any], objectives: Objectives) -> pd.DataFrame:
    """Columns objective, label, better, default, chosen, change_ratio (chosen / default - 1; null without one)."""
    rows = []
    for name in objectives:
        before = None if defaults is None else defaults[name]
        after = chosen[name]
        ratio = after / before - 1 if before else None
        label, better = LABELS[name]
        rows.append({"objective": name, "label": label, "better": better, "default": before, "chosen": after,
                     "change_ratio": ratio})
    return pd.DataFrame(rows)
