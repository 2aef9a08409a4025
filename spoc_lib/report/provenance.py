"""Where a result comes from: versions, git state, hardware, parameters, time. No paths, no environment, no secrets."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import spoc_lib
from spoc_lib.config import Cluster, Profile, load_gpu, load_model

PACKAGES = (
    "jupyterlab",
    "papermill",
    "optuna",
    "locust",
    "aiohttp",
    "pandas",
    "plotly",
    "nvtx",
    "prometheus-api-client",
    "datasets",
    "numpy",
    "numba",
    "pyarrow",
)


def collect(cluster: Cluster, profile: Profile, parameters: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A JSON-ready record for one stage."""
    return {
        "spoc": spoc_lib.__version__,
        "git": git_state(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "client": client_hardware(),
        "server": {
            "hardware": cluster.hardware.model_dump(),
            "gpu": load_gpu(cluster.hardware.gpu).title,
            "engine": cluster.engine.kind,
            "model": load_model(cluster.model).name,
        },
        "flags_fixed": cluster.flags,
        "profile": profile.model_dump(),
        "parameters": {k: v for k, v in parameters.items() if k != "run_dir"},
        "seconds": round(seconds, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@cache
def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


@cache
def client_hardware() -> dict[str, Any]:
    """The machine that runs the workbench (and sends the load)."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
    }


@cache
def git_state() -> str:
    """Commit of the checkout, with `+changes` when the tree differs from it; 'no git' outside of one."""
    root = Path(__file__).resolve().parent.parent.parent
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "no git"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
