"""How fast the virtual clock is: simulated seconds a second, by users, and the fast core against the plain one; then
how far the same engine over HTTP is from it.

    python benchmarks/engine.py [--users 30 300 1000 3000] [--duration 900] [--clocks 30 100] [--json FILE]

CPU time of one process on one core, so that a busy machine changes little. `play`: the run, its turns drawn from the
personas' distributions on the way; `seat_s`: seating the users before it (a stationary start draws several
conversations for each); `loop`: the compiled loop alone, also by event (a token, a request, a step), which must not
grow with users; `plain` plays a part of the same run block by block.
A user whom an earlier row has seated is seated from memory.
The two-clock difference is that of `two_clocks.py` (p50 and p95 of TTFT and gaps); it wants a quiet machine, or
`chrt -r 1` before the command. `--clocks` without numbers leaves it out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import two_clocks

from spoc_lib.config import load_cluster
from spoc_lib.core.files import write_json
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.fast import loop
from spoc_lib.engine.fast import play as fast
from spoc_lib.engine.virtual import play
from spoc_lib.engine.virtual_plain import PlainRun
from spoc_lib.workload import build_script


class Stopwatch:
    """CPU seconds spent in the compiled loop."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._run = loop.run

    def __call__(self, *arrays):
        began = time.process_time()
        why = self._run(*arrays)
        self.seconds += time.process_time() - began
        return why


def measure(engine: EmbeddedEngine, users: int, duration_s: float, seed: int) -> dict:
    """One row. The plain core plays as long as some seconds allow."""
    script = build_script("spoc", seed, context_limit=engine.max_model_len)
    watch = Stopwatch()
    loop.run = watch
    try:
        began = time.process_time()
        run = fast.FastRun(engine, script, users, engine.step_time.frontend_seconds)
        seated = time.process_time() - began
        log = run.run(duration_s)
        whole = time.process_time() - began
    finally:
        loop.run = watch._run
    plain_s = min(duration_s, 60.0)
    cpu = {}
    for core in ("fast", "plain"):
        script = build_script("spoc", seed, context_limit=engine.max_model_len)
        if core == "fast":
            short = fast.FastRun(engine, script, users, engine.step_time.frontend_seconds)
        else:
            short = PlainRun(engine.core(), script, users, engine.step_time.frontend_seconds)
        began = time.process_time()
        short.run(plain_s)
        cpu[core] = time.process_time() - began
    events = len(log.token_request) + len(log.turns) + len(log.steps["tokens"])
    return {
        "users": users, "simulated_s": duration_s, "requests": len(log.turns), "steps": len(log.steps["tokens"]),
        "tokens": len(log.token_request), "play_speed": duration_s / (whole - seated), "seat_s": seated,
        "loop_speed": duration_s / watch.seconds, "loop_ns_per_event": watch.seconds / events * 1e9,
        "plain_speed": plain_s / cpu["plain"], "fast_over_plain": cpu["plain"] / cpu["fast"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--users", type=int, nargs="+", default=[30, 300, 1000, 3000])
    parser.add_argument("--duration", type=float, default=900.0, help="simulated seconds")
    parser.add_argument("--clocks", type=int, nargs="*", default=[30, 100], help="users over HTTP")
    parser.add_argument("--clock-duration", type=float, default=60.0, help="seconds over HTTP")
    parser.add_argument("--personas", nargs="+", default=["tiny"], help="who they are")
    parser.add_argument("--cluster", default="sim-4xh100")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    engine = EmbeddedEngine.from_cluster(load_cluster(arguments.cluster))
    began = time.process_time()
    play(build_script("tiny", 0, context_limit=4096), 1, engine=engine, duration_s=1.0)
    print(f"compiled or loaded in {time.process_time() - began:.1f} CPU s")
    rows = []
    for users in arguments.users:
        row = measure(engine, users, arguments.duration, arguments.seed)
        rows.append(row)
        print("  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
                        for name, value in row.items()), flush=True)
    print("CPU time an event: " + ", ".join(f"{row['loop_ns_per_event']:.0f} ns at {row['users']} users"
                                            for row in rows))
    clocks = []
    for personas in arguments.personas:
        for users in arguments.clocks:
            with tempfile.TemporaryDirectory() as folder:
                clocks.append(two_clocks.pooled([two_clocks.measure(
                    arguments.cluster, personas, users, arguments.clock_duration, 0.0, arguments.seed, Path(folder))]))
            print(two_clocks.sentence(clocks[-1]), flush=True)
    if arguments.json:
        write_json(arguments.json, {"cluster": arguments.cluster, "unit": "simulated seconds a CPU second",
                                    "rows": rows, "two_clocks": clocks})


if __name__ == "__main__":
    main()
