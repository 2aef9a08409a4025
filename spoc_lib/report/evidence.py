"""The engineer's part of the verdict: tables over runs, each row from an artefact of its run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd

from spoc_lib.report.answer import Answer
from spoc_lib.report.likeness import hindrances
from spoc_lib.report.verdict import ratio, sentences, table
from spoc_lib.sweep.compare import Swept, compare
from spoc_lib.sweep.fit import cross, margins

_AT_LIMIT = [
    "users",
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "itl_p50_s",
    "itl_p95_s",
    "cached_ratio",
    "kv_usage_ratio",
    "sm_active_ratio",
    "dram_active_ratio",
    "thinking_users",
    "in_flight_users",
    "preemptions",
]


def limit_curve(answers: list[Answer]) -> pd.DataFrame:
    """Capacity under other limits, from the same rungs judged anew: columns metric, limit_s, cluster, users, low, high.

    One metric's limit moves at a time, the others stay. NaN where the rungs do not bound it.
    """
    rows = []
    for answer in answers:
        swept = Swept.read(answer.folder / "sweep")
        for metric, limits in swept.limits.groupby("metric"):
            for limit_s in sorted(limits["limit_s"].unique()):
                found = cross(margins(swept.at(str(metric), float(limit_s)), answer.level), answer.level)
                users, low, high = (v if 0 < v < math.inf else math.nan for v in (found.users, found.low, found.high))
                rows.append(
                    {
                        "metric": metric,
                        "limit_s": limit_s,
                        "cluster": answer.cluster.name,
                        "users": users,
                        "low": low,
                        "high": high,
                    }
                )
    return pd.DataFrame(rows, columns=["metric", "limit_s", "cluster", "users", "low", "high"])


def ratios(answers: list[Answer]) -> pd.DataFrame:
    """Each cluster against the first at every limit they were both judged at (`sweep.compare`)."""
    sweeps = [_named(answer) for answer in answers]
    metrics = sorted(set.intersection(*(set(s.limits["metric"]) for s in sweeps)))
    return pd.concat([compare(sweeps, metric) for metric in metrics], ignore_index=True)


def _named(answer: Answer) -> Swept:
    """The sweep under the name that the report calls its cluster by."""
    swept = Swept.read(answer.folder / "sweep")
    return replace(swept, answer={**swept.answer, "cluster": answer.cluster.name})


def comparable(answers: list[Answer]) -> list[Answer]:
    """The first answer and those that answer the same question as it."""
    return [answer for answer in answers if answer is answers[0] or not hindrances(answer, answers[0])]


def ratio_findings(answers: list[Answer]) -> list[str]:
    """How far the ratio of the clusters moves with the limits."""
    like = comparable(answers)
    if len(like) < 2:
        return ["One cluster only: run a second one to compare." if len(answers) < 2 else
                "No ratio: none of the others answers the question of the first."]
    known = ratios(like).dropna(subset=["ratio"])
    said = []
    for (cluster, metric), rows in known.groupby(["cluster", "metric"], sort=False):
        least, most = rows.loc[rows["ratio"].idxmin()], rows.loc[rows["ratio"].idxmax()]
        said.append(
            f"Over limits on {str(metric).upper()} from {rows['limit_s'].min():g} s to {rows['limit_s'].max():g} s "
            f"{cluster} holds {least['ratio']:.2f} (at {least['limit_s']:g} s) to {most['ratio']:.2f} times (at "
            f"{most['limit_s']:g} s) the users of {least['reference']}; GPU counts alone would say "
            f"{least['naive_gpus']:.2f}, memory bandwidth {least['naive_bandwidth']:.2f}."
        )
    return said or ["The rungs do not reach far enough to judge other limits."]


def at_the_limit(answers: list[Answer]) -> pd.DataFrame:
    """The valid rung nearest to each cluster's limit."""
    rows = [{"cluster": answer.cluster.name, **{name: nearest[name] for name in _AT_LIMIT}}
            for answer in answers if (nearest := answer.nearest) is not None]
    return pd.DataFrame(rows, columns=["cluster", *_AT_LIMIT])


def causes(answers: list[Answer]) -> list[str]:
    """What saturates on each cluster, and the lessons asked of it."""
    said = []
    for answer in answers:
        saturated = answer.capacity.get("saturated")
        if saturated:
            said.append(f"{answer.cluster.name}: {answer.saturated}: {saturated['evidence'][0]}.")
        said += [f"{answer.cluster.name}: {lesson['sentence']}" for lesson in answer.capacity.get("lessons", [])]
    return said


def flags_table(answers: list[Answer]) -> pd.DataFrame:
    """What the search recommends otherwise than the engine's defaults, and its effect."""
    rows = []
    for answer in answers:
        for change in (answer.search or {}).get("changed", []):
            rows.append({"cluster": answer.cluster.name, **change})
    return pd.DataFrame(rows, columns=["cluster", "flag", "default", "chosen"])


def commands(answers: list[Answer]) -> list[str]:
    """The ready command of each cluster."""
    return [
        f"{a.cluster.name}: {a.search['command']}"
        if a.search
        else f"{a.cluster.name}: no search in this run, vLLM's defaults were swept."
        for a in answers
    ]


def kernel_table(answers: list[Answer]) -> pd.DataFrame:
    """Share of GPU time by kernel category, mean over GPUs, in percent; one row a cluster."""
    rows = []
    for answer in answers:
        devices = ((answer.nsight or {}).get("decomposition") or {}).get("devices", [])
        if devices:
            window = sum(d["window_s"] for d in devices)
            busy = {c: 100 * sum(d["busy_s"][c] for d in devices) / window for c in devices[0]["busy_s"]}
            idle = 100 * sum(d["idle_s"] for d in devices) / window
            kind = "simulated" if (answer.nsight or {})["simulated"] else "measured"
            rows.append(
                {
                    "cluster": answer.cluster.name,
                    "trace": kind,
                    **{c: v for c, v in busy.items() if v >= 0.05},
                    "idle": idle,
                }
            )
    return pd.DataFrame(rows).fillna(0.0) if rows else pd.DataFrame(columns=["cluster", "trace"])


def kernel_findings(answers: list[Answer]) -> list[str]:
    """The roofline's sentences of each cluster."""
    return [
        f"{a.cluster.name}: {sentence}"
        for a in answers
        for sentence in ((a.nsight or {}).get("findings") or ["no trace was examined."])
    ]


def gates(answers: list[Answer]) -> pd.DataFrame:
    """Whether each run may be believed: one row a gate."""
    rows = []
    for answer in answers:
        name = answer.cluster.name
        if answer.workload:
            failed = [g["name"] for g in answer.workload["gates"] if not g["passed"]]
            rows.append(
                (name, "workload audit", not failed, "; ".join(failed) or f"{len(answer.workload['gates'])} gates hold")
            )
        invalid = answer.rungs[answer.rungs["verdict"] == "invalid"]
        rows.append(
            (
                name,
                "rungs valid",
                invalid.empty,
                "; ".join(invalid["reason"])
                or f"all {len(answer.rungs)} rungs: planned = completed + failed + censored, Little's law holds",
            )
        )
        compared = answer.capacity.get("twin_vs_http")
        if compared:
            rows.append((name, "twin against real HTTP", bool(compared["passed"]), compared["sentence"]))
        for item in (answer.search or {}).get("confirmations", []):
            rows.append((name, f"{item['role']} confirmed over HTTP", bool(item["agrees"]), item["sentence"]))
        problems = answer.capacity.get("problems") or []
        rows.append((name, "telemetry complete", not problems, "; ".join(problems) or "nothing missing"))
    return pd.DataFrame(rows, columns=["cluster", "gate", "passed", "finding"])


def passports(answers: list[Answer]) -> pd.DataFrame:
    """What stands behind the numbers of each run: one row a fact."""
    rows = []
    for answer in answers:
        name = answer.cluster.name
        if not answer.passport:
            rows.append((name, "measured", "on a real engine; no model stands between"))
            continue
        for key, value in answer.passport.items():
            if value not in (None, [], {}):
                rows.append((name, key.replace("_", " "), _flat(value)))
    return pd.DataFrame(rows, columns=["cluster", "fact", "value"])


def provenance_table(answers: list[Answer]) -> pd.DataFrame:
    """Versions, git state, machine, parameters and time of each run's stages."""
    rows = []
    for answer in answers:
        for stage, result in (
            ("01", answer.workload),
            ("02", answer.search),
            ("03", answer.sweep),
            ("04", answer.nsight),
        ):
            if result:
                made = result["provenance"]
                engine = made.get("engine") or {}
                rows.append(
                    {
                        "run": answer.run,
                        "stage": stage,
                        "git": made["git"],
                        "python": made["python"],
                        "machine": f"{made['client']['cpu']}, {made['client']['cores']} cores",
                        "engine": f"{engine['kind']}, vLLM {engine['version']}" if engine else "none launched",
                        "parameters": _flat(made["parameters"]),
                        "took": f"{made['seconds']:.0f} s",
                        "finished": made["finished"],
                    }
                )
    return pd.DataFrame(rows)


def data_table(answers: list[Answer]) -> pd.DataFrame:
    """sha256 of each file behind each run's sweep, its first 16 digits; equal hashes, equal question."""
    rows = []
    for answer in answers:
        rows += [
            {"run": answer.run, "what": name.replace("_", " "), "sha256": digest[:16]}
            for name, digest in (answer.made.get("data_sha256") or {}).items()
        ]
    return pd.DataFrame(rows, columns=["run", "what", "sha256"])


def to_dict(answers: list[Answer], curve: pd.DataFrame) -> dict[str, Any]:
    """report.json: the verdict, its tables, the curve."""
    return {
        "verdict": sentences(answers),
        "capacities": table(answers).to_dict("records"),
        "ratios": [
            {"first": answers[0].cluster.name, "second": other.cluster.name, "ratio": ratio(answers[0], other)}
            for other in comparable(answers)[1:]
            if answers[0].users and other.users
        ],
        "limits": curve.to_dict("records"),
        "gates": gates(answers).to_dict("records"),
        "runs": [a.run for a in answers],
    }


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_flat(v)}" for k, v in value.items() if v not in ("", 0, 0.0, None))
    return "; ".join(_flat(v) for v in value) if isinstance(value, list) else str(value)
