"""Hashes of what an answer was computed from: two runs with equal hashes asked the same question of the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from spoc_lib import config
from spoc_lib.config import Cluster


def sha256(path: Path) -> str:
    """Of a file's bytes; of a folder, of the names and bytes of the files in it."""
    return _sha256(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _sha256(path: Path, _changed_ns: int) -> str:
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        if file != path:
            digest.update(str(file.relative_to(path)).encode() + b"\0")
        with open(file, "rb") as handle:
            for block in iter(lambda: handle.read(1 << 20), b""):
                digest.update(block)
    return digest.hexdigest()


def inputs(cluster: Cluster, parameters: Mapping[str, Any]) -> dict[str, str]:
    """sha256 by name of every file behind a stage: cluster, profile, personas, model, GPU, flags, calibration, trace;
    `cluster_facts` is what the cluster file says, in any notation. Absent files have no entry."""
    wanted = {
        "cluster": config.find("clusters", str(parameters["cluster"]), "cluster"),
        "profile": config.find("profiles", str(parameters["profile"]), "profile"),
        "personas": personas_file(cluster.personas),
        "model": config.find("models", cluster.model, "model"),
        "gpu": config.find("gpus", cluster.hardware.gpu, "gpu"),
        "flags": config.data_dir() / "flags" / "vllm.yaml",
        "calibration": config.data_dir() / "kernels" / f"{cluster.model}.steptime.yaml",
        "trace": Path(str(parameters["trace"])) if parameters.get("trace") else None,
    }
    found = {name: sha256(path) for name, path in wanted.items() if path is not None and path.exists()}
    facts = cluster.model_dump(mode="json", exclude={"engine": {"environment"}, "personas": True, "corpus": True})
    if config.is_path(cluster.model):
        del facts["model"]  # by its content, above
    if config.is_path(cluster.hardware.gpu):
        del facts["hardware"]["gpu"]
    found["cluster_facts"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return found


def personas_file(personas: str) -> Path | None:
    """The file (or folder of traces) that a persona set is read from; None for traces fetched from a hub."""
    if personas.startswith("traces:"):
        path = Path(personas.removeprefix("traces:"))
        return path if path.exists() else None
    return config.find("personas", personas, "personas")
