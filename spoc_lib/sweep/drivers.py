"""The two ways to play a rung, with one kind of record: the twin's virtual clock, and Locust over real
HTTP."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import pandas as pd

from spoc_lib.config import Cluster
from spoc_lib.config.cluster import metrics_page
from spoc_lib.core import yamlfile
from spoc_lib.core.clock import Anchor
from spoc_lib.core.files import write_text
from spoc_lib.core.yamlfile import Strict
from spoc_lib.engine.http.marks import mark
from spoc_lib.sweep.record import RungRecord, Say, Timing, needed, settled
from spoc_lib.telemetry.recorder import Recorder
from spoc_lib.telemetry.whose import Ours
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
    with Recorder(server.metrics_url, dcgm_url, folder / "server_metrics.parquet",
                  access=metrics_page(cluster, server.base_url)[1]) as recorder, \
            mark(f"rung users={users} driver=locust"):
        run = load.run(plan, folder, told)
    busy = _busy_ratio(before, _host_seconds())
    limits = [f"with {users} users over HTTP: {text}"
              for text in (*run.summary["client_limits"], *run.summary["outages"])]
    start_s = float(run.summary["start_s"])
    stop_s = start_s + timing.duration_s if not run.summary["interrupted"] else run.window[1]
    window = (start_s + timing.warmup_s, stop_s)
    seen, noted, aligned_s = _telemetry(cluster, server, anchor, recorder, window)
    problems = [*said, *noted, *limits]
    if busy is not None and busy > HOST_BUSY:
        problems.append(f"this host's processors were {busy:.0%} busy during the HTTP rung with {users} users: late "
                        f"timers of client and server are in its latencies")
    metrics = pd.concat([part for part in (run.metrics, seen) if len(part)], ignore_index=True) \
        if len(run.metrics) or len(seen) else seen
    ends = run.requests["end_s"].max()
    needs = needed(run.requests, users, timing, start_s)
    if needs is not None:
        problems.append(needs.sentence)
    return RungRecord(
        "locust", run.requests, run.chunks, metrics, window, start_s,
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


def ours_of(cluster: Cluster, server: Any, models: Iterable[str] = ()) -> Ours:
    """What is known of the engine's series: the cluster file's words, its address, its models, its GPUs."""
    telemetry, flags = cluster.telemetry, server.flags
    parallel = math.prod(int(flags.get(f"{way}_parallel_size") or 1) for way in ("tensor", "pipeline", "data"))
    gpus: list[int | str] = list(telemetry.gpus)
    if not gpus and cluster.engine.kind == "process":  # it was started here, and sees no others
        named = cluster.engine.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        gpus = [one.strip() for one in named.split(",") if one.strip() and not one.strip().startswith("MIG-")]
    return Ours(telemetry.match, gpus, telemetry.hosts, server.base_url, sorted({server.model, *models}),
                parallel if "tensor_parallel_size" in flags else cluster.hardware.count, cluster.simulated)


def _telemetry(cluster: Cluster, server: Any, anchor: Anchor, recorder: Recorder,
               window: tuple[float, float]) -> tuple[pd.DataFrame, list[str], float]:
    """(METRICS of the rung, sentences, alignment error): of server and GPUs each, the cluster's Prometheus or the
    direct scrape, whichever tells more of the window."""
    from spoc_lib.telemetry import prometheus

    ours = ours_of(cluster, server, recorder.models)
    direct, said = ours.kept(recorder.metrics, "the page")
    problems, aligned_s = [*recorder.problems, *said], recorder.alignment_error_s
    url = cluster.telemetry.prometheus_url
    if url is None:
        return direct, problems, aligned_s
    try:
        found = prometheus.fetch_run(url, anchor.to_wall(recorder.started_s), anchor.to_wall(recorder.ended_s),
                                     anchor=anchor, ours=ours, headers=cluster.telemetry.credential())
    except prometheus.PrometheusUnavailable as error:
        return direct, [*problems, f"{error.message}; the direct scrape is used instead"], aligned_s
    parts, half_s = [], (window[1] - window[0]) / 2
    for what, sources in (("server", ("vllm", "engine")), ("GPUs", ("dcgm",))):
        theirs, mine = (table[table["source"].isin(sources)] for table in (found.metrics, direct))
        interval_s = found.interval_s.get(sources[0], 0.0)
        coarse = interval_s > half_s and bool(len(theirs))
        if len(mine) and (theirs.empty or coarse or found.holes):
            theirs = mine
        elif coarse:
            theirs = theirs.iloc[:0]
        else:
            aligned_s = max(aligned_s, found.alignment_error_s)
        if coarse:
            problems.append(f"Prometheus scrapes the {what} every {interval_s:.0f} s, more than half of the window of "
                            f"{2 * half_s:.0f} s: that proves nothing about it" + (
                                "" if theirs is mine else ", and is left out (scrape every second)"))
        if theirs is mine:
            problems.append(f"of the {what} the direct scrape is used instead of Prometheus")
        parts.append(theirs)
    return pd.concat(parts, ignore_index=True), [*problems, *found.problems], aligned_s
