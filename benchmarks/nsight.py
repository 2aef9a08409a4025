"""How fast a big kernel trace is decomposed: 10 M kernels on 8 GPUs, as SQLite and as a parquetdir.

    python benchmarks/nsight.py                                  # makes the traces once, then measures
    python benchmarks/nsight.py --kernels 50000000               # also whether time grows in proportion (5 GB)
    python benchmarks/nsight.py --others --nsys-ai PATH          # beside pandas, sqlite3, a row loop and nsys-ai

PATH is the program `nsys-ai` of an environment of its own (`pip install nsys-ai`). Each measurement runs in a fresh
process: wall and CPU seconds, and peak resident memory; the last columns are wall and CPU time a kernel as multiples
of ours (on a busy machine only CPU compares).
Methods that take minutes are measured on a smaller trace, and the line says on how many kernels. Targets, on two
cores: SQLite within 6 s and 1 GB, Parquet within 2.5 s, at 50 M the same time a kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
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
BASE = 10_000_000
#: The generator holds this many kernels at a time.
CHUNK = 5_000_000
_KERNELS = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "demangledName",
            "shortName", "registersPerThread", "gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ",
            "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread", "localMemoryTotal", "gridId",
            "graphNodeId")


def kernel_columns(count: int, seed: int, pattern: np.ndarray, begin_ns: int) -> dict[str, np.ndarray]:
    """`count` kernels of all GPUs from `begin_ns` on, interleaved in time as an exporter writes them: each GPU repeats
    `pattern` (name ids of one step), a tenth of the kernels on a second stream where they overlap the next."""
    rng = np.random.default_rng(seed)
    each = count // GPUS
    parts = []
    for device in range(GPUS):
        length = rng.integers(1_500, 40_000, each)
        start = np.cumsum(length + rng.integers(0, 1_500, each)) + begin_ns
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
    pattern = np.array([names.index(name) for name in launched])
    insert = (f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL ({', '.join(_KERNELS)}) "
              f"VALUES ({', '.join('?' * len(_KERNELS))})")
    writer, begin_ns = None, 60_000_000_000
    for at in range(0, count, CHUNK):
        columns = kernel_columns(min(CHUNK, count - at), at + 1, pattern, begin_ns)
        begin_ns = int(columns["end"].max()) + 1_000
        part = pa.table(columns)
        writer = writer or pq.ParquetWriter(parquet / "CUPTI_ACTIVITY_KIND_KERNEL.parquet", part.schema)
        writer.write_table(part)
        for row in range(0, part.num_rows, 100_000):
            rows = (columns[c][row:row + 100_000].tolist() for c in _KERNELS)
            database.executemany(insert, zip(*rows, strict=True))
    writer.close()
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


def by_row_loop(path: str) -> None:
    """What the script that ships with vLLM (gputrc2graph) does to nsys' CSV: one list of all GPUs' kernels in order of
    start, and a Python loop that writes each overlap into its table. One union over all GPUs is not the truth."""
    import pandas as pd

    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    table = pd.read_sql('SELECT start, "end", demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY start', database)
    table["elapsed"] = table["end"] - table["start"]
    starts, ends, column = table["start"].to_numpy(), table["end"].to_numpy(), table.columns.get_loc("elapsed")
    latest = ends[0]
    for i in range(1, len(table)):
        if starts[i] > latest:
            latest = ends[i]
        elif ends[i] > latest:
            table.iloc[i, column] = ends[i] - latest
            latest = ends[i]
        else:
            table.iloc[i, column] = 0
    table.groupby("demangledName").elapsed.sum()


METHODS = {"spoc": by_us, "sql-sums": by_sql_sums, "pandas-read": by_pandas, "row-loop": by_row_loop}


def measure(method: str, path: Path, kernels: int) -> dict:
    """Wall and CPU seconds and peak MiB of one method in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--one", method, str(path)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{method} failed on {path}:\n{done.stderr}")
    return json.loads(done.stdout) | {"kernels": kernels}


def measure_nsys_ai(program: str, path: Path, kernels: int) -> dict:
    """`nsys-ai report` of one of the GPUs, on a copy, for it writes indexes into the file; its cache starts empty, as
    at a first look."""
    with tempfile.TemporaryDirectory(dir=path.parent) as home:
        copy = shutil.copyfile(path, Path(home) / "trace.sqlite")
        started, before = time.perf_counter(), os.times()
        done = subprocess.run([program, "report", str(copy), "--gpu", "0", "--trim", "0", "100000"],
                              capture_output=True, text=True, env={"HOME": home, "PATH": "/usr/bin:/bin"}, cwd=home)
        wall, after = time.perf_counter() - started, os.times()
    if done.returncode:
        raise SystemExit(f"nsys-ai failed on {path}:\n{done.stderr[-2000:] or done.stdout[-2000:]}")
    return {"method": "nsys-ai, 1 GPU of 8", "trace": path.name, "wall_s": round(wall, 2),
            "cpu_s": round(sum(after[2:4]) - sum(before[2:4]), 2), "kernels": kernels // GPUS}


def _one(method: str, path: str) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    METHODS[method](path)
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent's memory before exec, too
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"method": method, "trace": Path(path).name, "wall_s": round(time.perf_counter() - started, 2),
                      "cpu_s": round(time.process_time() - cpu, 2), "peak_mib": round(peak)}))


def _tell(found: dict, ours: dict) -> None:
    """One line; ratios: seconds a kernel over those of `ours`."""
    wall, cpu = (found[key] / found["kernels"] / (ours[key] / ours["kernels"]) for key in ("wall_s", "cpu_s"))
    print(f"{found['method']:20} {found['trace']:24} {found['kernels'] / 1e6:6.2f} M {found['wall_s']:8.2f} s wall "
          f"{found['cpu_s']:8.2f} s CPU {found.get('peak_mib', float('nan')):7.0f} MiB "
          f"{wall:7.2f} x wall {cpu:7.2f} x CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/nsight-bench"))
    parser.add_argument("--kernels", type=int, default=BASE, help="a second trace of so many, for linearity")
    parser.add_argument("--others", action="store_true", help="also the usual ways to read such a file")
    parser.add_argument("--nsys-ai", metavar="PROGRAM", help="also nsys-ai's report of one GPU")
    parser.add_argument("--slow-kernels", type=int, default=1_000_000, help="size of the trace for the row loop")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "TRACE"))
    options = parser.parse_args()
    if options.one:
        _one(*options.one)
        return
    measure("spoc", make(options.folder, 10_000)[0], 10_000)  # compiles once; the cache serves the rest
    sqlite, parquet = make(options.folder, BASE)
    print(f"{BASE} kernels on {GPUS} GPUs, {sqlite.stat().st_size / 1e6:.0f} MB of SQLite")
    ours = measure("spoc", sqlite, BASE)
    _tell(ours, ours)
    _tell(measure("spoc", parquet, BASE), ours)
    if options.kernels != BASE:
        for path in make(options.folder, options.kernels):
            _tell(measure("spoc", path, options.kernels), ours)
    if options.others:
        _tell(measure("sql-sums", sqlite, BASE), ours)
        _tell(measure("pandas-read", sqlite, BASE), ours)
        _tell(measure("row-loop", make(options.folder, options.slow_kernels)[0], options.slow_kernels), ours)
    if options.nsys_ai:
        _tell(measure_nsys_ai(options.nsys_ai, sqlite, BASE), ours)


if __name__ == "__main__":
    main()
