"""A finished run with a known truth, made without an engine: shares beyond the limit drawn around a given capacity."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from spoc_lib.config import load_cluster, load_profile
from spoc_lib.core import schemas
from spoc_lib.core.files import write_json
from spoc_lib.core.tables import write_table
from spoc_lib.report import provenance
from spoc_lib.sweep.capacity import capacity
from spoc_lib.sweep.fit import cross, margins

USERS = (60, 80, 100, 110, 115, 120, 125, 130, 140, 160)
LIMITS = {"ttft": 5.0, "itl": 0.05}
#: How steeply the log-odds of a late sample climb with users, a capacity's worth of them.
STEEPNESS = 12.0
LEVEL, SAMPLES = 0.9, 1200


def _odds(share: float) -> float:
    return math.log(share / (1 - share))


def _row(rung: int, users: int, metric: str, truth: float, random: np.random.Generator) -> dict:
    share = 1 / (1 + math.exp(-(_odds(0.05) + STEEPNESS * (users / truth - 1))))
    late = int(random.binomial(SAMPLES, share))
    ends = [float(stats.beta.ppf(q, late + 0.5, SAMPLES - late + 0.5)) for q in (0.05, 0.95)]
    value, low, high = (LIMITS[metric] * math.exp((_odds(min(max(s, 1e-4), 0.9999)) - _odds(0.05)) / 8)
                        for s in (late / SAMPLES, *ends))
    verdict = "met" if ends[1] <= 0.05 else "missed" if ends[0] > 0.05 else "undecided"
    return {"rung": rung, "users": users, "driver": "virtual", "persona": "all", "metric": metric, "percentile": 95.0,
            "limit_s": LIMITS[metric], "value_s": value, "low_s": low, "high_s": high, "samples": SAMPLES,
            "verdict": verdict, "beyond_ratio": late / SAMPLES, "beyond_low_ratio": ends[0],
            "beyond_high_ratio": ends[1], "effective": float(SAMPLES)}  # fmt: skip


def _requests(random: np.random.Generator) -> pd.DataFrame:
    count = 200
    send = np.sort(random.uniform(0, 100, count))
    tokens = random.integers(2, 400, count)
    first = send + random.exponential(0.4, count)
    rows = pd.DataFrame({name: [None] * count for name in schemas.REQUESTS.names})
    rows = rows.assign(
        request=range(count), persona="P0", user=0, conversation=0, turn=0, kind="agent", intended_send_s=send,
        send_s=send, first_token_s=first, end_s=first + 0.01 * tokens, ttft_s=first - send,
        intended_prompt_tokens=3000, intended_output_tokens=tokens, prompt_tokens=3000, output_tokens=tokens,
        cached_tokens=2000, tokens_source="usage", chunks=tokens, outcome="completed", http_status=200)  # fmt: skip
    rows.loc[:3, ["outcome", "first_token_s", "ttft_s", "output_tokens"]] = ["failed", np.nan, np.nan, None]
    return rows


def make_run(folder: Path, truth: float, *, seed: int, version: str = "0.32.0", cluster: str = "sim-4xh100",
             ttft_truth: float = 400.0, gap_cap_s: float = 60.0, personas: str = "same") -> Path:
    """The run folder of a sweep whose ITL passes its limit at `truth` users, its TTFT at `ttft_truth`."""
    random = np.random.default_rng(seed)
    rows = [_row(rung, users, metric, at, random) for rung, users in enumerate(USERS)
            for metric, at in (("ttft", ttft_truth), ("itl", truth))]
    slo = pd.DataFrame(rows)
    rungs = pd.DataFrame([{name: None for name in schemas.RUNGS.names} | _rung(r, u, slo) for r, u in enumerate(USERS)])
    spec, profile = load_cluster(cluster), load_profile("quick")
    found = cross(margins(slo, LEVEL), LEVEL)
    answer = capacity(
        found, rungs, slo, flags={"max_num_seqs": 256}, simulated=True, saturated=None, lessons=[],
        passport={"simulated": True, "calibration_id": "7cc016b83f89"}, on_ladder=set(range(len(USERS))),
        cluster={"cluster": spec.name, "title": spec.title, "gpu": spec.hardware.gpu, "gpus": spec.hardware.count,
                 "price_per_gpu_hour": None, "model": spec.model},
        more={"gap_cap_s": gap_cap_s, "rung_s": 400.0, "limit_rung": 5, "fresh_users": True, "twin_vs_http": None})
    sweep = folder / "sweep"
    write_table(sweep / "rungs.parquet", rungs, schemas.RUNGS)
    for name in ("slo_verdicts", "slo_limits"):
        write_table(sweep / f"{name}.parquet", slo, schemas.SLO_VERDICTS)
    for rung in (3, 5):
        write_table(sweep / "rungs" / f"{rung:02d}" / "requests.parquet", _requests(random), schemas.REQUESTS)
    write_json(sweep / "server" / "launch.json", {
        "kind": "process", "version": version, "flags": {"max_num_seqs": 256}, "model": spec.model,
        "passport": {"calibration_id": "7cc016b83f89"}})
    parameters = {"cluster": cluster, "profile": "quick", "seed": seed, "personas": ""}
    made = provenance.collect(spec, profile, parameters, 12.0, data={"personas": personas}, launches=sweep)
    write_json(sweep / "capacity.json", answer)
    write_json(sweep / "result.json", {**answer, "findings": [], "provenance": made})
    write_json(folder / "run.json", {
        "run_id": folder.name, "anchor": {"monotonic_s": 0.0, "wall_s": time.time()}, "cluster": spec.name,
        "stages": {"03": {"state": "done", "parameters": parameters, "findings": []}}})
    assert json.loads((sweep / "capacity.json").read_text())["verdict"] == "resolved"
    return folder


def _rung(rung: int, users: int, slo: pd.DataFrame) -> dict:
    at = {row["metric"]: row["value_s"] for row in slo[slo["rung"] == rung].to_dict("records")}
    verdicts = set(slo.loc[slo["rung"] == rung, "verdict"])
    verdict = "missed" if "missed" in verdicts else "undecided" if "undecided" in verdicts else "met"
    return {"rung": rung, "users": users, "driver": "virtual", "start_s": 0.0, "window_start_s": 0.0,
            "window_end_s": 100.0, "end_s": 100.0, "planned": 200, "completed": 196, "failed": 4, "censored": 0,
            "thinking_users": 0.8 * users, "in_flight_users": 0.2 * users, "output_tokens_per_s": 10.0 * users,
            "prompt_tokens_per_s": 100.0 * users, "request_rate_per_s": 2.0, "cached_ratio": 0.9, "kv_usage_ratio": 0.1,
            **{f"ttft_p{p}_s": at["ttft"] for p in (50, 95)}, "ttft_p99_s": math.inf,
            **{f"itl_p{p}_s": at["itl"] for p in (50, 95, 99)}, "tpot_p50_s": 0.01, "tpot_p95_s": 0.02,
            "client_limited": False, "verdict": verdict, "binding": "all itl p95 <= 0.05 s", "reason": ""}


@pytest.fixture(scope="session")
def made_run():
    return make_run
