"""The load client beside its peers, against the same paced server, the client on one core.

    python benchmarks/load.py [--lanes streams,prompts30k,prompts128k,soak] [--seconds 30] [--json FILE]
    python benchmarks/load.py --lanes streams,guidellm,aiperf,inference-perf,genai-bench,vllm-bench --peers FOLDER

The paced server (200 ms to the first token, then one every 20 ms, events of about 250 bytes) has a core of its own
where the machine has two. Lanes: `streams` 300 users of 200 tokens; `prompts30k` 50 users with 30 000-token prompts;
`prompts128k` 10 users with 128 000-token ones (512 kB bodies); `soak` watches memory (judged from `--seconds 300` on);
`guidellm`, `aiperf`, `inference-perf`, `genai-bench` are peers from PyPI, each in its own environment below `--peers`
(made on first use, which needs the network and minutes); `vllm-bench` is `vllm bench serve` of `--vllm`, where present.

Figures: streams truly in flight (the server's own integral, over the middle of the run); TTFT error = measured by the
client minus 200 ms; gap error = |gap - 20 ms| for each token; stamp lag = our stamp minus the server's own write; CPU a
token of the client while it runs, and (all in) of the whole process tree from the start of the interpreter to the
tables and the summary on disk. Peers' TTFT figures are their own reports. The server's own lateness is part of
all errors but the lag: where it stands in milliseconds, the machine was busy and the run says little. Exit status 1
when a bar of our own lanes is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from load_peers import PEERS, NotHere, Task, byte_tokenizer, environment, surroundings

from spoc_lib.core.files import plain, to_json, write_json
from spoc_lib.load.clientcheck import judge, paced_report, paced_server

TTFT_S, ITL_S = 0.2, 0.02
USERS, OUTPUT_TOKENS = 300, 200


@dataclass(frozen=True)
class Lane:
    """One of our own lanes and its bars (seconds, microseconds; None: no bar)."""

    users: int
    prompt_tokens: int
    output_tokens: int = OUTPUT_TOKENS
    in_flight: float | None = None
    ttft_p50_s: float | None = 0.001
    ttft_p99_s: float | None = 0.030
    gap_p99_s: float | None = 0.002
    cpu_us: float | None = None


LANES = {
    "streams": Lane(USERS, 16, in_flight=299.0, cpu_us=30.0),
    "prompts30k": Lane(50, 30_000, in_flight=49.5),
    "prompts128k": Lane(10, 128_000, in_flight=9.9),
    "soak": Lane(USERS, 500, output_tokens=100, ttft_p50_s=None, ttft_p99_s=None, gap_p99_s=None),
}


def pinned(core: int) -> tuple[str, ...]:
    """A command prefix for one core; nothing where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return ("taskset", "-c", str(cores[core])) if len(cores) > 1 else ()


class InFlight:
    """Mean streams in flight between two moments of a run, from the server's own integral."""

    def __init__(self, url: str, begin_s: float, end_s: float) -> None:
        self.mean: float | None = None
        self._url, self._begin_s, self._end_s = url, begin_s, end_s
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._report()["streams"]:
            time.sleep(0.2)  # the run counts from its first stream
        time.sleep(self._begin_s)
        first = self._report()
        time.sleep(self._end_s - self._begin_s)
        last = self._report()
        self.mean = (last["stream_seconds"] - first["stream_seconds"]) / (last["time_s"] - first["time_s"])

    def _report(self) -> dict[str, Any]:
        import urllib.request

        with urllib.request.urlopen(f"{self._url}/paced", timeout=30) as answer:
            return orjson.loads(answer.read())

    def result(self) -> float | None:
        self._thread.join(5)
        return self.mean


def timed(command: list[str], **options: Any) -> tuple[float, subprocess.CompletedProcess]:
    """(CPU seconds of the command with all its children, its result)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True, **options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result


def own_lane(name: str, seconds: float) -> dict[str, Any]:
    """Run one of our lanes in a pinned process of its own; returns the figures and the bars that were missed."""
    lane = LANES[name]
    with (paced_server(TTFT_S, ITL_S, pinned(0), log=name != "soak") as url,  # an hour's log would be 50 million times
          tempfile.TemporaryDirectory() as folder):
        watch = InFlight(url, seconds * 0.4, seconds * 0.8)
        command = [*pinned(1), sys.executable, __file__, "--client", name, "--url", url, "--seconds", str(seconds),
                   "--folder", folder]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(f"{name}: {result.stderr[-2000:]}")
        figures = orjson.loads(result.stdout.splitlines()[-1])
        figures["in_flight_server"] = watch.result()
    checks = (("in flight", figures["in_flight_server"], lane.in_flight, False),
              ("TTFT error p50 s", figures["ttft_error_p50_s"], lane.ttft_p50_s, True),
              ("TTFT error p99 s", figures["ttft_error_p99_s"], lane.ttft_p99_s, True),
              ("gap error p99 s", figures["gap_error_p99_s"], lane.gap_p99_s, True),
              ("CPU us a token all in", figures["cpu_us_per_token_whole_command"], lane.cpu_us, True),
              ("start-up s", figures["startup_s"], 3.0, True))
    missed = [f"{what} {value:.4g}, bar {bar:g}" for what, value, bar, below in checks
              if bar is not None and (value is None or (value > bar if below else value < bar))]
    if name == "soak" and seconds >= 300 and figures["memory_growth_bytes_per_s"] * 3600 > 64 << 20:
        missed.append(f"memory grows by {figures['memory_growth_bytes_per_s'] * 3600 / 1e6:.0f} MB an hour")
    return {"lane": name, **figures, "missed": missed}


def client(name: str, url: str, seconds: float, folder: Path) -> None:
    """The pinned process: run the lane and print its figures as one JSON line."""
    from spoc_lib.load import FixedTurns, LoadPlan, run

    lane = LANES[name]
    answer_s = TTFT_S + (lane.output_tokens - 1) * ITL_S
    turns = FixedTurns(prompt_tokens=lane.prompt_tokens, output_tokens=lane.output_tokens)
    plan = LoadPlan(base_url=url, model="paced", users=lane.users, duration_s=seconds, ramp_s=answer_s,
                    stop_timeout_s=answer_s + 5, fixed=turns)
    result = run(plan, folder)
    settle_s = time.monotonic() - float(result.requests["end_s"].max())
    parent_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    spent_s = sum(use.ru_utime + use.ru_stime
                  for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    check = asdict(judge(result, TTFT_S, ITL_S, paced_report(url)))
    metrics = result.metrics
    memory = metrics[metrics["metric"] == "client_memory_bytes"]
    memory = memory.iloc[len(memory) // 2:]
    growth = float(np.polyfit(memory["time_s"] - memory["time_s"].iloc[0], memory["value"], 1)[0])
    summary = result.summary
    print(orjson.dumps(plain({**check, "memory_growth_bytes_per_s": growth, "memory_bytes": memory["value"].max(),
                             "settle_s": settle_s, "settle_peak_bytes": parent_bytes,
                             "cpu_us_per_token_whole_command": 1e6 * spent_s / result.chunks["tokens"].sum(),
                             "valid": summary["valid"],
                             "little_error_ratio": summary["little_error_ratio"],
                             "schedule_lag_p99_s": summary["schedule_lag_s"]["p99"]})).decode())


def peer_lane(name: str, seconds: float, environments: Path, vllm: Path) -> dict[str, Any]:
    """Run a peer with 300 concurrent streams; what it cannot do is said, not guessed."""
    try:
        binaries = environment(name, environments, vllm)
    except NotHere as why:
        return {"lane": name, "failed": str(why)}
    with paced_server(TTFT_S, ITL_S, pinned(0), log=False) as url, tempfile.TemporaryDirectory() as folder:
        peer, home = PEERS[name], Path(folder)
        task = Task(binaries / peer.program, url, USERS, OUTPUT_TOKENS, seconds, TTFT_S + (OUTPUT_TOKENS - 1) * ITL_S,
                    home, byte_tokenizer(binaries, home))
        watch = InFlight(url, seconds * 0.4, seconds * 0.8)
        cpu_s, result = timed([*pinned(1), str(task.binary), *peer.command(task)], cwd=folder, env=surroundings(name),
                              timeout=seconds * 4 + 240)
        report = paced_report(url)
        if result.returncode or not report["tokens"]:
            return {"lane": name, "failed": (result.stderr or result.stdout)[-1500:]}
        p50_s, p99_s = peer.read(task)
        return {"lane": name, "in_flight_server": watch.result(), "server_late_p99_s": report["late_p99_s"],
                "ttft_error_p50_s": p50_s - TTFT_S, "ttft_error_p99_s": p99_s - TTFT_S,
                "cpu_us_per_token_whole_command": 1e6 * cpu_s / report["tokens"]}


def ms(row: dict[str, Any], name: str) -> str:
    return "-" if row.get(name) is None else f"{1e3 * row[name]:.3f}"


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = ["| client | in flight | TTFT error p50, p99 ms | gap error p99 ms | stamp lag p99 ms "
             "| CPU us/token (all in) | server late p99 ms |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for row in results:
        if "failed" in row:
            lines.append(f"| {row['lane']} | did not run | | | |")
            continue
        cpu = f"{row['cpu_us_per_token']:.0f} " if "cpu_us_per_token" in row else ""
        flight = row["in_flight_server"]
        lines.append(f"| {row['lane']} | {'-' if flight is None else format(flight, '.1f')} "
                     f"| {1e3 * row['ttft_error_p50_s']:+.1f}, {1e3 * row['ttft_error_p99_s']:+.1f} "
                     f"| {ms(row, 'gap_error_p99_s')} | {ms(row, 'lag_p99_s')} "
                     f"| {cpu}({row['cpu_us_per_token_whole_command']:.0f}) | {ms(row, 'server_late_p99_s')} |")
    return "\n".join(lines)


def memory_line(row: dict[str, Any]) -> str:
    """What a soak says of memory and of the end of a long rung."""
    return (f"soak: the client holds {row['memory_bytes'] / 1e6:.0f} MB at most and grows by "
            f"{row['memory_growth_bytes_per_s'] * 3600 / 1e6:+.0f} MB an hour (second half of the run); "
            f"books closed {row['settle_s']:.1f} s after the last answer with {row['settle_peak_bytes'] / 1e9:.1f} GB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", default="streams,prompts30k,prompts128k")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder for the peers' environments")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm"), help="environment that holds vLLM")
    parser.add_argument("--json")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        client(arguments.client, arguments.url, arguments.seconds, arguments.folder)
        return 0
    results = []
    for name in arguments.lanes.split(","):
        if name not in LANES and name not in PEERS:
            parser.error(f"unknown lane '{name}': use {', '.join([*LANES, *PEERS])}")
        results.append(own_lane(name, arguments.seconds) if name in LANES
                       else peer_lane(name, arguments.seconds, arguments.peers.absolute(), arguments.vllm.absolute()))
    if arguments.json == "-":
        print(to_json(results))
    else:
        if arguments.json:
            write_json(arguments.json, results)
        print(table(results))
        print("\n".join(memory_line(row) for row in results if row["lane"] == "soak"))
    missed = [f"{row['lane']}: {text}" for row in results for text in row.get("missed", [])]
    missed += [f"{row['lane']} did not run: {row['failed']}" for row in results if "failed" in row]
    print("\n".join(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
