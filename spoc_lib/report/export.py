"""A run for other programs: OpenMetrics text for a dashboard, CSV for a spreadsheet (llm-d's report: `llmd`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.core import schemas
from spoc_lib.core.files import plain, replacing, write_json, write_text
from spoc_lib.core.tables import read_table
from spoc_lib.metrics import METRICS
from spoc_lib.report.answer import Answer

#: Tables of a run that a CSV folder holds: file, schema.
TABLES = {
    "sweep/rungs.parquet": schemas.RUNGS,
    "sweep/slo_verdicts.parquet": schemas.SLO_VERDICTS,
    "sweep/slo_personas.parquet": schemas.SLO_VERDICTS,
    "sweep/slo_limits.parquet": schemas.SLO_VERDICTS,
    "sweep/requests.parquet": schemas.REQUESTS,
    "search/trials.parquet": schemas.TRIALS,
    "nsight/decomposition.parquet": schemas.DECOMPOSITION,
}
Samples = list[tuple[dict[str, Any], float]]


def csv_folder(answer: Answer, folder: Path) -> list[Path]:
    """One CSV a table of the run, `capacity.csv` with the answer in one row, and `provenance.json`. Units stand in the
    column names; an infinite value is `inf`, an absent one empty."""
    written = []
    for name, schema in TABLES.items():
        if (answer.folder / name).is_file():
            path = folder / f"{Path(name).stem}.csv"
            _write_csv(read_table(answer.folder / name, schema), path)
            written.append(path)
    low, high = answer.interval or (math.nan, math.nan)
    row = {
        "run": answer.run, "cluster": answer.cluster.name, "verdict": answer.capacity["verdict"],
        "max_users": answer.users, "low_users": low, "high_users": high, "level": answer.level,
        "binding": answer.binding.get("name"), "saturated": (answer.capacity.get("saturated") or {}).get("resource"),
        "simulated": answer.simulated, "gap_cap_s": answer.capacity["gap_cap_s"],
        "flags": json.dumps(answer.capacity["flags"], sort_keys=True),
    }  # fmt: skip
    _write_csv(pd.DataFrame([row]), folder / "capacity.csv")
    return [*written, folder / "capacity.csv", write_json(folder / "provenance.json", provenance_of(answer))]


def provenance_of(answer: Answer) -> dict[str, Any]:
    """The provenance of each stage of the run, by its folder's name."""
    stages = {"workload": answer.workload, "search": answer.search, "sweep": answer.sweep, "nsight": answer.nsight}
    return {name: result["provenance"] for name, result in stages.items() if result and "provenance" in result}


def _write_csv(table: pd.DataFrame, path: Path) -> None:
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False)


def openmetrics(answer: Answer) -> str:
    """The run as OpenMetrics 1.0 text: the capacity with its interval, each valid rung's latencies and rates, each
    stage's duration. Failures are +Inf, as in the percentiles that they are part of."""
    made = answer.made
    run = {"run": answer.run, "cluster": answer.cluster.name}
    engine = made.get("engine") or {}
    info = {**run, "model": answer.cluster.model_name, "gpu": answer.cluster.hardware.gpu_name,
            "gpus": answer.cluster.hardware.count, "simulated": str(answer.simulated).lower(),
            "verdict": answer.capacity["verdict"], "engine_version": engine.get("version") or "",
            "spoc_version": made.get("spoc", ""), "git": made.get("git", ""), "seed": (made.get("seeds") or {}).get(
                "workload", ""), "calibration": answer.calibration}
    low, high = answer.interval or (math.nan, math.nan)
    users = math.nan if answer.users is None else answer.users
    level = {**run, "level": answer.level}
    families = [
        _family("spoc_run", "info", "What was measured and with what.", [(info, 1)]),
        _family("spoc_capacity_users", "gauge", "Live users that the SLA allows.", [(run, users)]),
        _family("spoc_capacity_low_users", "gauge", "Lower end of the capacity's interval.", [(level, low)]),
        _family("spoc_capacity_high_users", "gauge", "Upper end of the capacity's interval.", [(level, high)]),
        *_rungs(answer, run),
        _family("spoc_stage_duration_seconds", "gauge", "Wall time of a stage.",
                [({**run, "stage": name}, stage["seconds"]) for name, stage in provenance_of(answer).items()]),
    ]
    return "".join(families) + "# EOF\n"


def _rungs(answer: Answer, run: Mapping[str, Any]) -> Iterable[str]:
    rungs = answer.climbed.to_dict("records")
    labels = [{**run, "rung": row["rung"], "users": row["users"]} for row in rungs]
    for metric in ("ttft", "itl", "tpot"):
        samples: Samples = [
            ({**label, "quantile": f"0.{p}"}, row[f"{metric}_p{p}_s"])
            for label, row in zip(labels, rungs, strict=True)
            for p in (50, 95, 99) if f"{metric}_p{p}_s" in row
        ]
        yield _family(f"spoc_rung_{metric}_seconds", "gauge", f"{METRICS[metric].title} of a rung by quantile.",
                      samples)
    for column, name, text in (
        ("output_tokens_per_s", "spoc_rung_output_tokens_per_second", "Output tokens a second."),
        ("request_rate_per_s", "spoc_rung_requests_per_second", "Requests a second."),
        ("cached_ratio", "spoc_rung_cached_ratio", "Share of prompt tokens from the prefix cache."),
        ("kv_usage_ratio", "spoc_rung_kv_usage_ratio", "Share of the KV blocks in use."),
        ("failed", "spoc_rung_failed_requests", "Failed requests."),
    ):
        yield _family(name, "gauge", text, [(label, row[column]) for label, row in zip(labels, rungs, strict=True)])


def _family(name: str, kind: str, text: str, samples: Samples) -> str:
    suffix = "_info" if kind == "info" else ""
    lines = [f"# TYPE {name} {kind}", f"# HELP {name} {text}"]
    lines += [f"{name}{suffix}{{{_labels(labels)}}} {_value(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, Any]) -> str:
    return ",".join(f'{name}="{_escape(str(plain(value)))}"' for name, value in labels.items())


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _value(value: Any) -> str:
    number = float(value) if value is not None else math.nan
    if math.isnan(number):
        return "NaN"
    return repr(number) if math.isfinite(number) else "+Inf" if number > 0 else "-Inf"


def write_openmetrics(answer: Answer, path: Path) -> Path:
    """`openmetrics` into a file."""
    return write_text(path, openmetrics(answer))
