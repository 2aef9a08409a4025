"""The workbench from a blank notebook: a few functions whose results show themselves.

Everything here is what the numbered notebooks call too; nothing starts a server or opens a socket.
"""

from __future__ import annotations

import html
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spoc_lib import config
from spoc_lib.config import Cluster, FlagValue
from spoc_lib.core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from spoc_lib.report.answer import Answer
    from spoc_lib.report.comparison import Compared
    from spoc_lib.sweep.quick import QuickCapacity

#: In fewer simulated seconds a try sees too few answers to judge.
LEAST_MEASURED_S = 10.0


def clusters() -> list[str]:
    """Names of the clusters that ship, for `cluster`."""
    return config.names("clusters")


def cluster(name_or_path: str | os.PathLike[str] = "sim-4xh100") -> Cluster:
    """A cluster by its name in data/clusters/ or by the path of a YAML file; InputError names the faulty field."""
    from spoc_lib.workload.personas import with_persona_slos

    return with_persona_slos(config.load_cluster(os.fspath(name_or_path)))


def quick_capacity(cluster: Cluster | str | os.PathLike[str], *, profile: str = "quick", seed: int = 1,
                   gap_cap_s: float | None = None, measured_s: float = 120.0, near: int | None = None,
                   progress: bool = True, **flags: FlagValue) -> Capacity:
    """How many users the cluster's twin holds under its SLOs: seconds of bisection on the virtual clock, no server.

    flags: vLLM's, as words: `quick_capacity(c, max_num_seqs=64)`; gap_cap_s: cap on think time (None: the profile's);
    measured_s: simulated seconds of each try; near: users at which to begin (None: the cluster's search target);
    progress: say on stderr what is being tried.
    One sample of users, so no interval: `spoc run` gives one. InputError for a real engine, or flags that do not fit.
    """
    from spoc_lib.sweep.cases import Case

    chosen = cluster if isinstance(cluster, Cluster) else globals()["cluster"](cluster)
    if not chosen.simulated:
        raise InputError("no-twin", f"cluster '{chosen.name}' is a real engine, which only load can measure: run "
                         f"`spoc run {chosen.name}`, or ask one of {', '.join(_simulated())}")
    if not measured_s >= LEAST_MEASURED_S:
        raise InputError("too-short", f"measured_s must be at least {LEAST_MEASURED_S:g} simulated seconds, not "
                         f"{measured_s:g}: hardly an answer ends in less")
    work = config.load_profile(profile)
    case = Case.of(chosen, work, dict(flags), seed=seed, near=near or chosen.search.target_users,
                   measured_s=measured_s, **({} if gap_cap_s is None else {"gap_cap_s": gap_cap_s}))

    def trying(users: int) -> None:
        if progress:
            print(f"{chosen.name}: {users} users …", file=sys.stderr, flush=True)

    return Capacity(chosen, dict(flags), case.gap_cap_s, measured_s, case.answer(trying))


def _simulated() -> list[str]:
    return [name for name in clusters() if config.load_cluster(name).simulated]


@dataclass(frozen=True)
class Capacity:
    """The answer of `quick_capacity`: `users` are the most that met every SLO, `missed` the fewest that did not."""

    cluster: Cluster
    flags: dict[str, FlagValue]
    gap_cap_s: float
    measured_s: float
    found: QuickCapacity

    @property
    def users(self) -> int:
        """The most users that met every SLO."""
        return self.found.users

    @property
    def missed(self) -> int | None:
        """The fewest users that did not; None where none were found."""
        return self.found.missed

    @property
    def binding(self) -> str | None:
        """Name of the SLO that breaks first."""
        return self.found.binding

    @property
    def rungs(self) -> pd.DataFrame:
        """One row a number of users that was tried."""
        return self.found.rungs

    @property
    def passport(self) -> dict[str, Any]:
        """What stands behind the number: calibration, its range and error, what lay outside."""
        return self.found.passport

    @property
    def sentence(self) -> str:
        """The answer in words, with what it was asked under."""
        beyond = f"{self.missed} miss it" if self.missed is not None else "no limit was found"
        binding = f"; {self.binding} breaks first" if self.binding else ""
        flags = " ".join(f"{name}={value}" for name, value in self.flags.items()) or "vLLM's defaults"
        return (f"{self.cluster.name} holds {self.users} users under its SLA, {beyond}{binding} (simulated, {flags}, "
                f"{self.measured_s:g} s of each try, think times capped at {self.gap_cap_s:g} s).")

    def figure(self) -> go.Figure:
        """Each SLO's percentile, as a share of its limit, against users."""
        import plotly.graph_objects as go

        from spoc_lib.report import style

        style.activate()
        figure = go.Figure()
        for place, slo in enumerate(self.cluster.slos):
            look = style.Look(place)
            if slo.limit_ratio is None:
                figure.add_scatter(x=self.rungs["users"], y=self.rungs[slo.name] / slo.limit_s, name=slo.name,
                                   mode="lines+markers", line=look.line, marker=look.marker)
        figure.add_hline(y=1, line={"dash": "dash", "color": style.RED}, annotation_text="limit")
        figure.update_yaxes(title_text="percentile over its limit", type="log", dtick="D2")
        return figure.update_layout(title=f"How near each limit is: {self.cluster.name}", xaxis_title="live users")

    def __dir__(self) -> list[str]:
        return ["binding", "cluster", "figure", "flags", "found", "gap_cap_s", "measured_s", "missed", "passport",
                "rungs", "sentence", "users"]

    def __repr__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        outside = self.passport.get("outside") or []
        beyond = f"<p>Outside the measured range: {html.escape('; '.join(outside))}.</p>" if outside else ""
        return (f'<div><b style="font-size:1.6em">{self.users} users</b> <i>simulated</i>'
                f"<p>{html.escape(self.sentence)}</p>{beyond}</div>")


def runs() -> pd.DataFrame:
    """The runs in outputs/, newest first: run, cluster, status, verdict, users, flags, started."""
    import pandas as pd

    from spoc_lib.pipeline.runs import outputs_dir
    from spoc_lib.report import index

    names = ["run", "cluster", "status", "users", "verdict", "flags", "started"]
    return pd.DataFrame([{name: getattr(row, name) for name in names} for row in index.rows(outputs_dir())],
                        columns=names)


def run(run_id_or_path: str) -> Answer:
    """What a finished run found: its capacity, rungs, SLO verdicts, stage results. It shows itself as a card."""
    from spoc_lib.pipeline.runs import Run
    from spoc_lib.report.payer import ShownAnswer

    return ShownAnswer.read(Run.open(run_id_or_path).folder)


def latest(cluster: str) -> Answer:
    """The newest run of a cluster."""
    from spoc_lib.pipeline.runs import Run

    return run(str(Run.latest(cluster).folder))


def compare(reference: Answer | str, *others: Answer | str) -> list[Compared]:
    """Runs against a reference: whether the difference in users is real, and which SLO tells why."""
    from spoc_lib.report import comparison

    answers: Sequence[Answer] = [run(one) if isinstance(one, str) else one for one in (reference, *others)]
    return comparison.compare_runs(answers)
