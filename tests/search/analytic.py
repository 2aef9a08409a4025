"""A server that answers by formula, for tests that are about the study and not about an engine.

Run as a program it searches in a folder, slowly, so that a test can kill it:
python analytic.py FOLDER TRIALS SECONDS_A_TRIAL [STORAGE SEED]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from spoc_lib.config import SearchSpec, load_cluster
from spoc_lib.search import pareto
from spoc_lib.search.evaluate import Measurement, TrialFailure
from spoc_lib.search.space import Flags, build_space
from spoc_lib.search.study import SearchStudy, record_of

TTFT_LIMIT_S, ITL_LIMIT_S, USERS = 5.0, 0.05, 150


@dataclass
class FormulaEvaluator:
    """Chunk size trades TTFT against ITL, slots trade queueing against ITL; no memory above 0.93 with big chunks."""

    users: int = USERS
    version: str = "formula 1"
    driver: str = "virtual"
    seconds: float = 0.0
    slowdown: float = 1.0
    objectives: pareto.Objectives = pareto.OBJECTIVES
    evaluated: list[Flags] = field(default_factory=list)

    def evaluate(self, flags: Flags, folder: Path, repeat: int = 0) -> Measurement:
        self.evaluated.append(dict(flags))
        time.sleep(self.seconds)
        budget, slots = flags["max_num_batched_tokens"], min(flags["max_num_seqs"], self.users)
        chunk = min(budget, flags["long_prefill_token_threshold"] or budget)
        cached = flags["enable_prefix_caching"]
        if flags["gpu_memory_utilization"] > 0.93 and budget > 20000:
            raise TrialFailure("out-of-memory", "CUDA out of memory")
        itl = (0.004 + 4e-5 * slots + 2e-6 * chunk * (0.5 if cached else 1.0)) * self.slowdown
        ttft = (0.3 + 2000 / chunk + 0.05 * (self.users - slots) + (0 if cached else 6)) * self.slowdown
        rate = 3000 / (1 + ttft / 10 + 10 * itl)
        limits = {"all ttft p95": ttft / TTFT_LIMIT_S - 1, "all itl p95": itl / ITL_LIMIT_S - 1}
        good = rate / 30 * min(1.0, ITL_LIMIT_S / itl, TTFT_LIMIT_S / ttft)
        return Measurement(rate, ttft, itl, limits, self.driver, self.seconds, goodput_per_s=good,
                           objectives=self.objectives)


def study(folder: Path, *, evaluator: FormulaEvaluator | None = None, seed: int = 1, population: int = 6,
          **more) -> SearchStudy:
    space = build_space(load_cluster("sim-4xh100").model_copy(update={"search": SearchSpec(target_users=USERS)}))
    return SearchStudy(space, evaluator or FormulaEvaluator(), folder, "workload 1", seed, population,
                       [space.defaults], **more)


def sequence(of: SearchStudy) -> list[tuple]:
    """(state, flags, values) of the answered trials, in order."""
    answered = [r for r in map(record_of, of.trials()) if r]
    return [(r["state"], tuple(sorted(r["flags"].items())), tuple(r.get("values", ()))) for r in answered]


if __name__ == "__main__":
    place, count, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    storage = sys.argv[4] if len(sys.argv) > 4 else None
    seed = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    study(place, evaluator=FormulaEvaluator(seconds=seconds), storage=storage, seed=seed).run(count)
