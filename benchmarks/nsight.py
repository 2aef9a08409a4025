"""How fast a big kernel trace is decomposed: 10 M kernels on 8 GPUs, as SQLite and as a parquetdir.

    python benchmarks/nsight.py --folder /tmp/nsight-bench            # makes the traces once, then measures
    python benchmarks/nsight.py --folder /tmp/nsight-bench --others   # beside pandas, sqlite3 and SQL sums

Each measurement runs in a fresh process: wall and CPU seconds, and peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spoc_lib.config import load_model
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.kernelnames import step_kernels
from spoc_lib.engine.traceschema import create_tables

GPUS = 8
_KERNELS = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "demangledName",
            "shortName", "registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ",
            "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "gridId",
            "graphNodeId")


def kernel_columns(count: int, seed: int, pattern: np.ndarray) -> dict[str, np.ndarray]:
    """`count` kernels of all GPUs, interleaved in time as an exporter writes them: each GPU repeats `pattern` (name
    ids of one step), a tenth of the kernels on a second stream where they overlap the next."""
    rng = np.random.default_rng(seed)
    each = count // GPUS
    parts = []
    for device in range(GPUS):
        length = rng.integers(1_500, 40_000, each)
        start = np.cumsum(length + rng.integers(0, 1_500, each)) + 60_000_000_000
        second = rng.random(each) < 0.1
        position = np.arange(each)
        parts.append((start, start + length * np.where(second, 2, 1), np.full(each, device), np.where(second, 23, 7),
                      position // pattern.size, pattern[position % pattern.size]))
    start, end, device, stream, step, name = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(start, kind="stable")
    start, end, device, stream, step, name = (c[order] for c in (start, end, device, stream, step, name))
    zeros, ones = np.zeros(start.size, np.int64), np.ones(start.size, np.int64)
    fill = {"start": start, "end": end, "deviceId": device, "contextId": ones, "streamId": stream,
            "correlationId": step, "globalPid": (1 << 48) | ((1001 + device) << 24), "demangledName": name,
            "shortName": name, "registersPerThread": ones * 168, "gridX": rng.integers(1, 4096, start.size),
            "blockX": ones * 384, "dynamicSharedMemory": ones * 200_000, "gridId": np.arange(start.size),
            "graphNodeId": rng.integers(1, 1 << 40, start.size)}
    return {c: fill.get(c, zeros if c.startswith(("static", "local")) else ones) for c in _KERNELS}


def make(folder: Path, count: int) -> tuple[Path, Path]:
    """The SQLite file and the parquetdir with the same `count` kernels; made once."""
    sqlite, parquet = folder / f"bench-{count}.sqlite", folder / f"bench-{count}-parquet"
    if sqlite.exists() and parquet.is_dir():
        return sqlite, parquet
    folder.mkdir(parents=True, exist_ok=True)
    parquet.mkdir(exist_ok=True)
    batch = Batch(64, 64, 640_000, 8192, 0, 0, 0.0, 0.0, 0, 64)
    launched = [k.name for k in step_kernels(load_model("gpt-oss-120b"), GPUS, batch, 0.9)]
    names = sorted(set(launched))
    partial = sqlite.with_suffix(".part")
    partial.unlink(missing_ok=True)
    database = sqlite3.connect(partial)
    database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
    create_tables(database)
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
    pq.write_table(pa.table({"id": range(len(names)), "value": names}), parquet / "StringIds.parquet")
    columns = kernel_columns(count, 1, np.array([names.index(name) for name in launched]))
    pq.write_table(pa.table(columns), parquet / "CUPTI_ACTIVITY_KIND_KERNEL.parquet")
    insert = (f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({', '.join(_KERNELS)}) "
              f"VALUES ({', '.join('?' * len(_KERNELS))})")
    for at in range(0, count, 200_000):
        rows = (columns[c][at:at + 200_000].tolist() for c in _KERNELS)
        database.executemany(insert, zip(*rows, strict=True))
    database.commit()
    database.close()
    partial.rename(sqlite)
    return sqlite, parquet


def by_us(path: str) -> None:
    from spoc_lib.nsight import decompose

    result = decompose(path)
    assert all(sum(d["busy_ns"].values()) + d["idle_ns"] == d["window_ns"] for d in result.devices)


def by_sql_sums(path: str) -> None:
    """Sums by category only: wrong wherever kernels overlap."""
    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    database.execute("SELECT globalPid, deviceId, demangledName, sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL "
                     "GROUP BY 1, 2, 3").fetchall()


def by_pandas(path: str) -> None:
    """Reading the four columns only, no decomposition."""
    import pandas as pd

    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    pd.read_sql("SELECT start, end, deviceId, globalPid, demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL", database)


METHODS = {"spoc": by_us, "sql-sums": by_sql_sums, "pandas-read": by_pandas}


def measure(method: str, path: Path) -> dict:
    """Wall and CPU seconds and peak MiB of one method in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--one", method, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{method} failed on {path}:\n{done.stderr}")
    return json.loads(done.stdout)


def _one(method: str, path: str) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    METHODS[method](path)
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory before exec, too
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"method": method, "trace": Path(path).name, "wall_s": round(time.perf_counter() - started, 2),
                      "cpu_s": round(time.process_time() - cpu, 2), "peak_mib": round(peak)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/nsight-bench"))
    parser.add_argument("--kernels", type=int, default=10_000_000)
    parser.add_argument("--others", action="store_true", help="also the usual ways to read such a file")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "TRACE"))
    options = parser.parse_args()
    if options.one:
        _one(*options.one)
        return
    small = make(options.folder, 10_000)[0]
    measure("spoc", small)  # compiles once; the cache serves the rest
    sqlite, parquet = make(options.folder, options.kernels)
    print(f"{options.kernels} kernels on {GPUS} GPUs, {sqlite.stat().st_size / 1e6:.0f} MB of SQLite")
    for method, path in [("spoc", sqlite), ("spoc", parquet),
                         *([("sql-sums", sqlite), ("pandas-read", sqlite)] if options.others else [])]:
        print(measure(method, path), flush=True)


if __name__ == "__main__":
    main()
