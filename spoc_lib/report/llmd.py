"""A run in llm-d's benchmark report (schema 0.2.1 of PyPI `llmd-benchmark-report`): one report a rung of the ladder.

The reports of a run share `run.eid`; `scenario.load.standardized.stage` is the rung. What the schema has no word for
stands where it leaves room: live users (conversations that think, wait or read; not requests in flight) in
`load.native.config`, the rung's verdict and the server's gauges in `results.observability.spoc`.

Their percentiles are over answered requests, failures counted beside them; ours count a failure as infinitely late.
Both are given: `request_performance` follows theirs, `observability.spoc` ours.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from spoc_lib.config import load_gpu
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import plain, write_text
from spoc_lib.core.schemas import REQUESTS
from spoc_lib.core.stats import percentile
from spoc_lib.core.tables import read_table
from spoc_lib.core.version import VERSION
from spoc_lib.metrics import METRICS, Measured
from spoc_lib.report.answer import Answer
from spoc_lib.report.export import provenance_of

SCHEMA_VERSION = "0.2.1"
#: Percentiles that the schema names.
POINTS = {"p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}


def reports(answer: Answer) -> dict[str, dict[str, Any]]:
    """{file name: report} for every valid rung whose requests are kept; InputError where none is."""
    found = {}
    for row in answer.climbed.sort_values("rung").to_dict("records"):
        path = answer.folder / "sweep" / "rungs" / f"{int(row['rung']):02d}" / "requests.parquet"
        if path.is_file():
            found[f"rung-{int(row['rung']):02d}-{int(row['users'])}-users.yaml"] = _report(
                answer, row, read_table(path, REQUESTS))
    if not found:
        raise InputError("no-requests", f"run '{answer.run}' keeps no requests of a valid rung, so there is nothing to "
                         "report: run its sweep again")
    return found


def write(answer: Answer, folder: Path) -> list[Path]:
    """`reports` as YAML files in `folder`, each put before llm-d's own validator where that is installed."""
    written = []
    for name, report in reports(answer).items():
        validate(report)
        written.append(write_text(folder / name, yaml.safe_dump(plain(report), sort_keys=False, allow_unicode=True)))
    return written


def validate(report: dict[str, Any]) -> None:
    """Put a report before llm-d's own validator (pydantic's ValidationError); nothing where it is not installed."""
    if validator():
        from llmd_benchmark_report import load_benchmark_report

        load_benchmark_report(plain(report))


def validator() -> str | None:
    """Version of `llmd-benchmark-report`, None where it is not installed."""
    try:
        return metadata.version("llmd-benchmark-report")
    except metadata.PackageNotFoundError:
        return None


def _report(answer: Answer, row: dict[str, Any], requests: pd.DataFrame) -> dict[str, Any]:
    """One rung. `requests` are all of it; those sent within its window are reported."""
    seen = Measured(requests, None, (row["window_start_s"], row["window_end_s"]), row["end_s"])
    window, seconds = requests[seen.sent], row["window_end_s"] - row["window_start_s"]
    clock = "simulated seconds" if row["driver"] == "virtual" else "seconds"
    return {
        "version": SCHEMA_VERSION,
        "run": {
            "uid": _digest([answer.run, int(row["rung"])]),
            "eid": _digest([answer.run]),
            "cid": _digest([answer.cluster.name]),
            "time": {"duration": f"PT{seconds:.3f}S"},
            "description": f"{answer.cluster.title}: {int(row['users'])} live users, {seconds:.0f} {clock} of a steady "
                           f"window; run {answer.run}",
            "keywords": ["spoc", answer.label, str(row["verdict"])],
        },
        "scenario": {"stack": [_engine(answer)], "load": _load(answer, row, window)},
        "results": {
            "request_performance": {"aggregate": _aggregate(row, window, seen)},
            "observability": {"spoc": {"rung": plain(row), "capacity": _capacity(answer)}},
        },
    }


def _engine(answer: Answer) -> dict[str, Any]:
    """The engine as llm-d's `inference_engine`; a twin calls itself one."""
    engine = answer.made.get("engine") or {}
    parallel = {"tp": "tensor_parallel_size", "dp": "data_parallel_size", "pp": "pipeline_parallel_size"}
    return {
        "metadata": {
            "label": answer.cluster.name, "cfg_id": _digest(answer.flags),
            "description": f"simulated by SPOC's twin of vLLM, calibration {answer.calibration or 'none'}"
            if answer.simulated else answer.cluster.title,
        },
        "standardized": {
            "kind": "inference_engine",
            "tool": "spoc-twin-of-vllm" if answer.simulated else "vllm",
            "tool_version": str(engine.get("version") or "not recorded"),
            "role": "replica", "replicas": 1, "model": {"name": answer.cluster.model_name},
            "accelerator": {
                "model": load_gpu(answer.cluster.hardware.gpu).title, "count": answer.cluster.hardware.count,
                "parallelism": {short: int(answer.flags.get(name, 1)) for short, name in parallel.items()},
            },
        },
        "native": {"args": {f"--{name.replace('_', '-')}": value for name, value in sorted(answer.flags.items())}},
    }  # fmt: skip


def _load(answer: Answer, row: dict[str, Any], window: pd.DataFrame) -> dict[str, Any]:
    native = {
        "live_users": int(row["users"]), "thinking_users": row["thinking_users"],
        "in_flight_users": row["in_flight_users"], "gap_cap_s": answer.capacity["gap_cap_s"],
        "personas": answer.cluster.personas, "slos": [slo.name for slo in answer.cluster.slos],
        "provenance": provenance_of(answer),
    }  # fmt: skip
    prompt = window["prompt_tokens"].fillna(window["intended_prompt_tokens"])
    return {
        "metadata": {"cfg_id": _digest(answer.made.get("data_sha256") or answer.cluster.personas),
                     "description": "closed loop of stateful, multi-turn conversations over a shared monorepo"},
        "standardized": {
            "tool": "spoc", "tool_version": VERSION, "source": "sampled", "stage": int(row["rung"]),
            "input_seq_len": _lengths(prompt), "output_seq_len": _lengths(window["intended_output_tokens"]),
            "multi_turn": {"enabled": True},
        },
        "native": {"config": plain(native)},
    }  # fmt: skip


def _aggregate(row: dict[str, Any], window: pd.DataFrame, seen: Measured) -> dict[str, Any]:
    """Their latencies: ours, of the completed requests alone."""
    answered = (seen.records.completed & seen.sent)[seen.sent]
    tokens = window["output_tokens"].fillna(0).to_numpy(float)[answered]
    ttft_s, tpot_s, e2e_s = (METRICS[name].of(seen).value_s[seen.sent][answered] for name in ("ttft", "tpot", "e2e"))
    several = tokens > 1
    latency = {
        "time_to_first_token": _statistics("s", ttft_s),
        "request_latency": _statistics("s", e2e_s),
        "normalized_time_per_output_token": _statistics("s/token", e2e_s[tokens > 0] / tokens[tokens > 0]),
        "time_per_output_token": _statistics("s/token", tpot_s),
    }
    if several.any():
        latency["inter_token_latency"] = {
            "units": "s/token", "mean": float(np.average(tpot_s[several], weights=tokens[several] - 1)),
            **{f"p{p}": row[f"itl_p{p}_s"] for p in (50, 95, 99) if np.isfinite(row[f"itl_p{p}_s"])}}
    prompt = window["prompt_tokens"].fillna(window["intended_prompt_tokens"])
    return {
        "requests": {
            "total": len(window), "failures": int((window["outcome"] == "failed").sum()),
            "incomplete": int((window["outcome"] == "censored").sum()),
            "input_length": _statistics("count", prompt), "output_length": _statistics("count", tokens),
        },
        "latency": {name: value for name, value in latency.items() if value},
        "throughput": {
            "input_token_rate": {"units": "tokens/s", "mean": row["prompt_tokens_per_s"]},
            "output_token_rate": {"units": "tokens/s", "mean": row["output_tokens_per_s"]},
            "total_token_rate": {"units": "tokens/s", "mean": row["prompt_tokens_per_s"] + row["output_tokens_per_s"]},
            "request_rate": {"units": "queries/s", "mean": row["request_rate_per_s"]},
        },
    }  # fmt: skip


def _statistics(units: str, values: np.ndarray | pd.Series) -> dict[str, Any] | None:
    known = pd.Series(values).dropna().to_numpy(float)
    if not known.size:
        return None
    return {"units": units, "mean": float(known.mean()), "stddev": float(known.std()), "min": float(known.min()),
            **{name: percentile(known, point) for name, point in POINTS.items()}, "max": float(known.max())}


def _lengths(values: pd.Series) -> dict[str, Any]:
    known = values.dropna().astype(float)
    if known.empty:
        return {"distribution": "other", "value": 0}
    return {"distribution": "other", "value": float(known.mean()), "std_dev": float(known.std(ddof=0)),
            "min": int(known.min()), "max": max(1, int(known.max()))}


def _capacity(answer: Answer) -> dict[str, Any]:
    names = ("max_users", "interval", "level", "verdict", "reason", "binding", "saturated", "simulated", "passport")
    return plain({name: answer.capacity.get(name) for name in names})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:32]
