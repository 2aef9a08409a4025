"""Traces built by hand, in any exporter version, with answers known beforehand."""

from __future__ import annotations

import re
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

#: The least that an exporter writes; other columns come from a real DDL where a test uses one.
MINIMAL_DDL = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  value INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT,
  globalTid INTEGER, textId INTEGER);
CREATE TABLE META_DATA_CAPTURE (name TEXT NOT NULL, value TEXT);
"""

ATTN = "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128>>(Flash_fwd_params)"
GEMM = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
COMM = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"
MOE = "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu"


def global_pid(pid: int) -> int:
    return (1 << 48) | (pid << 24)


class TraceFile:
    """A trace under construction. Times in ns."""

    def __init__(self, path: Path, ddl: str = MINIMAL_DDL) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.executescript(ddl)
        self._strings: dict[str, int] = {}

    def columns(self, table: str) -> dict[str, bool]:
        """{column: whether it must not be null}."""
        return {row[1]: bool(row[3]) for row in self.database.execute(f"PRAGMA table_info({table})")}

    def has(self, table: str) -> bool:
        return bool(self.columns(table))

    def string(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = 10 + len(self._strings)
            self.database.execute("INSERT INTO StringIds (id, value) VALUES (?, ?)", (self._strings[text], text))
        return self._strings[text]

    def insert(self, table: str, **values) -> None:
        columns = self.columns(table)
        row = {c: 0 for c, needed in columns.items() if needed} | {c: v for c, v in values.items() if c in columns}
        names = ", ".join(f'"{c}"' for c in row)
        self.database.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(row))})",
                              list(row.values()))

    def kernel(self, name: str, start: int, end: int, pid: int = 100, device: int = 0, stream: int = 7,
               correlation: int = 1) -> None:
        code = self.string(name)
        self.insert("CUPTI_ACTIVITY_KIND_KERNEL", start=start, end=end, deviceId=device, streamId=stream,
                    correlationId=correlation, globalPid=global_pid(pid), demangledName=code, shortName=code)

    def copy(self, start: int, end: int, kind: int = 1, pid: int = 100, device: int = 0) -> None:
        self.insert("CUPTI_ACTIVITY_KIND_MEMCPY", start=start, end=end, deviceId=device, streamId=7,
                    globalPid=global_pid(pid), copyKind=kind)

    def launch(self, start: int, correlation: int, pid: int = 100) -> None:
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=start + 1, globalTid=global_pid(pid) | 5,
                    correlationId=correlation, nameId=self.string("cudaLaunchKernel_v7000"))

    def nvtx(self, text: str, start: int, end: int, pid: int = 100, registered: bool = False) -> None:
        which = {"textId": self.string(text)} if registered else {"text": text}
        self.insert("NVTX_EVENTS", start=start, end=end, eventType=59, globalTid=global_pid(pid) | 5, **which)

    def meta(self, name: str, value: str) -> None:
        self.insert("META_DATA_CAPTURE", name=name, value=value)

    def done(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path


@pytest.fixture
def new_trace(tmp_path):
    """`new_trace(ddl=…)`: an empty trace file."""
    made = []

    def make(ddl: str = MINIMAL_DDL) -> TraceFile:
        made.append(TraceFile(tmp_path / f"trace{len(made)}.sqlite", ddl))
        return made[-1]

    return make


@pytest.fixture
def kernel_names():
    """Kernel names of four categories."""
    return {"attn": ATTN, "gemm": GEMM, "comm": COMM, "moe_gemm": MOE}


def table_ddl(ddl: str, table: str) -> str | None:
    """One CREATE TABLE of a schema dump."""
    found = re.search(rf"CREATE TABLE\s+\"?{table}\"?\s*\(.*?\);", ddl, re.DOTALL)
    return found.group(0) if found else None


@pytest.fixture
def ddl_table():
    return table_ddl


@pytest.fixture
def spoc(monkeypatch, capsys):
    """`spoc("decompose", …)`: the command line of the room, in this process; returncode, stdout and stderr."""
    from spoc_lib import cli

    def run(*arguments) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["spoc", "nsight", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run
