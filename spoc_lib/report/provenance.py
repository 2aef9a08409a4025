"""Where a result comes from: versions, git state, hardware, engine, parameters, seeds, data, calibration, time.

No paths, no environment, no secrets.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from spoc_lib.config import Cluster, Profile, load_gpu, load_model
from spoc_lib.config.shipped import CHECKOUT
from spoc_lib.core.files import plain, read_json
from spoc_lib.core.version import VERSION

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
#: Parameters that say where a run stands, not what it asked.
PLACES = ("run_dir", "runs")
#: What the record is called in a notebook's metadata, and in that of the output that shows it.
MARK = "spoc"


def line(made: Mapping[str, Any]) -> str:
    """The record in a line for people."""
    client = made["client"]
    return (f"SPOC {made['spoc']}, git {made['git']}, Python {made['python']}; seed {made['seeds']['workload']}; "
            f"{made['seconds']:.0f} s on {client['cores']} cores of {client['cpu']}; {made['finished']}")


def show(made: Mapping[str, Any]) -> None:
    """Leave the record in the notebook that runs, as a line with all of it in the output's metadata: whoever executes
    the notebook (papermill, JupyterLab) saves it with it. Nothing outside of a notebook."""
    from IPython import get_ipython
    from IPython.display import display

    if get_ipython() is not None:
        display({"text/plain": line(made)}, metadata={MARK: plain(dict(made))}, raw=True)


def collect(
    cluster: Cluster,
    profile: Profile,
    parameters: Mapping[str, Any],
    seconds: float,
    *,
    data: Mapping[str, str] | None = None,
    launches: Path | None = None,
) -> dict[str, Any]:
    """A JSON-ready record for one stage.

    data: sha256 by name (`digests.inputs`, with the script's); launches: folder in which the stage started engines,
    each of which left a `launch.json`.
    """
    return {
        **software(),
        "client": client_hardware(),
        "server": {
            "hardware": cluster.hardware.model_dump() | {"gpu": cluster.hardware.gpu_name},
            "gpu": load_gpu(cluster.hardware.gpu).title,
            "engine": cluster.engine.kind,
            "model": load_model(cluster.model).name,
        },
        "engine": engine(launches),
        "flags_fixed": cluster.flags,
        "profile": profile.model_dump(),
        "parameters": asked(parameters),
        "seeds": {"workload": parameters.get("seed"), "search": parameters.get("seed"), "repeats": profile.seeds},
        "data_sha256": dict(data or {}),
        "seconds": round(seconds, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def asked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters without the folders of files and without the run's own place: a file's hash tells more."""
    return {k: _name(v) for k, v in parameters.items() if k not in PLACES}


def software() -> dict[str, Any]:
    """Versions and git state of the workbench."""
    return {
        "spoc": VERSION,
        "git": git_state(),
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def engine(launches: Path | None) -> dict[str, Any]:
    """Version, flags and calibration of the engine that was launched last below `launches`; {} where none was."""
    found = sorted(launches.rglob("launch.json"), key=lambda path: path.stat().st_mtime_ns) if launches else []
    if not found:
        return {}
    told = read_json(found[-1], "launch record")
    record = {name: told.get(name) for name in ("kind", "version", "model", "max_model_len", "flags", "simulated")}
    passport = told.get("passport") or {}
    return {**record, "calibration_id": passport.get("calibration_id"), "launches": len(found)}


def _name(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


@cache
def package_versions() -> dict[str, str]:
    """Version by package, 'absent' for one that is not installed."""
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
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


@cache
def git_state(root: Path | None = CHECKOUT) -> str:
    """Commit of the checkout at `root`, with `+changes` when the tree differs from it; 'no git' outside of one."""
    if root is None:
        return "no git"
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "no git"


def _git(root: Path, *words: str) -> str:
    # Without its optional locks git writes nothing, so a run that is killed here leaves no index.lock behind.
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", str(root), *words], capture_output=True,
        encoding="utf-8", errors="replace", check=True, timeout=10
    ).stdout.strip()
