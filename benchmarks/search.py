"""How few launches does a search need? A perturbed twin plays the real server; the plain twin screens for it.

    python benchmarks/search.py [--seeds 5] [--first-seed 0] [--launches 12] [--methods tpe,random,grid] [--json FILE]

The server differs from the twin as a real one would: each physical parameter of its step time is another one, it has
fewer KV blocks, its crowd holds other people, every measurement is noisy, and it crashes where the twin does not.
Beside the screened search (`spoc_lib.search.screened`) run plain NSGA-II, TPE and random search on the same server,
and, over a small space, the full grid. A method's score is the hypervolume of the engines that it launched, by the
server's noise-free values, as a share of what NSGA-II reaches with 60 launches.

Exit status 1 when the promise is broken: at most 12 launches, at least 95 % of that hypervolume, mean over the seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import optuna

from spoc_lib.config import Cluster, Profile, load_cluster, load_profile
from spoc_lib.core.files import to_json, write_json
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.steptime.parameters import Parameters
from spoc_lib.search import pareto
from spoc_lib.search.avoid import CrashAvoidance
from spoc_lib.search.evaluate import Measurement, TrialFailure
from spoc_lib.search.parts import screening_twin, workload_digest
from spoc_lib.search.screened import Screened, ScreenedPlan, records, screened
from spoc_lib.search.space import Flags, FlagSpace, build_space, flags_key
from spoc_lib.search.study import SearchStudy
from spoc_lib.search.twin import TwinEvaluator
from spoc_lib.search.workload import script_factory

CLUSTER, USERS, SCREEN_S = "sim-4xh100", 100, 60.0
REFERENCE_LAUNCHES, POPULATION, SCREENING_TRIALS = 60, 8, 120
PARAMETER_SD, KV_SHARE, NOISE_SD = 0.2, (0.75, 1.0), 0.02
SHARE_WANTED = 0.95
GRID = {"max_num_batched_tokens": [1024, 2048, 4096, 8192, 16384], "max_num_seqs": [32, 64, 1024],
        "long_prefill_token_threshold": [0, 1024, 4096]}


@dataclass
class PerturbedServer:
    """The `Evaluator` of a server that the twin knows badly; `launches` counts, `truth` keeps noise-free answers."""

    twin: TwinEvaluator
    seed: int
    driver: str = "locust"
    truth: dict[str, Measurement | TrialFailure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.users, self.version = self.twin.users, f"perturbed {self.seed}"
        random = np.random.default_rng([self.seed, 1])
        self._factors = np.exp(PARAMETER_SD * random.standard_normal(len(Parameters.model_fields)))
        self._kv_share = random.uniform(*KV_SHARE)
        self._noise = np.random.default_rng([self.seed, 2])
        self._plain_engine = self.twin.engine
        self.twin.engine = self.engine

    def engine(self, flags: Flags) -> EmbeddedEngine:
        """The twin's engine with every physical parameter moved, and fewer KV blocks."""
        engine = self._plain_engine(flags)
        moved = {}
        for (name, value), factor in zip(engine.step_time.parameters.model_dump().items(), self._factors, strict=True):
            moved[name] = min(value * factor, 1.0) if name.endswith("efficiency") else value * factor
        step = dataclasses.replace(engine.step_time, parameters=Parameters(**moved), _tables={})
        return dataclasses.replace(engine, step_time=step, num_blocks=int(engine.num_blocks * self._kv_share))

    def evaluate(self, flags: Flags, folder: Path, repeat: int = 0) -> Measurement:
        """The noise-free answer (other users than the twin's) under multiplicative noise."""
        answer = self.answer(flags, folder)
        if isinstance(answer, TrialFailure):
            raise answer
        noise = np.exp(NOISE_SD * self._noise.standard_normal(3))
        constraints = {name: (1 + value) * noise[1 if "ttft" in name else 2] - 1
                       for name, value in answer.constraints.items()}
        return dataclasses.replace(answer, constraints=constraints, driver=self.driver, **dict(
            zip(pareto.OBJECTIVES, np.array(answer.values) * noise, strict=True)))

    def answer(self, flags: Flags, folder: Path) -> Measurement | TrialFailure:
        key = flags_key(flags)
        if key not in self.truth:
            try:
                if flags.get("gpu_memory_utilization", 0) > 0.93 and flags["max_num_batched_tokens"] > 16384:
                    raise TrialFailure("out-of-memory", "CUDA out of memory")
                self.truth[key] = self.twin.evaluate(flags, folder, repeat=1000 + self.seed)
            except TrialFailure as failure:
                self.truth[key] = failure
        return self.truth[key]


def score(launched: list[Flags], server: PerturbedServer, reference: pareto.Reference) -> float:
    """Hypervolume of the launched engines that really meet the SLOs, by their noise-free values."""
    answers = [server.truth[flags_key(flags)] for flags in launched]
    points = [a.values for a in answers if isinstance(a, Measurement) and a.violation <= 0]
    return reference.hypervolume(np.array(points, dtype=float).reshape(-1, 3))


@dataclass
class Bench:
    """One cluster, one seed: the server, and every method before it."""

    cluster: Cluster
    profile: Profile
    seed: int
    folder: Path

    def __post_init__(self) -> None:
        self.space: FlagSpace = build_space(self.cluster)
        self.factory = script_factory(self.cluster, self.profile, self.seed)
        self.reference = pareto.reference_point(self.cluster.slos)
        self.server = PerturbedServer(self.twin(), self.seed)

    def twin(self) -> TwinEvaluator:
        return dataclasses.replace(screening_twin(self.cluster, self.profile, self.space, self.factory),
                                   evidence=False)

    def study(self, name: str, evaluator, **more) -> SearchStudy:
        workload = workload_digest(self.factory, evaluator.users, self.profile.screen_s)
        return SearchStudy(self.space, evaluator, self.folder / name, workload, self.seed, POPULATION,
                           [self.space.defaults], **more)

    def plain(self, name: str, launches: int, sampler: optuna.samplers.BaseSampler | None = None) -> list[float]:
        """Hypervolume after each launch of a search without the twin."""
        study = self.study(name, self.server, sampler=sampler)
        study.run(8 * launches, launches=launches)
        return self.curve(study)

    def screen(self) -> list[Screened]:
        study = self.study("screen", self.twin())
        study.run(SCREENING_TRIALS)
        return screened(study)

    def screened(self, launches: int) -> list[float]:
        """Hypervolume after each launch of the screened search."""
        plan = ScreenedPlan(self.space, self.screen(), self.reference, launches, self.seed)
        study = self.study("screened", self.server, propose=plan, avoid=CrashAvoidance())
        study.run(launches, launches=launches)
        return self.curve(study)

    def curve(self, study: SearchStudy) -> list[float]:
        paid = [r["flags"] for r in records(study) if r["state"] in ("complete", "infeasible", "failed")]
        return [score(paid[:count], self.server, self.reference) for count in range(1, len(paid) + 1)]


def one_seed(cluster: Cluster, profile: Profile, seed: int, launches: int, folder: Path, besides: list[str],
             say: Callable[[str], None]) -> dict:
    bench = Bench(cluster, profile, seed, folder)
    methods = {
        "screened": lambda: bench.screened(launches),
        "nsga2": lambda: bench.plain("nsga2", REFERENCE_LAUNCHES),
        "tpe": lambda: bench.plain("tpe", REFERENCE_LAUNCHES, optuna.samplers.TPESampler(seed=seed)),
        "random": lambda: bench.plain("random", REFERENCE_LAUNCHES, optuna.samplers.RandomSampler(seed=seed)),
    }
    curves = {}
    for name, run in methods.items():
        if name not in ("screened", "nsga2", *besides):
            continue
        began = time.process_time()
        curves[name] = run()
        told = ", ".join(f"{curves[name][count - 1]:.0f}@{count}" for count in (4, 8, 12, 20, 40, 60)
                         if count <= len(curves[name]))
        say(f"seed {seed}: {name}: hypervolume at launches {told} ({time.process_time() - began:.0f} s)")
    whole = curves["nsga2"][-1]
    shares = {f"{name}@{count}": curve[min(count, len(curve)) - 1] / whole if whole else float("nan")
              for name, curve in curves.items() for count in (launches, REFERENCE_LAUNCHES)
              if count <= len(curve) or count == launches}
    return {"seed": seed, "hypervolume_60": whole, "shares": shares, "launches": len(curves["screened"]),
            "first_at_95": {name: first_at(curve, SHARE_WANTED * whole) for name, curve in curves.items()},
            "curves": curves}


def first_at(curve: list[float], wanted: float) -> int | None:
    """Launches needed to reach `wanted`; None when it was never reached."""
    return next((count for count, value in enumerate(curve, start=1) if value >= wanted), None)


def grid(cluster: Cluster, profile: Profile, launches: int, folder: Path, say: Callable[[str], None]) -> dict:
    """A space that can be walked whole: how much of the true optimum the screened search finds."""
    spec = {**cluster.model_dump(), "search": {"target_users": cluster.search.target_users, "space": GRID}}
    bench = Bench(Cluster.model_validate(spec), profile, 0, folder)
    everything = list(bench.space.grid())
    for flags in everything:
        bench.server.answer(flags, _made(folder / "grid"))
    optimum = score(everything, bench.server, bench.reference)
    found = bench.screened(launches)[-1]
    say(f"grid of {len(everything)}: screened search with {launches} launches finds {found / optimum:.1%}")
    return {"engines": len(everything), "optimum": optimum, "screened_share": found / optimum}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", default="tpe,random,grid", help="what runs beside the screened search and NSGA-II")
    parser.add_argument("--launches", type=int, default=12)
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()

    besides = options.methods.split(",")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    base = load_cluster(CLUSTER).model_dump()
    cluster = Cluster.model_validate({**base, "search": {"target_users": options.users, "space": {}}})
    profile = Profile.model_validate({**load_profile("quick").model_dump(), "screen_s": SCREEN_S})
    with tempfile.TemporaryDirectory() as folder:
        seeds = [one_seed(cluster, profile, seed, options.launches, Path(folder) / str(seed), besides, say)
                 for seed in range(options.first_seed, options.first_seed + options.seeds)]
        small = grid(cluster, profile, options.launches, Path(folder) / "small", say) if "grid" in besides else None
    names = sorted({name for seed in seeds for name in seed["shares"]})
    mean = {name: float(np.mean([seed["shares"][name] for seed in seeds if name in seed["shares"]])) for name in names}
    worst = min(seed["shares"][f"screened@{options.launches}"] for seed in seeds)
    result = {"cluster": CLUSTER, "users": options.users, "launches": options.launches, "mean_share": mean,
              "worst_screened_share": worst, "grid": small, "seeds": seeds}
    if options.json:
        write_json(options.json, result)
    print(to_json({key: value for key, value in result.items() if key != "seeds"}))
    if mean[f"screened@{options.launches}"] < SHARE_WANTED:
        sys.exit(1)


if __name__ == "__main__":
    main()
