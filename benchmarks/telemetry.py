"""What recording costs the server: CPU seconds of the embedded engine with and without a recorder at 1 s.

    python benchmarks/telemetry.py [--scrapes 200] [--pairs 3] [--seconds 10] [--json FILE]

Two measurements. Scrapes back to back on a server at rest give the CPU time of one scrape of both pages, free of all
else; at 1 s that is the recorder's share of a core. Then pairs of windows under the same load, without and with the
recorder, show that nothing else comes on top (their difference has the noise of the load in it).

Exit status 1 when a scrape of both pages costs more than 1 % of a core at 1 s.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from spoc_lib.config import load_cluster
from spoc_lib.core.files import to_json, write_json
from spoc_lib.servers import launch
from spoc_lib.telemetry.page import PageReader
from spoc_lib.telemetry.parse import parse
from spoc_lib.telemetry.recorder import Recorder

STREAMS, OUTPUT_TOKENS = 8, 200
MOST = 0.01


def cpu_s(server) -> float:
    """CPU seconds of the server's process so far, as it says itself."""
    reader = PageReader(server.metrics_url, 10.0)
    page = reader.read().text
    reader.close()
    return next(sample.value for sample in parse(page) if sample.metric == "process_cpu_seconds_total")


def a_scrape(server, scrapes: int) -> tuple[float, dict[str, int]]:
    """(CPU seconds of one scrape of both pages, bytes of each page)."""
    readers = {"engine": PageReader(server.metrics_url, 10.0), "DCGM": PageReader(server.dcgm_url, 10.0)}
    sizes = {name: len(reader.read().text.encode()) for name, reader in readers.items()}
    resting, rest_s = cpu_s(server), 2.0
    time.sleep(rest_s)
    idle = (cpu_s(server) - resting) / rest_s
    before, began = cpu_s(server), time.monotonic()
    for _ in range(scrapes):
        for reader in readers.values():
            reader.read()
    spent = cpu_s(server) - before - idle * (time.monotonic() - began)
    for reader in readers.values():
        reader.close()
    return max(spent, 0.0) / scrapes, sizes


def under_load(server, seconds: float, path: Path | None) -> float:
    """CPU seconds a second of the server under `STREAMS` streams, recorded into `path` where one is given."""
    until = time.monotonic() + seconds + 1.0

    def stream() -> None:
        parts = urlsplit(server.base_url)
        body = json.dumps({"model": server.model, "prompt": "x = 1\n" * 50, "max_tokens": OUTPUT_TOKENS,
                           "ignore_eos": True, "stream": True})
        while time.monotonic() < until:
            connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            connection.getresponse().read()
            connection.close()

    def window() -> float:
        time.sleep(1.0)
        before, began = cpu_s(server), time.monotonic()
        time.sleep(seconds)
        return (cpu_s(server) - before) / (time.monotonic() - began)

    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        for _ in range(STREAMS):
            pool.submit(stream)
        if path is None:
            return window()
        with Recorder(server.metrics_url, server.dcgm_url, path, interval_s=1.0):
            return window()


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--scrapes", type=int, default=200, help="scrapes back to back")
    arguments.add_argument("--pairs", type=int, default=3, help="windows under load without and with the recorder")
    arguments.add_argument("--seconds", type=float, default=10.0, help="seconds of a window")
    arguments.add_argument("--json", metavar="FILE")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder, launch(load_cluster("sim-4xh100"), {}, Path(folder)) as server:
        scrape_s, sizes = a_scrape(server, given.scrapes)
        pairs = [(under_load(server, given.seconds, None),
                  under_load(server, given.seconds, Path(folder) / "m.parquet"))
                 for _ in range(given.pairs)]
    more = statistics.median(with_ - without for without, with_ in pairs)
    load = statistics.median(without for without, _ in pairs)
    found = dict(scrape_cpu_s=scrape_s, share_of_core=scrape_s, page_bytes=sizes, load_cpu_s_per_s=load,
                 recorded_cpu_s_per_s=load + more, pairs=pairs, passed=scrape_s <= MOST)
    print(f"a scrape of both pages ({sizes['engine'] / 1e3:.0f} + {sizes['DCGM'] / 1e3:.0f} kB) takes "
          f"{1e3 * scrape_s:.2f} ms of the server's CPU: {scrape_s:.2%} of a core at 1 s")
    print(f"under {STREAMS} streams the server takes {load:.3f} CPU seconds a second without and {load + more:.3f} "
          f"with the recorder (difference {100 * more:+.2f} % of a core, median of {given.pairs} pairs)")
    print("held:" if found["passed"] else "BROKEN:", f"recording costs at most {MOST:.0%} of a core")
    if given.json == "-":
        print(to_json(found))
    elif given.json:
        write_json(given.json, found)
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
