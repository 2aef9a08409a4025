"""The answer in words, computed from the artefacts of one or more runs."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.config import SHARES, Cluster, load_cluster
from spoc_lib.core import schemas
from spoc_lib.core.files import read_json
from spoc_lib.core.tables import read_table
from spoc_lib.report import style


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
    def read(cls, folder: Path) -> Answer:
        """From a run folder with a finished sweep; InputError naming the file that is missing."""
        state = read_json(folder / "run.json", "run state")
        sweep = state["stages"]["03"]["parameters"]
        found = {
            name: folder / part / "result.json"
            for name, part in (("workload", "workload"), ("search", "search"), ("sweep", "sweep"), ("nsight", "nsight"))
        }
        return cls(
            state["run_id"],
            folder,
            load_cluster(sweep["cluster"]),
            read_json(folder / "sweep" / "capacity.json", "capacity answer"),
            read_table(folder / "sweep" / "rungs.parquet", schemas.RUNGS),
            read_table(folder / "sweep" / "slo_verdicts.parquet", schemas.SLO_VERDICTS),
            **{name: read_json(path) if path.exists() else None for name, path in found.items()},
        )

    @property
    def users(self) -> float | None:
        return self.capacity.get("max_users")

    @property
    def interval(self) -> tuple[float, float] | None:
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
    def label(self) -> str:
        return "simulated" if self.capacity.get("simulated") else "measured"


def table(answers: list[Answer]) -> pd.DataFrame:
    """One row a run: cluster, max_users, low, high, what binds, what saturated, flags."""
    rows = []
    for answer in answers:
        low, high = answer.interval or (math.nan, math.nan)
        binding = answer.capacity.get("binding") or {}
        rows.append(
            {
                "cluster": answer.cluster.name,
                "max_users": answer.users,
                "low": low,
                "high": high,
                "users_per_gpu": None if answer.users is None else answer.users / answer.cluster.hardware.count,
                "binding SLO": f"{binding['persona']} {binding['metric']} p{binding['percentile']:g}"
                if binding
                else "none",
                "saturated": (answer.capacity.get("saturated") or {}).get("resource", "unknown").replace("_", " "),
                "numbers": answer.label,
                "run": answer.run,
            }
        )
    return pd.DataFrame(rows)


def sentences(answers: list[Answer]) -> list[str]:
    """The verdict: one sentence a cluster, then the ratio of the first to each other one."""
    found = [_one(answer) for answer in answers]
    known = [a for a in answers if a.users and a.resolved]
    found += [ratio_sentence(known[0], other) for other in known[1:]]
    return found


def _one(answer: Answer) -> str:
    capacity, name = answer.capacity, answer.cluster.title
    if answer.users is None:
        return (
            f"{name}: unresolved ({capacity.get('reason', 'the rungs do not decide')}). "
            f"Next: {capacity.get('next', 'run more rungs')}."
        )
    if not answer.resolved:
        return (
            f"{name}: unresolved, {answer.users:g} users at least as far as the rungs show ({answer.label}): "
            f"{capacity.get('reason', 'the rungs do not decide')}. Next: {capacity.get('next') or 'run more rungs'}."
        )
    low, high = answer.interval or (answer.users, answer.users)
    level = 100 * capacity.get("level", 0.9)
    text = f"{name}: {answer.users:g} users ({low:g} to {high:g} at {level:.0f} %), {answer.label}"
    binding = capacity.get("binding")
    if binding:
        who = "all personas" if binding["persona"] == "all" else f"persona {binding['persona']}"
        metric = f"{binding['metric'].upper()} p{binding['percentile']:g} of {who} at {_time(binding['limit_s'])}" \
            if binding["metric"] not in SHARES else binding["name"]
        text += f"; the limit that breaks first is {metric}"
    saturated = (capacity.get("saturated") or {}).get("resource")
    if saturated and saturated != "unknown":
        text += f"; what saturates is {saturated.replace('_', ' ')}"
    return text + "."


def ratio(first: Answer, second: Answer) -> tuple[float, float, float]:
    """Users of `first` over users of `second`, with the widest interval that both intervals allow."""
    (a_low, a_high), (b_low, b_high) = first.interval, second.interval
    return first.users / second.users, a_low / b_high if b_high else math.nan, a_high / b_low if b_low else math.inf


def ratio_sentence(first: Answer, second: Answer) -> str:
    value, low, high = ratio(first, second)
    gpus = first.cluster.hardware.count / second.cluster.hardware.count
    return (
        f"{first.cluster.name} holds {value:.2f} times the users of {second.cluster.name} ({low:.2f} to {high:.2f}); "
        f"its GPU count alone would say {gpus:g}."
    )


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "infinite (failures)"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def cost_of_being_wrong(answers: list[Answer]) -> list[str]:
    """What happens at the other end of the interval, and just beyond the limit."""
    said = []
    for answer in answers:
        if not answer.users or not answer.interval:
            continue
        low, high = answer.interval
        name = answer.cluster.name
        if low < answer.users:
            said.append(
                f"{name}: planning for {low:g} users is safe at this confidence and leaves up to "
                f"{(high - low) / high:.0%} of the possible users unserved; planning for {answer.users:g} risks "
                f"{(answer.users - low) / low:.0%} too many."
            )
        beyond = answer.climbed[(answer.climbed["users"] > answer.users) & (answer.climbed["verdict"] == "missed")]
        if len(beyond):
            row = beyond.loc[beyond["users"].idxmin()]
            said.append(
                f"{name}: at {row['users']:.0f} users, {row['users'] / answer.users - 1:.0%} above the limit, p95 TTFT "
                f"is {_time(row['ttft_p95_s'])} and p95 ITL {_time(row['itl_p95_s'])}."
            )
    return said


class Cards:
    """The answer at a glance: one card a cluster."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers

    def _repr_html_(self) -> str:
        cards = []
        for position, answer in enumerate(self.answers):
            low, high = answer.interval or ("?", "?")
            big = f"{answer.users:g} users" if answer.resolved else "unresolved"
            text = f"{low:g} to {high:g}" if answer.resolved else str(answer.capacity.get("reason", ""))
            level = f"{answer.capacity.get('level', 0.9):.0%}"
            cards.append(
                f'<div style="border-color:{style.cluster_colour(position)}">'
                f'<div class="small">{html.escape(answer.cluster.title)}</div><div class="big">{big}</div>'
                f'<div>{html.escape(text)} at {level}</div><div class="small">{html.escape(_binding(answer))} '
                f'<span class="badge">{answer.label}</span></div></div>'
            )
        return f'<div class="spoc-answer">{"".join(cards)}</div>'

    def __repr__(self) -> str:
        return "\n".join(sentences(self.answers))


def _binding(answer: Answer) -> str:
    binding = answer.capacity.get("binding")
    if not binding:
        return ""
    if binding["metric"] in SHARES:
        return f"limited by {binding['name']}"
    return f"limited by {binding['metric'].upper()} p{binding['percentile']:g} <= {_time(binding['limit_s'])}"
