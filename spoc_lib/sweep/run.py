"""The sweep of one cluster: rungs until the edge is found, one of them over real HTTP, and the answer.

Files in the sweep's folder
- `rungs/NN/`: `rung.json` (written last: a rung without it was not finished and is run again),
  `requests.parquet`, `metrics.parquet`; over HTTP also `chunks.parquet` and the server's log;
- `rungs.parquet`, `slo_verdicts.parquet`, `slo_personas.parquet` (by persona), `slo_limits.parquet` (at other
  limits), `capacity.json`, `twin_vs_http.json`, `reconciliation.json`;
- `requests.parquet`, `metrics.parquet`: copies of the rung nearest to the limit, for the timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.config import Cluster, Profile, load_gpu, price_per_gpu_hour
from spoc_lib.core.files import read_json, write_json
from spoc_lib.core.schemas import METRICS, REQUESTS, RUNGS, SLO_VERDICTS
from spoc_lib.core.tables import as_table, read_table, write_table
from spoc_lib.sweep import agreement, lessons
from spoc_lib.sweep.book import Entry, RungBook, asked_of
from spoc_lib.sweep.capacity import binding_slo, capacity, sentence
from spoc_lib.sweep.drivers import FreshUsers, ScriptFactory, http_rung, twin_rung, virtual_rung
from spoc_lib.sweep.evidence import Limits
from spoc_lib.sweep.fit import Crossing
from spoc_lib.sweep.ladder import Ladder, Step
from spoc_lib.sweep.record import AGAIN_SALT, RungRecord, Timing, long_enough
from spoc_lib.sweep.rung import pressure
from spoc_lib.sweep.saturation import Saturation, saturation
from spoc_lib.sweep.slo import check_slos
from spoc_lib.sweep.twinchecks import TwinChecks
from spoc_lib.sweep.updown import differences
from spoc_lib.telemetry.story import Story, build

#: Salts of rungs that are not on the ladder.
HTTP_SALT = 1_000
#: Share of a real rung's seconds that pass before it is measured.
HTTP_WARMUP = 0.25


@dataclass(frozen=True)
class SweepResult:
    """A finished sweep.

    rungs: RUNGS; slo: SLO_VERDICTS; personas: the same by persona, to inform; capacity: as in capacity.json;
    metrics, requests: METRICS and REQUESTS of the rung nearest to the limit, `window` its steady part;
    twin_vs_http: see `agreement.compare` (empty where nothing was compared); reconciliation: the server's figures
    beside the client's, of the HTTP rung (empty without one); up_down: `updown.differences`: latency before and after
    an overload of one and the same server;
    problems: sentences about telemetry.
    """

    folder: Path
    rungs: pd.DataFrame
    slo: pd.DataFrame
    personas: pd.DataFrame
    capacity: dict[str, Any]
    metrics: pd.DataFrame
    requests: pd.DataFrame
    window: tuple[float, float]
    twin_vs_http: pd.DataFrame
    reconciliation: pd.DataFrame
    up_down: pd.DataFrame
    problems: list[str] = field(default_factory=list)

    def story(self) -> Story:
        """The rung nearest to the limit on one clock: phases, client percentiles, engine, GPUs, throttle events."""
        return build(self.requests, self.metrics, self.window, self.capacity["alignment_error_s"])

    def findings(self, lessons: bool = True) -> list[str]:
        """The sweep in sentences, computed from its tables; with its lessons, or without."""
        said = [sentence(self.capacity)]
        saturated = self.capacity["saturated"]
        if saturated:
            said.append(f"What stops it: {saturated['resource'].replace('_', ' ')}: {saturated['evidence'][0]}.")
        said += [lesson["sentence"] for lesson in self.capacity["lessons"] if lessons]
        if len(self.twin_vs_http):
            said.append(self.capacity["twin_vs_http"]["sentence"])
        if self.capacity["next"]:
            said.append(f"To run next: {self.capacity['next']}.")
        outside = (self.capacity["passport"] or {}).get("outside")
        if outside:
            said.append(f"Beyond what the step time was measured at: {'; '.join(outside)}.")
        return said


def run_sweep(cluster: Cluster, profile: Profile, flags: Mapping[str, Any], folder: str | Path,
              script_factory: ScriptFactory, seed: int = 0, confirm_http: bool = True,
              progress: Callable[[str], None] | None = None, strict: bool = False) -> SweepResult:
    """Find how many users `cluster` holds under its SLOs with `flags`, in at most `profile.probes` rungs.

    script_factory: salt -> ConversationScript; confirm_http (embedded engines): also run one rung of
    `profile.http_users` users over real HTTP beside its twin. Other engines are swept over HTTP altogether,
    one launch for all rungs. Rungs that `folder` holds already, of the same users, flags, seconds, server and
    workload, are not run again. strict: a twin asked outside its measured range is refused (InputError); else
    `passport.outside` of the answer says where the limit's rung left it. InputError for an SLO on a persona
    that the workload does not have, or flags that the engine refuses.
    """
    sweep = _Sweep(cluster, profile, dict(flags), Path(folder), FreshUsers(script_factory), seed,
                   progress or (lambda text: None), strict)
    check_slos(cluster.slos, sweep.users.personas)
    return sweep.embedded(confirm_http) if cluster.engine.kind == "embedded" else sweep.real()


@dataclass
class _Sweep:
    cluster: Cluster
    profile: Profile
    flags: dict[str, Any]
    folder: Path
    users: FreshUsers
    seed: int
    say: Callable[[str], None]
    strict: bool = False

    def __post_init__(self) -> None:
        self.ladder = Ladder(self.cluster.ladder.users, seeds=self.profile.seeds,
                             shared_noise=not self.users.reseeds)
        self.book = RungBook(self.folder, self.cluster.slos, self.users.gap_cap_s,
                             asked_of(self.cluster, self.users, self.seed))
        self.timing = Timing(self.profile.warmup_s + self.profile.rung_s, self.profile.warmup_s)
        warmup_s = min(self.profile.warmup_s, HTTP_WARMUP * self.profile.http_rung_s)
        self.http_timing = Timing(self.profile.http_rung_s + warmup_s, warmup_s)

    def embedded(self, confirm_http: bool) -> SweepResult:
        from spoc_lib.engine.embedded import EmbeddedEngine
        from spoc_lib.engine.steptime.passport import refuse

        engine = EmbeddedEngine.from_cluster(self.cluster, self.flags)
        engine.outside(strict=self.strict)
        self.say(f"at most {self.profile.probes} rungs of {self.profile.rung_s:g} simulated seconds")

        def play(users: int, salt: int) -> RungRecord:
            record = virtual_rung(engine, self.users.script(salt), users, self.timing, self.seed)
            if self.strict:
                refuse(record.outside)
            return record

        crossing = self._climb("virtual", self.timing, play, budget=engine.flags.max_num_batched_tokens)
        limit = self._limit(crossing)
        twin = TwinChecks(self.cluster, self.flags, self.book, self.users, self.timing, self.seed, self.say)
        up_down = twin.up_and_down()
        checks = twin.lessons(limit, crossing, up_down) if limit else []
        twin_vs_http = self._confirm(engine) if confirm_http else pd.DataFrame()
        return self._finish(crossing, limit, checks, twin_vs_http, up_down, simulated=True,
                            passport=engine.passport() | {"outside": limit.outside if limit else engine.outside()},
                            flags=engine.flags.model_dump())

    def real(self) -> SweepResult:
        from spoc_lib.servers import launch

        self.say(f"at most {self.profile.probes} rungs of {self.http_timing.duration_s:g} s over HTTP and one more on "
                 f"the way down, one launch"
                 + (f"; one that is too short is played again, for {self.profile.http_longest_s:g} s at most"
                    if self.profile.http_longest_s else ""))
        with launch(self.cluster, self.flags, self.folder / "server") as server:
            def play(users: int, salt: int) -> RungRecord:
                return long_enough(lambda timing, attempt: http_rung(
                    self.cluster, server, self.users.script(salt + attempt * AGAIN_SALT), users, timing,
                    self.book.path(salt - 1), self.say), self.http_timing, self.profile.http_longest_s, self.say)

            named = {**self.cluster.flags, **self.flags}
            crossing = self._climb("locust", self.http_timing, play, engine=server.version, down=True,
                                   budget=named.get("max_num_batched_tokens"))
            simulated, passport = server.simulated, server.passport
        limit, rungs, up_down = self._limit(crossing), self.book.rungs(), differences(self.book.valid_slo())
        checks = [lessons.utilisation_is_not_the_sla(rungs, crossing.users),
                  lessons.memory_is_not_always_the_bottleneck(limit.row, None, rungs, crossing.users),
                  lessons.overload_leaves_no_trace(up_down, self.http_timing.warmup_s)] if limit else []
        return self._finish(crossing, limit, checks, pd.DataFrame(), up_down, simulated=simulated, passport=passport,
                            flags=named)

    def _climb(self, driver: str, timing: Timing, play: Callable[[int, int], RungRecord], *, engine: str | None = None,
               budget: int | None = None, down: bool = False) -> Crossing:
        """Run rungs where the ladder wants them until it is content or the probes are spent; `down`: and once more, on
        the same server, as many users as were met before the overload."""
        def rung(number: int, step: Step) -> None:
            key = dict(users=step.users, driver=driver, timing=asdict(timing), flags=self.flags, engine=engine)
            self.say(f"rung {number + 1} of at most {self.profile.probes + down}: {step.users} users ({step.why})")
            entry = self.book.entry(number, key, partial(play, step.users, number + 1), budget=budget)
            self.say(f"{step.users} users: {entry.row['verdict']}; {entry.row['reason']}")

        for number in range(self.profile.probes):
            step = self.ladder.next(self.book.valid_slo(), self.book.invalid_users())
            if step is None:
                break
            rung(number, step)
        if down and (users := self._met_before_overload()):
            rung(len(self.book.entries), Step(users, "down again after the overload, on the same server"))
        return self.ladder.crossing(self.book.valid_slo())

    def _met_before_overload(self) -> int | None:
        """The most users that were met before a rung with more was missed, and not run again since."""
        rows = [entry.row for entry in self.book.ladder_entries if entry.row["verdict"] != "invalid"]
        last = max((index for index, row in enumerate(rows) if row["verdict"] == "missed"), default=None)
        if last is None:
            return None
        since = {row["users"] for row in rows[last + 1:]}
        found = {row["users"] for row in rows[:last] if row["verdict"] == "met" and row["users"] < rows[last]["users"]}
        return None if found & since else max(found, default=None)

    def _limit(self, crossing: Crossing) -> Entry | None:
        """The valid rung nearest to the capacity, at or beyond it where two are as near; None without one."""
        valid = [entry for entry in self.book.entries if entry.row["verdict"] != "invalid"]
        edge = min(crossing.users, 1e9)
        return min(valid, key=lambda entry: (abs(entry.row["users"] - edge), -entry.row["users"]), default=None)

    def _confirm(self, engine: Any) -> pd.DataFrame:
        """One rung over real HTTP, its telemetry recorded, beside the virtual clock at the same users and script."""
        from spoc_lib.servers import launch

        number, users = len(self.book.entries), self.profile.http_users
        script = self.users.plain(HTTP_SALT)
        folder = self.book.path(number)
        key = dict(users=users, driver="locust", timing=asdict(self.http_timing), flags=self.flags, engine=None)

        def play() -> RungRecord:
            self.say(f"starting the embedded engine for {users} users over real HTTP")
            with launch(self.cluster, self.flags, folder / "server") as server:
                return http_rung(self.cluster, server, script, users, self.http_timing, folder, self.say)

        http = self.book.entry(number, key, play, rung_only=True)
        twin = self.book.aside(300, {**key, "driver": "virtual"}, lambda: twin_rung(
            engine, self.users.plain(HTTP_SALT), users, self.http_timing, self.seed))
        return agreement.compare(http.row, twin.row)

    def _finish(self, crossing: Crossing, limit: Entry | None, checks: list[lessons.Lesson],
                twin_vs_http: pd.DataFrame, up_down: pd.DataFrame, *, simulated: bool,
                passport: Mapping[str, Any] | None, flags: Mapping[str, Any]) -> SweepResult:
        rungs, slo = self.book.rungs(), self.book.slo()
        found = self._saturated(limit, crossing, flags)
        hardware = self.cluster.hardware
        reconciliation = pd.DataFrame(next((entry.reconciliation for entry in reversed(self.book.entries)
                                            if entry.reconciliation), []))
        http = next((entry for entry in reversed(self.book.entries) if entry.row["driver"] == "locust"), None)
        busy = http.host_busy_ratio if http else None
        invalid = http.row["reason"] if http and http.row["verdict"] == "invalid" else None
        problems = list(dict.fromkeys(text for entry in self.book.entries for text in entry.problems))
        answer = capacity(
            crossing, rungs, self.book.valid_slo(), flags=self.flags, simulated=simulated, passport=passport,
            saturated=found, lessons=checks, on_ladder={entry.number for entry in self.book.ladder_entries},
            cluster=dict(cluster=self.cluster.name, title=self.cluster.title, model=self.cluster.model_name,
                         gpu=hardware.gpu_name, gpus=hardware.count, price_per_gpu_hour=price_per_gpu_hour(hardware)),
            more=dict(
                gap_cap_s=self.users.gap_cap_s, rung_s=self.timing.duration_s - self.timing.warmup_s,
                limit_rung=limit.number if limit else None, goodput=limit.goodput if limit else None,
                stragglers=limit.stragglers if limit else None, problems=problems,
                alignment_error_s=max((entry.alignment_error_s for entry in self.book.entries), default=0.0),
                fresh_users=self.users.reseeds,
                twin_vs_http=None if twin_vs_http.empty else dict(
                    users=self.profile.http_users, passed=bool(twin_vs_http["passed"].all()),
                    comparable=agreement.comparable(busy, invalid), host_busy_ratio=busy,
                    sentence=agreement.sentence(twin_vs_http, self.profile.http_users, busy, invalid),
                    figures=twin_vs_http.to_dict("records"))))
        write_table(self.folder / "rungs.parquet", rungs, RUNGS)
        write_table(self.folder / "slo_verdicts.parquet", slo, SLO_VERDICTS)
        write_table(self.folder / "slo_personas.parquet", self.book.personas(), SLO_VERDICTS)
        write_table(self.folder / "slo_limits.parquet", self.book.limits(), SLO_VERDICTS)
        write_json(self.folder / "twin_vs_http.json", twin_vs_http.to_dict("records"))
        write_json(self.folder / "reconciliation.json", reconciliation.to_dict("records"))
        metrics, requests, window = self._timeline(limit)
        write_json(self.folder / "capacity.json", answer)
        return SweepResult(self.folder, rungs, slo, self.book.personas(), read_json(self.folder / "capacity.json"),
                           metrics, requests, window, twin_vs_http, reconciliation, up_down, problems)

    def _saturated(self, limit: Entry | None, crossing: Crossing, flags: Mapping[str, Any]) -> Saturation | None:
        """Asked of the first rung beyond the capacity (of several the one furthest beyond), else of
        the nearest one. A rung that the load generator could not keep up with says nothing of the server, but what
        stopped the sweep."""
        ladder = self.book.ladder_entries
        valid = [entry for entry in ladder if entry.row["verdict"] != "invalid"]
        beyond = [entry for entry in valid if entry.row["users"] > crossing.users]
        outrun = [entry for entry in ladder if entry.row["client_limited"]]
        entry = min(beyond, key=lambda one: (one.row["users"], -max(map(pressure, one.slo))), default=None) or \
            min(outrun, key=lambda one: one.row["users"], default=limit)
        if entry is None:
            return None
        within = max((one.row for one in valid if one.row["users"] <= crossing.users), key=lambda row: row["users"],
                     default=None)
        limits = Limits(flags.get("max_num_seqs"), flags.get("max_num_batched_tokens"),
                        load_gpu(self.cluster.hardware.gpu).link_bytes_per_s,
                        min((slo.limit_s for slo in self.cluster.slos if slo.metric in ("itl", "tpot")), default=None))
        return saturation(entry.server, entry.row, limits, step_figures=entry.steps, within=within,
                          binding=binding_slo(crossing, self.book.valid_slo()), stragglers=entry.stragglers)

    def _timeline(self, limit: Entry | None) -> tuple[pd.DataFrame, pd.DataFrame, tuple[float, float]]:
        if limit is None:
            return as_table([], METRICS).to_pandas(), as_table([], REQUESTS).to_pandas(), (0.0, 0.0)
        source = self.book.path(limit.number)
        metrics = read_table(source / "metrics.parquet", METRICS)
        requests = read_table(source / "requests.parquet", REQUESTS)
        write_table(self.folder / "metrics.parquet", metrics, METRICS)
        write_table(self.folder / "requests.parquet", requests, REQUESTS)
        return metrics, requests, (limit.row["window_start_s"], limit.row["window_end_s"])
