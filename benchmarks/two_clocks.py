"""One twin, two clocks: the same load over HTTP on real time and on the virtual clock, request by request.

    python benchmarks/two_clocks.py [--users 30 100] [--personas tiny spoc] [--duration 60] [--repeats 2] [--json FILE]

The client is the workbench's own (Locust, kernel time stamps where the host has them), client and server on this
machine. Requests are paired by user, conversation and turn, and only pairs count that both clocks finished: p50 and p95
of TTFT and of the gaps between chunks, twice:

- the closed loop on each clock. A reply that comes a microsecond later meets other steps, so the two runs soon differ
  by chance. The virtual clock differs from itself as much: with front ends 20 to 300 µs slower its p50 of 30 tiny users
  moved by up to 3.4 % over 40 s and 1.5 % over 240 s. Longer or pooled runs (`--repeats`) make it small;
- the virtual clock fed with the moments at which the HTTP client sent (`same arrivals`): what is left is what HTTP and
  this machine add, with hardly any chance.

Beside the differences stand how late the server's steps ended (from its metrics page), how late the client sent, and
how busy the processors were. Where the machine is busy with something else, the difference is the machine's: put
`chrt -r 1` (as root) before the command, and client and server come before the others.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib import load
from spoc_lib.config import load_cluster
from spoc_lib.core.files import write_json
from spoc_lib.core.stats import percentile
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.virtual import VirtualRun, play
from spoc_lib.engine.virtual_plain import PlainRun
from spoc_lib.metrics import streams
from spoc_lib.servers import launch
from spoc_lib.workload import build_script

KEY = ["user", "conversation", "turn"]
#: What the two clocks may differ by, by users (a share).
TOLERANCE = {30: 0.03, 100: 0.05}


def gaps(chunks: pd.DataFrame, requests: set[int]) -> np.ndarray:
    """Seconds between neighbouring chunks of these requests."""
    return streams(chunks[chunks.request.isin(requests)]).gaps.gap_s


class SameArrivals(PlainRun):
    """The virtual clock where each turn is sent when `sent` says: {(user, conversation, turn): seconds}."""

    def __init__(self, sent: dict[tuple, float], engine: EmbeddedEngine, *script) -> None:
        self.sent = sent
        super().__init__(engine.core(), *script, engine.step_time.frontend_seconds)

    def _plan(self, user, send_s: float) -> None:
        super()._plan(user, self.sent.get(tuple(getattr(user.turn, name) for name in KEY), math.inf))


def with_same_arrivals(engine: EmbeddedEngine, script, users: int, duration_s: float, run,
                       start_s: float) -> VirtualRun:
    """The script on the virtual clock, sent when the client of `run` sent; what it did not send is left out."""
    moments = zip(*(run.requests[name] for name in KEY), run.requests.send_s - start_s, strict=True)
    sent = {tuple(key): moment for *key, moment in moments if not math.isnan(moment)}
    log = SameArrivals(sent, engine, script, users).run(duration_s)
    return VirtualRun(log, engine, users, (0.0, duration_s), duration_s, 0.0, 0.0, "plain")


def compare(virtual, run, start_s: float, warmup_s: float) -> dict:
    """Percentiles of both clocks over the pairs of requests that were sent after the warm-up."""
    ours = virtual.requests[(virtual.requests.outcome == "completed") & (virtual.requests.send_s >= warmup_s)]
    theirs = run.requests[(run.requests.outcome == "completed") & (run.requests.send_s >= start_s + warmup_s)]
    pairs = ours.merge(theirs, on=KEY, suffixes=("_virtual", "_http"))
    row = {"pairs": len(pairs), "only_virtual": len(ours) - len(pairs), "only_http": len(theirs) - len(pairs),
           "same_prompt": float(np.mean(pairs.prompt_tokens_virtual == pairs.prompt_tokens_http)),
           "same_cached": float(np.mean(pairs.cached_tokens_virtual == pairs.cached_tokens_http))}
    row |= {"ttft_mean_virtual_s": float(pairs.ttft_s_virtual.mean()),
            "ttft_mean_http_s": float(pairs.ttft_s_http.mean())}
    values = {"ttft": [pairs.ttft_s_virtual, pairs.ttft_s_http],
              "itl": [gaps(virtual.chunks, set(pairs.request_virtual)), gaps(run.chunks, set(pairs.request_http))]}
    return row | differences({name: tuple(map(np.asarray, both)) for name, both in values.items()})


def differences(values: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict:
    """Percentiles of both clocks, their relative difference, and its standard error where the two are pairs (TTFT;
    bootstrap): when a request meets a step is chance, and a closed loop never meets the same steps twice."""
    row, random = {"_values": values}, np.random.default_rng(0)
    for name, (one, other) in values.items():
        for p in (50, 95):
            expected, seen = (float(percentile(x, p)) for x in (one, other))
            row |= {f"{name}_p{p}_virtual_s": expected, f"{name}_p{p}_http_s": seen,
                    f"{name}_p{p}_difference": seen / expected - 1}
            if name == "ttft":
                chosen = random.integers(0, len(one), (400, len(one)))
                spread = np.percentile(other[chosen], p, axis=1) / np.percentile(one[chosen], p, axis=1)
                row[f"{name}_p{p}_error"] = float(spread.std())
    return row


def joined(parts: list[dict]) -> dict:
    """`differences` of several runs as one."""
    values = [part.pop("_values") for part in parts]
    shown = differences({name: tuple(np.concatenate([one[name][clock] for one in values]) for clock in (0, 1))
                         for name in values[0]})
    del shown["_values"]
    return shown


def pooled(rows: list[dict]) -> dict:
    """Runs with different seeds as one."""
    return {**rows[0], "seed": [row["seed"] for row in rows], "pairs": sum(row["pairs"] for row in rows),
            "same_cached": float(np.mean([row["same_cached"] for row in rows])),
            "host_busy": float(np.mean([row["host_busy"] for row in rows])),
            **joined(rows), "same_arrivals": joined([row["same_arrivals"] for row in rows])}


def busy_seconds() -> tuple[float, float]:
    """(busy, all) processor seconds of this host."""
    fields = [float(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def measure(cluster_name: str, personas: str, users: int, duration_s: float, warmup_s: float, seed: int,
            folder: Path) -> dict:
    """One rung on both clocks."""
    cluster = load_cluster(cluster_name)
    engine = EmbeddedEngine.from_cluster(cluster)
    limit = 4096 if personas == "tiny" else engine.max_model_len
    virtual = play(build_script(personas, seed, context_limit=limit), users, engine=engine, duration_s=duration_s)
    with launch(cluster, {}, folder / "server") as server:
        before = busy_seconds()
        run = load.run(load.LoadPlan(base_url=server.base_url, model=server.model, users=users, personas=personas,
                                     duration_s=duration_s, seed=seed, context_limit=limit, stop_timeout_s=5),
                       folder / "load")
        after = busy_seconds()
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(server.metrics_url) as answer:
            page = answer.read().decode()
    start_s = float(run.summary["start_s"])
    same = with_same_arrivals(engine, build_script(personas, seed, context_limit=limit), users, duration_s, run,
                              start_s)
    late = (run.requests.send_s - run.requests.intended_send_s).dropna().to_numpy()
    return {"personas": personas, "users": users, "seed": seed, **compare(virtual, run, start_s, warmup_s),
            "failed": int(run.summary["failed"]), "stamps": run.summary.get("stamps"),
            "same_arrivals": compare(same, run, start_s, warmup_s), **lag(page),
            "send_late_p95_s": float(percentile(late, 95)),
            "host_busy": (after[0] - before[0]) / (after[1] - before[1])}


def lag(page: str) -> dict:
    """How well the server kept time: share of steps that ended more than 1 and 5 ms late, restarts of its clock, and
    its own mean TTFT, which no client is part of."""
    def value(name: str, labels: str = "") -> float:
        found = re.search(rf"^{name}{{?[^}}\n]*{re.escape(labels)}[^}}\n]*}}? (\S+)$", page, re.MULTILINE)
        return float(found.group(1))

    steps = value("spoc:step_lag_seconds_count")
    return {"clock_resets": int(value("spoc:clock_resets_total")),
            "step_lag_mean_s": value("spoc:step_lag_seconds_sum") / steps,
            **{f"steps_over_{ms}ms": 1 - value("spoc:step_lag_seconds_bucket", f'le="{ms / 1000}"') / steps
               for ms in (1, 5)},
            "server_ttft_mean_s": value("vllm:time_to_first_token_seconds_sum")
            / value("vllm:time_to_first_token_seconds_count")}


def sentence(row: dict) -> str:
    """The closed loops, then what is left with the same arrivals, which is what the tolerance holds."""
    same = {f"{name} p{p}": row["same_arrivals"][f"{name}_p{p}_difference"]
            for name in ("ttft", "itl") for p in (50, 95)}
    limit = TOLERANCE.get(row["users"], 0.05)
    verdict = "within" if max(map(abs, same.values())) <= limit else "beyond"
    figures = "  ".join(_figure(row, name, p) for name in ("ttft", "itl") for p in (50, 95))
    return (f"{row['users']} users of {row['personas']}: {figures}; {row['pairs']} pairs, cached tokens the same in "
            f"{row['same_cached']:.1%}; host {row['host_busy']:.0%} busy; with the same arrivals "
            f"{', '.join(f'{name} {value:+.1%}' for name, value in same.items())}: {verdict} {limit:.0%}")


def _figure(row: dict, name: str, p: int) -> str:
    one, other = (row[f"{name}_p{p}_{clock}_s"] * 1000 for clock in ("virtual", "http"))
    error = f" ± {row[f'{name}_p{p}_error']:.1%}" if name == "ttft" else ""
    return f"{name.upper()} p{p} {one:.2f}/{other:.2f} ms ({row[f'{name}_p{p}_difference']:+.1%}{error})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--users", type=int, nargs="+", default=[30, 100])
    parser.add_argument("--personas", nargs="+", default=["tiny", "spoc"])
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--warmup", type=float, default=0.0, help="requests sent earlier do not count")
    parser.add_argument("--repeats", type=int, default=1, help="seeds, pooled")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--cluster", default="sim-4xh100")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the tables here")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for personas in arguments.personas:
            for users in arguments.users:
                runs = []
                for seed in range(arguments.seed, arguments.seed + arguments.repeats):
                    folder = Path(arguments.keep or temporary) / f"{personas}-{users}-{seed}"
                    runs.append(measure(arguments.cluster, personas, users, arguments.duration, arguments.warmup, seed,
                                        folder))
                rows.append(pooled(runs))
                print(sentence(rows[-1]), flush=True)
    if arguments.json:
        write_json(arguments.json, {"cluster": arguments.cluster, "rows": rows})


if __name__ == "__main__":
    main()
