"""What one run found, read from its folder: capacity, rungs, verdicts, stage results, and what they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pandas as pd

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.core import schemas
from spoc_lib.core.files import read_record
from spoc_lib.core.tables import read_table


@dataclass(frozen=True)
class Answer:
    """What one run found; `workload`, `search`, `sweep`, `nsight` are stage results, None where a stage did not run."""

    run: str
    folder: Path
    cluster: Cluster
    capacity: dict[str, Any]
    rungs: pd.DataFrame
    slo: pd.DataFrame
    workload: dict[str, Any] | None
    search: dict[str, Any] | None
    sweep: dict[str, Any] | None
    nsight: dict[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """From a run folder with a finished sweep; InputError naming the file that is missing."""
        state = read_record(folder / "run.json", "run state", "run_id", "stages")
        found = {
            name: folder / part / "result.json"
            for name, part in (("workload", "workload"), ("search", "search"), ("sweep", "sweep"), ("nsight", "nsight"))
        }
        return cls(
            state["run_id"],
            folder,
            _recorded_cluster(folder, state),
            read_record(folder / "sweep" / "capacity.json", "capacity answer", "verdict", "flags", "gap_cap_s"),
            read_table(folder / "sweep" / "rungs.parquet", schemas.RUNGS),
            read_table(folder / "sweep" / "slo_verdicts.parquet", schemas.SLO_VERDICTS),
            **{name: read_record(path, "stage result") if path.exists() else None for name, path in found.items()},
        )

    @property
    def users(self) -> float | None:
        """The capacity; None where it is unbounded."""
        return self.capacity.get("max_users")

    @property
    def interval(self) -> tuple[float, float] | None:
        """(low, high) of the capacity at `level`, high inf where no rung bounds it; None without a capacity."""
        low, high = self.capacity.get("interval") or (None, None)
        return None if low is None or self.users is None else (float(low), math.inf if high is None else float(high))

    @property
    def resolved(self) -> bool:
        """Whether the rungs bound the capacity on both sides, narrowly enough (`capacity.json`'s own verdict)."""
        return self.users is not None and self.capacity.get("verdict", "resolved") == "resolved"

    @property
    def climbed(self) -> pd.DataFrame:
        """The valid rungs of the ladder: on the virtual clock for an embedded engine, over HTTP for a real one."""
        driver = "virtual" if self.cluster.simulated else "locust"
        return self.rungs[(self.rungs["verdict"] != "invalid") & (self.rungs["driver"] == driver)]

    @property
    def nearest(self) -> pd.Series | None:
        """The valid rung of the ladder that is nearest to the limit; None without one."""
        valid = self.climbed
        return None if valid.empty else valid.loc[(valid["users"] - (self.users or 0)).abs().idxmin()]

    @property
    def level(self) -> float:
        """Confidence level of the interval."""
        return self.capacity.get("level", 0.9)

    @property
    def reason(self) -> str:
        """Why the sweep's verdict is what it is."""
        return self.capacity.get("reason") or "the rungs do not decide"

    @property
    def binding(self) -> dict[str, Any]:
        """The SLO that breaks first (persona, metric, percentile, limit_s, name …); empty where none was judged."""
        return self.capacity.get("binding") or {}

    @property
    def saturated(self) -> str:
        """The resource that is used up at the limit, in words: `kv blocks`; `unknown` where the sweep could not tell;
        empty where no rung was valid."""
        return (self.capacity.get("saturated") or {}).get("resource", "").replace("_", " ")

    @property
    def flags(self) -> dict[str, Any]:
        """Every flag that the launch was given: the cluster's own, and over them those that were swept."""
        return {**self.cluster.flags, **self.capacity.get("flags", {})}

    @property
    def simulated(self) -> bool:
        """Whether the twin gave these numbers."""
        return bool(self.capacity.get("simulated"))

    @property
    def label(self) -> str:
        """What the numbers are: `simulated` or `measured`."""
        return "simulated" if self.simulated else "measured"

    @property
    def passport(self) -> dict[str, Any]:
        """What stands behind simulated numbers; empty behind measured ones."""
        return self.capacity.get("passport") or {}

    @property
    def calibration(self) -> str:
        """Identity of the twin's calibration; empty behind measured numbers."""
        return self.passport.get("calibration_id") or ""

    @property
    def made(self) -> dict[str, Any]:
        """Provenance of the sweep; empty where it recorded none."""
        return (self.sweep or {}).get("provenance") or {}


def distinct(answers: list[Answer]) -> list[Answer]:
    """The answers, those of one cluster told apart by their runs' names."""
    names = [answer.cluster.name for answer in answers]
    return [
        replace(answer, cluster=answer.cluster.model_copy(update={"name": answer.run}))
        if names.count(answer.cluster.name) > 1 else answer
        for answer in answers
    ]


def copies(folder: Path, stage: Mapping[str, Any]) -> dict[str, Path]:
    """The copies that a run keeps of what a stage was told (cluster, profile, personas): {what: path}."""
    return {what: folder / copy for what, copy in (stage.get("inputs") or {}).items() if (folder / copy).is_file()}


def _recorded_cluster(folder: Path, state: dict[str, Any]) -> Cluster:
    """The cluster that a run's sweep was told, with the SLOs of its personas: the copies of both files that the run
    keeps, else the cluster's file as it is today."""
    from spoc_lib.workload.personas import with_persona_slos  # it brings the workload, which an index does without

    sweep = state["stages"]["03"]
    kept = copies(folder, sweep)
    cluster = load_cluster(str(kept.get("cluster", sweep["parameters"]["cluster"])))
    if "personas" not in kept:
        return cluster
    judged = with_persona_slos(cluster.model_copy(update={"personas": str(kept["personas"])}))
    return cluster.model_copy(update={"slos": judged.slos})
