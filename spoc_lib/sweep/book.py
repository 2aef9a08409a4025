"""The rungs of a sweep on disk: each is whole or absent, and one that is there is not paid for again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.config import Cluster, Slo
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import plain, read_json, to_json, write_json
from spoc_lib.core.schemas import RUNGS, SLO_VERDICTS
from spoc_lib.core.tables import as_table
from spoc_lib.core.version import VERSION
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.metrics import Measured
from spoc_lib.sweep.drivers import FreshUsers
from spoc_lib.sweep.evidence import step_figures
from spoc_lib.sweep.record import RungRecord, store
from spoc_lib.sweep.rung import summarise
from spoc_lib.sweep.slo import by_persona, goodput, limit_curve
from spoc_lib.telemetry.reconcile import reconcile
from spoc_lib.telemetry.straggler import find_stragglers
from spoc_lib.telemetry.timeline import window_summary
from spoc_lib.workload.fingerprint import script_sha256

#: Share of the wall time that scrapes may be on their way; the server's own share of it is several times smaller.
SCRAPE_SHARE = 0.05


@dataclass(frozen=True)
class Entry:
    """What is kept of a rung. row, slo: RUNGS and SLO_VERDICTS; server: `window_summary`; steps:
    `step_figures`;
    reconciliation: rows of `telemetry.reconcile` (over HTTP); on_ladder: it counts for the capacity; limits:
    `slo.limit_curve`; outside: see `RungRecord`; personas: `slo.by_persona`."""

    number: int
    key: dict[str, Any]
    row: dict[str, Any]
    slo: list[dict[str, Any]]
    server: dict[str, Any]
    steps: dict[str, float]
    goodput: dict[str, Any]
    reconciliation: list[dict[str, Any]] = field(default_factory=list)
    stragglers: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)
    on_ladder: bool = True
    limits: list[dict[str, Any]] = field(default_factory=list)
    host_busy_ratio: float | None = None
    alignment_error_s: float = 0.0
    outside: list[str] = field(default_factory=list)
    personas: list[dict[str, Any]] = field(default_factory=list)


class RungBook:
    """Rungs of one sweep, in the order in which they were run.

    asked: what all of them have in common (`asked_of`); a rung on disk that was asked otherwise is run again.
    """

    def __init__(self, folder: Path, slos: Sequence[Slo], gap_cap_s: float, asked: Mapping[str, Any]) -> None:
        self.folder, self.slos, self.gap_cap_s = folder, slos, gap_cap_s
        self.asked: dict[str, Any] = {**asked, "slos": [slo.model_dump() for slo in slos]}
        self.entries: list[Entry] = []

    def path(self, number: int) -> Path:
        """Folder of a rung, made where it is not there."""
        path = self.folder / "rungs" / f"{number:02d}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def entry(self, number: int, key: Mapping[str, Any], play: Callable[[], RungRecord], *,
              budget: int | None = None, rung_only: bool = False) -> Entry:
        """Rung `number`: read where it is on disk under the same `key`, else played, summarised and stored.

        rung_only: it is shown among the rungs but does not count for the capacity.
        """
        found = self.aside(number, key, play, budget=budget, on_ladder=not rung_only)
        self.entries.append(found)
        return found

    def aside(self, number: int, key: Mapping[str, Any], play: Callable[[], RungRecord], *,
              budget: int | None = None, on_ladder: bool = False) -> Entry:
        """Like `entry`, for a rung that is not shown among the others."""
        path = self.path(number) / "rung.json"
        known_by: dict[str, Any] = plain({**key, **self.asked})
        if path.exists():
            known = _on_disk(path)
            if known.key == known_by:
                return known
        record = play()
        found = self._summarised(number, known_by, record, budget, on_ladder)
        store(record, path.parent)
        write_json(path, asdict(found))
        return _on_disk(path)

    def _summarised(self, number: int, key: dict[str, Any], record: RungRecord, budget: int | None,
                    on_ladder: bool) -> Entry:
        server = window_summary(record.metrics, *record.window)
        row, slo = summarise(
            record.requests, record.chunks, record.metrics, record.window, self.slos, key["users"], record.driver,
            rung=number, start_s=record.start_s, end_s=record.end_s, planned=record.planned,
            client_limited=record.client_limited, gap_cap_s=self.gap_cap_s, server=server)
        samples = Measured(record.requests, record.chunks, record.window, record.end_s)
        beside = [] if record.driver == "virtual" else reconcile(
            record.requests, record.chunks, record.metrics, record.start_s, record.end_s).to_dict("records")
        problems = list(record.problems)
        if record.overhead_ratio is not None and record.overhead_ratio > SCRAPE_SHARE:
            problems.append(f"scrapes were on their way for {record.overhead_ratio:.0%} of the time: scrape less often")
        return Entry(number, key, row, slo, server, step_figures(record.steps, record.window, budget),
                     goodput(samples, self.slos), beside,
                     asdict(find_stragglers(record.metrics, *record.window, chunks=record.chunks)), problems, on_ladder,
                     limit_curve(samples, self.slos, rung=number, users=key["users"], driver=record.driver)
                     if on_ladder else [], record.host_busy_ratio, record.alignment_error_s, record.outside,
                     by_persona(samples, self.slos, rung=number, users=key["users"], driver=record.driver))

    @property
    def ladder_entries(self) -> list[Entry]:
        """The rungs that count."""
        return [entry for entry in self.entries if entry.on_ladder]

    def rungs(self) -> pd.DataFrame:
        """RUNGS of all rungs."""
        return as_table([entry.row for entry in self.entries], RUNGS).to_pandas()

    def slo(self) -> pd.DataFrame:
        """SLO_VERDICTS of all rungs."""
        return as_table([row for entry in self.entries for row in entry.slo], SLO_VERDICTS).to_pandas()

    def valid_slo(self) -> pd.DataFrame:
        """SLO_VERDICTS of the valid rungs on the ladder."""
        rows = [row for entry in self.ladder_entries if entry.row["verdict"] != "invalid" for row in entry.slo]
        return as_table(rows, SLO_VERDICTS).to_pandas()

    def limits(self) -> pd.DataFrame:
        """SLO_VERDICTS of the valid rungs on the ladder at other limits (`slo.limit_curve`)."""
        rows = [row for entry in self.ladder_entries if entry.row["verdict"] != "invalid" for row in entry.limits]
        return as_table(rows, SLO_VERDICTS).to_pandas()

    def personas(self) -> pd.DataFrame:
        """SLO_VERDICTS of all rungs, persona by persona (`slo.by_persona`)."""
        return as_table([row for entry in self.entries for row in entry.personas], SLO_VERDICTS).to_pandas()

    def invalid_users(self) -> list[int]:
        """Users of the rungs that said nothing."""
        return [entry.row["users"] for entry in self.ladder_entries if entry.row["verdict"] == "invalid"]


def asked_of(cluster: Cluster, users: FreshUsers, seed: int) -> dict[str, Any]:
    """What a rung's figures hang on besides its own users, flags and seconds: the server (of the twin its model, GPU
    and calibration, too), whose series are its own, the workload, the seed."""
    server = cluster.model_dump(mode="json", include={
        "name": True, "model": True, "flags": True, "corpus": True, "hardware": {"gpu", "count"},
        "engine": {"kind", "base_url", "command", "image", "served_model", "api", "headers", "extra_body",
                   "request_timeout_s", "idle_timeout_s"},
        "telemetry": {"prometheus_url", "dcgm_url", "metrics_url", "match", "gpus", "hosts"}})
    made_of: list[Any] = [cluster.engine.environment]  # as a hash, for a variable may hold a secret
    if cluster.simulated:
        twin = EmbeddedEngine.from_cluster(cluster)
        made_of += [VERSION, twin.model.model_dump(mode="json"), twin.gpu.model_dump(mode="json"),
                    twin.passport().get("calibration_id")]
    return {"server": server, "server_sha256": hashlib.sha256(to_json(made_of).encode()).hexdigest(),
            "script_sha256": script_sha256(users.plain(0)), "gap_cap_s": users.gap_cap_s, "seed": seed}


def _on_disk(path: Path) -> Entry:
    """The entry in a rung.json; InputError, with the way on, where it is damaged."""
    try:
        return _restored(read_json(path, "rung"))
    except (InputError, KeyError, TypeError, AttributeError) as error:
        raise InputError("bad-rung", f"the rung {path} is damaged ({error}): remove it, and it is played again"
                         ) from error


def _restored(stored: dict[str, Any]) -> Entry:
    """An entry from its JSON, in which infinities are 'inf' and NaN null."""
    nan = {name for schema in (RUNGS, SLO_VERDICTS) for name in schema.names if name.endswith("_s")}

    def number(name: str, value: Any) -> Any:
        if value in ("inf", "-inf"):
            return math.inf if value == "inf" else -math.inf
        return math.nan if value is None and name in nan else value

    row = {name: number(name, value) for name, value in stored["row"].items()}
    tables = {key: [{name: number(name, value) for name, value in one.items()} for one in stored[key]]
              for key in ("slo", "limits", "personas")}
    return Entry(**{**stored, "row": row, **tables})
