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
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.config import Cluster, Profile
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_json
from spoc_lib.core.schemas import METRICS, REQUESTS, RUNGS, SLO_VERDICTS
from spoc_lib.core.tables import as_table, read_table, write_table
from spoc_lib.sweep import agreement, lessons
from spoc_lib.sweep.book import RungBook
from spoc_lib.sweep.capacity import binding_slo, capacity, sentence
from spoc_lib.sweep.drivers import FreshUsers, RungRecord, ScriptFactory, Timing, http_rung, twin_rung, virtual_rung
from spoc_lib.sweep.fit import Crossing
from spoc_lib.sweep.ladder import Ladder
from spoc_lib.sweep.saturation import Saturation, saturation
from spoc_lib.sweep.slo import check_slos
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
    beside the client's, of the HTTP rung (empty without one);
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
    problems: list[str] = field(default_factory=list)

    def story(self) -> Story:
        """The rung nearest to the limit on one clock: phases, client percentiles, engine, GPUs, throttle events."""
        return build(self.requests, self.metrics, self.window, self.capacity["alignment_error_s"])

    def findings(self) -> list[str]:
        """The sweep in sentences, computed from its tables."""
        said = [sentence(self.capacity)]
        saturated = self.capacity["saturated"]
        if saturated:
            said.append(f"What stops it: {saturated['resource'].replace('_', ' ')}: {saturated['evidence'][0]}.")
        said += [lesson["sentence"] for lesson in self.capacity["lessons"]]
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
    one launch for all rungs. Rungs that `folder` holds already, of the same users, flags and seconds, are
    not run again. strict: a twin asked outside its measured range is refused (InputError); else
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
        self.book = RungBook(self.folder, self.cluster.slos, self.users.gap_cap_s)
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

        crossing = self._climb("virtual", self.timing, play)
        limit = self._limit(crossing)
        checks = self._what_ifs(limit, crossing) if limit else []
        twin_vs_http = self._confirm(engine) if confirm_http else pd.DataFrame()
        return self._finish(crossing, limit, checks, twin_vs_http, simulated=True,
                            passport=engine.passport() | {"outside": limit.outside if limit else engine.outside()},
                            limits=(engine.flags.max_num_seqs, engine.flags.max_num_batched_tokens))

    def real(self) -> SweepResult:
        from spoc_lib.servers import launch

        self.say(f"at most {self.profile.probes} rungs of {self.http_timing.duration_s:g} s over HTTP, one launch")
        with launch(self.cluster, self.flags, self.folder / "server") as server:
            def play(users: int, salt: int) -> RungRecord:
                return http_rung(self.cluster, server, self.users.script(salt), users, self.http_timing,
                                 self.book.path(salt - 1), self.say)

            crossing = self._climb("locust", self.http_timing, play, engine=server.version)
            simulated, passport = server.simulated, server.passport
        named = {**self.cluster.flags, **self.flags}
        return self._finish(crossing, self._limit(crossing), [], pd.DataFrame(), simulated=simulated,
                            passport=passport,
                            limits=(named.get("max_num_seqs"), named.get("max_num_batched_tokens")))

    def _climb(self, driver: str, timing: Timing, play: Callable[[int, int], RungRecord],
               engine: str | None = None) -> Crossing:
        """Run rungs where the ladder wants them until it is content or the probes are spent."""
        for number in range(self.profile.probes):
            step = self.ladder.next(self.book.valid_slo(), self.book.invalid_users())
            if step is None:
                break
            key = dict(users=step.users, driver=driver, timing=asdict(timing), flags=self.flags, seed=self.seed,
                       cluster=self.cluster.name, engine=engine)
            self.say(f"rung {number + 1} of at most {self.profile.probes}: {step.users} users ({step.why})")
            entry = self.book.entry(number, key, lambda users=step.users, salt=number + 1: play(users, salt),
                                    budget=self.flags.get("max_num_batched_tokens"))
            self.say(f"{step.users} users: {entry.row['verdict']}; {entry.row['reason']}")
        return self.ladder.crossing(self.book.valid_slo())

    def _limit(self, crossing: Crossing) -> Any:
        """The valid rung nearest to the capacity, the one at or beyond it where two are as near; None
        without one."""
        valid = [entry for entry in self.book.entries if entry.row["verdict"] != "invalid"]
        edge = min(crossing.users, 1e9)
        return min(valid, key=lambda entry: (abs(entry.row["users"] - edge), -entry.row["users"]), default=None)

    def _what_ifs(self, limit: Any, crossing: Crossing) -> list[lessons.Lesson]:
        """The three lessons, asked on the twin at the limit's users and script with one flag changed."""
        from spoc_lib.engine.embedded import EmbeddedEngine

        def variant(**changed: Any) -> dict | None:
            try:
                engine = EmbeddedEngine.from_cluster(self.cluster, {**self.flags, **changed})
            except InputError:
                return None  # the flags contradict each other: no such server
            users, salt = int(limit.row["users"]), limit.number + 1
            self.say(f"what if {changed} at {users} users")
            number = 200 + len(variants)
            key = dict(users=users, driver="virtual", timing=asdict(self.timing), flags={**self.flags, **changed},
                       seed=self.seed, cluster=self.cluster.name, engine=None)
            variants.append(changed)
            return self.book.aside(number, key, lambda: virtual_rung(
                engine, self.users.script(salt), users, self.timing, self.seed)).row

        variants: list[dict] = []
        engine_flags = EmbeddedEngine.from_cluster(self.cluster, self.flags).flags
        budget = engine_flags.max_num_batched_tokens
        uncached = variant(enable_prefix_caching=False) if engine_flags.enable_prefix_caching else None
        found = [(budget, limit.row)]
        for other in (max(budget // 4, engine_flags.max_num_seqs), budget * 2):
            row = variant(max_num_batched_tokens=other) if other != budget else None
            if row is not None:
                found.append((other, row))
        rungs = self.book.rungs()
        return [lessons.utilisation_is_not_the_sla(rungs, crossing.users),
                lessons.memory_is_not_always_the_bottleneck(limit.row, uncached, rungs, crossing.users),
                lessons.chunked_prefill_is_the_trade_off(found)]

    def _confirm(self, engine: Any) -> pd.DataFrame:
        """One rung over real HTTP, its telemetry recorded, beside the virtual clock at the same users and
        script."""
        from spoc_lib.servers import launch

        number, users = len(self.book.entries), self.profile.http_users
        script = self.users.plain(HTTP_SALT)
        folder = self.book.path(number)
        key = dict(users=users, driver="locust", timing=asdict(self.http_timing), flags=self.flags, seed=self.seed,
                   cluster=self.cluster.name, engine=None)

        def play() -> RungRecord:
            self.say(f"starting the embedded engine for {users} users over real HTTP")
            with launch(self.cluster, self.flags, folder / "server") as server:
                return http_rung(self.cluster, server, script, users, self.http_timing, folder, self.say)

        http = self.book.entry(number, key, play, rung_only=True)
        twin = self.book.aside(300, {**key, "driver": "virtual"}, lambda: twin_rung(
            engine, self.users.plain(HTTP_SALT), users, self.http_timing, self.seed))
        return agreement.compare(http.row, twin.row)

    def _finish(self, crossing: Crossing, limit: Any, checks: list[lessons.Lesson], twin_vs_http: pd.DataFrame, *,
                simulated: bool, passport: Mapping[str, Any] | None, limits: tuple) -> SweepResult:
        rungs, slo = self.book.rungs(), self.book.slo()
        if not checks and limit:
            checks = [lessons.utilisation_is_not_the_sla(rungs, crossing.users),
                      lessons.memory_is_not_always_the_bottleneck(limit.row, None, rungs, crossing.users),
                      lessons.overload_leaves_no_trace(rungs)]
        found = self._saturated(limit, crossing, limits)
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
            cluster=dict(cluster=self.cluster.name, title=self.cluster.title, gpu=hardware.gpu, gpus=hardware.count,
                         price_per_gpu_hour=hardware.price_per_gpu_hour, model=self.cluster.model),
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
                           metrics, requests, window, twin_vs_http, reconciliation, problems)

    def _saturated(self, limit: Any, crossing: Crossing, limits: tuple) -> Saturation | None:
        """Asked of the first valid rung beyond the capacity (what is used up there), else of the nearest
        one."""
        if limit is None:
            return None
        beyond = [entry for entry in self.book.ladder_entries
                  if entry.row["verdict"] != "invalid" and entry.row["users"] > crossing.users]
        entry = min(beyond, key=lambda one: one.row["users"], default=limit)
        within = [one for one in self.book.ladder_entries
                  if one.row["verdict"] != "invalid" and one.row["users"] <= crossing.users]
        last = max(within, key=lambda one: one.row["users"], default=None)
        return saturation(entry.server, entry.row, max_num_seqs=limits[0], max_num_batched_tokens=limits[1],
                          step_figures=entry.steps,
                          binding=binding_slo(crossing, self.book.valid_slo()), within=last.row if last else None)

    def _timeline(self, limit: Any) -> tuple[pd.DataFrame, pd.DataFrame, tuple[float, float]]:
        if limit is None:
            return as_table([], METRICS).to_pandas(), as_table([], REQUESTS).to_pandas(), (0.0, 0.0)
        source = self.book.path(limit.number)
        metrics = read_table(source / "metrics.parquet", METRICS)
        requests = read_table(source / "requests.parquet", REQUESTS)
        write_table(self.folder / "metrics.parquet", metrics, METRICS)
        write_table(self.folder / "requests.parquet", requests, REQUESTS)
        return metrics, requests, (limit.row["window_start_s"], limit.row["window_end_s"])
