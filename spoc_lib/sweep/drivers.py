"""The two ways to play a rung, with one kind of record: the twin's virtual clock, and Locust over real
HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pandas as pd

from spoc_lib.config import Cluster
from spoc_lib.core import yamlfile
from spoc_lib.core.clock import Anchor
from spoc_lib.core.files import write_text
from spoc_lib.core.yamlfile import Strict
from spoc_lib.engine.http.marks import mark
from spoc_lib.sweep.record import RungRecord, Say, Timing, needed, settled
from spoc_lib.telemetry.recorder import Recorder
from spoc_lib.workload.script import ConversationScript

#: A host busier than this during a rung over HTTP has no time left for punctual timers.
HOST_BUSY = 0.9
#: The longest cold start that is waited for, in simulated seconds.
LONGEST_SETTLE_S = 900.0
ScriptFactory = Callable[[int], ConversationScript]


class FreshUsers:
    """Scripts for rungs: a new salt (cold cache) and, where the script can, a new seed (other users) each
    time.

    Rungs with the same users would share their luck: their common error would not show in any interval. A
    script that cannot be reseeded (imported sessions) is used as it is; `reseeds` tells.
    """

    def __init__(self, factory: ScriptFactory) -> None:
        self._factory = factory
        script = factory(0)
        self.reseeds = dataclasses.is_dataclass(script) and "seed" in {one.name for one in dataclasses.fields(script)}
        self.personas = sorted({script.user(number).persona for number in range(64)})
        self.gap_cap_s = float(getattr(script, "gap_cap_s", 60.0))

    def script(self, salt: int) -> ConversationScript:
        """The script of the rung with this salt, its seed moved on by the salt."""
        script = self._factory(salt)
        if not self.reseeds:
            return script
        return dataclasses.replace(cast(Any, script), seed=script.seed + salt)  # `reseeds`: it is a dataclass

    def plain(self, salt: int) -> ConversationScript:
        """The factory's own script: what a load plan with the same seed and salt plays over HTTP."""
        return self._factory(salt)


def virtual_rung(engine: Any, script: ConversationScript, users: int, timing: Timing, seed: int) -> RungRecord:
    """Play the script on the twin's virtual clock, its window beginning once the cold start is over.

    Users found in mid-conversation bring long histories that a running server would hold in its cache, and a fresh
    one computes all at once: a storm that may last minutes and says nothing about the steady state. The window begins
    `warmup_s` after every user has had its first answer (at the latest after `LONGEST_SETTLE_S`) and is as long as
    planned; the run is played on for as long as that takes.
    """
    from spoc_lib.engine import virtual

    measured_s = timing.duration_s - timing.warmup_s
    horizon_s = timing.duration_s + getattr(script, "gap_cap_s", 60.0)
    while True:
        with mark(f"rung users={users} driver=virtual"):
            run = virtual.play(script, users, engine=engine, duration_s=horizon_s, warmup_s=timing.warmup_s, seed=seed)
        settled_s = settled(run.requests, users)
        start_s = min(horizon_s if settled_s is None else settled_s, LONGEST_SETTLE_S) + timing.warmup_s
        if start_s + measured_s <= horizon_s:
            break
        horizon_s = start_s + measured_s if settled_s is not None else \
            min(2 * horizon_s, LONGEST_SETTLE_S + timing.duration_s)
    return RungRecord("virtual", run.requests, run.chunks, run.metrics, (start_s, start_s + measured_s), 0.0, horizon_s,
                      len(run.requests), steps=run.steps, outside=run.passport.get("outside", []))


def twin_rung(engine: Any, script: ConversationScript, users: int, timing: Timing, seed: int) -> RungRecord:
    """The virtual clock over exactly the seconds of a rung over HTTP, cold start and all: its twin."""
    from spoc_lib.engine import virtual

    run = virtual.play(script, users, engine=engine, duration_s=timing.duration_s, warmup_s=timing.warmup_s, seed=seed)
    return RungRecord("virtual", run.requests, run.chunks, run.metrics, run.window, 0.0, timing.duration_s,
                      len(run.requests), steps=run.steps)


def http_rung(cluster: Cluster, server: Any, script: ConversationScript, users: int, timing: Timing, folder: Path,
              say: Say, *, processes: int = 1,
              watch: Callable[[dict[str, Any]], None] = lambda state: None) -> RungRecord:
    """Play the script's seed and salt with Locust users against a running server, its metrics recorded
    beside.

    The window is everything after the warm-up, as on the virtual clock, so that the two can be compared.
    watch: told each state of the load (`load.run`) as it runs.
    """
    from spoc_lib import load

    tokens, said = whose_tokens(cluster, server, script)
    plan = load.LoadPlan(
        base_url=server.base_url, model=server.model, personas=_personas(cluster, script, folder), users=users,
        corpus=cluster.corpus, tokenizer=tokens,
        duration_s=timing.duration_s, warmup_s=timing.warmup_s, seed=script.seed, salt=script.salt,
        gap_cap_s=getattr(script, "gap_cap_s", 60.0), start=getattr(script, "start", "stationary"),
        context_limit=getattr(script, "context_limit", None), scale=getattr(script, "scale", 1.0),
        processes=processes, **cluster.engine.common())

    def told(state: dict[str, Any]) -> None:
        watch(state)
        say(f"{users} users over HTTP: {state['elapsed_s']:.0f} of {state['duration_s']:.0f} s, "
            f"{state['in_flight']} in flight, {state['completed']} answered, {state['failed']} failed")

    dcgm_url = cluster.telemetry.dcgm_url or server.dcgm_url
    anchor, before = Anchor.now(), _host_seconds()
    with Recorder(server.metrics_url, dcgm_url, folder / "server_metrics.parquet", access=cluster.engine) as recorder, \
            mark(f"rung users={users} driver=locust"):
        run = load.run(plan, folder, told)
    busy = _busy_ratio(before, _host_seconds())
    limits = [f"with {users} users over HTTP: {text}"
              for text in (*run.summary["client_limits"], *run.summary["outages"])]
    seen, problems = recorder.metrics, [*said, *recorder.problems, *limits]
    if busy is not None and busy > HOST_BUSY:
        problems.append(f"this host's processors were {busy:.0%} busy during the HTTP rung with {users} users: late "
                        f"timers of client and server are in its latencies")
    aligned_s = recorder.alignment_error_s
    if cluster.telemetry.prometheus_url:
        seen, problems, aligned_s = _from_prometheus(cluster.telemetry.prometheus_url, anchor, recorder, problems)
    metrics = pd.concat([part for part in (run.metrics, seen) if len(part)], ignore_index=True) \
        if len(run.metrics) or len(seen) else seen
    start_s = float(run.summary["start_s"])
    stop_s = start_s + timing.duration_s if not run.summary["interrupted"] else run.window[1]
    ends = run.requests["end_s"].max()
    needs = needed(run.requests, users, timing, start_s)
    if needs is not None:
        problems.append(needs.sentence)
    return RungRecord(
        "locust", run.requests, run.chunks, metrics, (start_s + timing.warmup_s, stop_s), start_s,
        max(stop_s, float(ends)) if pd.notna(ends) else stop_s, int(run.summary["planned"]),
        bool(run.summary["client_limited"]), problems=problems,
        overhead_ratio=max(recorder.overhead().values(), default=None), host_busy_ratio=busy,
        alignment_error_s=aligned_s, load=run.summary, needs=needs)


def _host_seconds() -> tuple[float, float] | None:
    """(idle, all) processor seconds of this host since it started, where Linux tells."""
    try:
        fields = [float(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return fields[3] + fields[4], sum(fields)


def _busy_ratio(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return 1 - (after[0] - before[0]) / (after[1] - before[1])


def whose_tokens(cluster: Cluster, server: Any, script: ConversationScript) -> tuple[str, list[str]]:
    """(a load plan's `tokenizer`, sentences): the target's own tokens where it can be asked for them.

    The embedded engine counts with the offline tokenizer; recorded sessions keep the sizes of their recording.
    """
    if cluster.engine.kind == "embedded" or not isinstance(getattr(script, "personas", None), Strict):
        return "offline", []
    from spoc_lib.workload.target import tokenizer_refusal

    refusal = tokenizer_refusal(server.base_url, server.model, cluster.engine)
    if refusal is None:
        return "target", []
    return "offline", [f"prompt sizes over HTTP are counted with the offline tokenizer and may differ from the "
                       f"server's own: {refusal}"]


def _personas(cluster: Cluster, script: ConversationScript, folder: Path) -> str:
    """What the load child loads: the script's own persona set, written beside the rung, else the
    cluster's."""
    personas = getattr(script, "personas", None)
    if not isinstance(personas, Strict):
        return cluster.personas
    text = yamlfile.dump(personas.model_dump(mode="json"))
    return str(write_text(folder / "personas.yaml", text).resolve())


def _from_prometheus(url: str, anchor: Anchor, recorder: Recorder,
                     problems: list[str]) -> tuple[pd.DataFrame, list[str], float]:
    """The rung's telemetry from the cluster's Prometheus; the recorder's own where that failed or was away, and
    it is said."""
    from spoc_lib.telemetry import prometheus

    try:
        found = prometheus.fetch_run(url, anchor.to_wall(recorder.started_s),
                                     anchor.to_wall(recorder.ended_s), anchor=anchor)
    except prometheus.PrometheusUnavailable as error:
        return recorder.metrics, [*problems, f"{error.message}; the direct scrape is used instead"], \
            recorder.alignment_error_s
    if found.metrics.empty or (found.holes and not recorder.metrics.empty):
        return recorder.metrics, [*problems, *found.problems, "the direct scrape is used instead"], \
            recorder.alignment_error_s
    return found.metrics, [*problems, *found.problems], found.alignment_error_s
