"""A place to break things in: small clusters and an outputs folder of its own, every process in it marked, so that an
orphan is found wherever it hides; and a judge of what is left on disk."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import orjson
import pyarrow.parquet as pq
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROFILE = {
    "name": "tiny", "title": "as little as shows everything", "audit_users": 10, "audit_turns": 4,
    "search_trials": 6, "search_population": 4, "search_finalists": 1, "screen_s": 20, "rung_s": 20, "warmup_s": 4,
    "http_rung_s": 6, "http_users": 6, "probes": 5, "trace_s": 0.2, "gap_cap_s": 2, "start": "stationary",
}  # fmt: skip
SLOS = [{"persona": "all", "metric": "ttft", "percentile": 95, "limit_s": 0.3},
        {"persona": "all", "metric": "itl", "percentile": 95, "limit_s": 0.02}]


class Place:
    """A folder with the cluster `small`, the profile `tiny` and `outputs/`; commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outputs = folder, folder / "outputs"
        self.mark = f"SPOC_CHAOS={uuid.uuid4().hex}"
        self.outputs.mkdir(parents=True, exist_ok=True)
        self.cluster("small")
        self.write("tiny.yaml", PROFILE)

    def write(self, name: str, value: Any) -> Path:
        path = self.folder / name
        path.write_text(yaml.safe_dump(value))
        return path

    def cluster(self, name: str, **changes: Any) -> str:
        """A small cluster file; its path."""
        cluster = yaml.safe_load((ROOT / "data/clusters/sim-2xh200.yaml").read_text())
        cluster |= {"name": name, "personas": "tiny", "ladder": {"users": [5, 10, 20, 40, 80]}, "slos": SLOS,
                    "search": {"target_users": 10, "space": {"max_num_batched_tokens": [512, 2048, 8192]}}} | changes
        return str(self.write(f"{name}.yaml", cluster))

    def tiny_model(self, name: str, engine: dict[str, Any], **changes: Any) -> str:
        """A cluster of the tiny model, which this machine serves over HTTP in real time."""
        return self.cluster(name, model="tiny-moe", hardware={"gpu": "h100-sxm", "count": 1}, engine=engine,
                            flags={}, ladder={"users": [4, 8, 12]}, **changes)

    def environment(self, **more: str) -> dict[str, str]:
        key, _, value = self.mark.partition("=")
        return {**os.environ, "SPOC_OUTPUTS": str(self.outputs), key: value, **more}

    def start(self, *words: str, before: Callable[[], None] | None = None, program: str = "spoc_lib", **more: str
              ) -> subprocess.Popen:
        """`spoc words…` in a session of its own. before: runs in the child first (limits)."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started with & passes on an ignored SIGINT
        return subprocess.Popen([sys.executable, "-m", program, *words], cwd=self.folder, text=True,
                                env=self.environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                start_new_session=True, preexec_fn=before)

    def spoc(self, *words: str, check: int | None = 0, timeout: float = 900, **more: Any
             ) -> subprocess.CompletedProcess:
        process = self.start(*words, **more)
        try:
            out, said = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert check is None or process.returncode == check, out + said
        return subprocess.CompletedProcess(words, process.returncode, out, said)

    def run(self, run_id: str, *more: str, cluster: str = "small.yaml", **options: Any) -> subprocess.CompletedProcess:
        return self.spoc("run", cluster, "--profile", "tiny.yaml", "--run-id", run_id, *more, **options)

    def state(self, run: str) -> dict[str, Any]:
        path = self.outputs / run / "run.json"
        return json.loads(path.read_text()) if path.exists() else {"stages": {}}

    def stage(self, run: str, number: str) -> str:
        return self.state(run)["stages"].get(number, {}).get("state", "")

    def answer(self, run: str) -> dict[str, Any]:
        return json.loads((self.outputs / run / "sweep" / "capacity.json").read_text())

    def processes(self) -> dict[int, str]:
        """Living processes that were started from this place, whatever became of their parents: command by id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    if command:  # a zombie has none
                        found[int(entry.name)] = command
            except OSError:
                continue
        return found

    def listening(self) -> set[str]:
        """The addresses on which processes of this place listen."""
        owned = set()
        for pid in self.processes():
            for handle in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    target = os.readlink(handle)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    owned.add(target[8:-1])
        found = set()
        for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in owned:
                    words = bytes.fromhex(fields[1].partition(":")[0])
                    address = b"".join(words[at:at + 4][::-1] for at in range(0, len(words), 4))
                    found.add(socket.inet_ntop(family, address))
        return found

    def find(self, words: str) -> int:
        """The process whose command holds `words`; waits for it."""
        assert self.wait(lambda: any(words in command for command in self.processes().values()), 60), words
        return next(pid for pid, command in self.processes().items() if words in command)

    @staticmethod
    def wait(condition: Callable[[], Any], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.05)
        return bool(condition())

    def no_orphans(self, within_s: float = 90) -> None:
        assert self.wait(lambda: not self.processes(), within_s), self.processes()

    def whole(self, folder: Path | None = None) -> None:
        """Every file below is of one piece."""
        damage = [f"{path}: {fault}" for path in sorted((folder or self.outputs).rglob("*"))
                  if path.is_file() and (fault := damaged(path))]
        assert not damage, "\n".join(damage)


def damaged(path: Path) -> str:
    """What is wrong with this file; '' where nothing is."""
    try:
        if path.name.endswith(".part"):
            return "an unfinished file"
        if path.suffix == ".json":
            orjson.loads(path.read_bytes())
        elif path.suffix == ".jsonl":  # a journal: its readers leave out a last line that was cut
            for line in path.read_bytes().split(b"\n")[:-1]:
                orjson.loads(line)
        elif path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix == ".html":
            return "" if path.read_text().rstrip().endswith("</html>") else "no end"
        elif path.suffix == ".ipynb":
            nbformat.validate(nbformat.read(path, as_version=4))
        elif path.suffix == ".yaml":
            yaml.safe_load(path.read_text())
        elif path.suffix in (".db", ".sqlite"):
            with sqlite3.connect(path) as database:
                return "" if database.execute("pragma integrity_check").fetchone() == ("ok",) else "not sound"
    except Exception as error:  # whatever a reader says of it is the finding
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture
def place(tmp_path):
    """A fresh place; nothing that was started in it may live on."""
    here = Place(tmp_path)
    yield here
    left = here.processes()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"orphans: {left}"
