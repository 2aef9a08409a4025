"""Many workers at one study in a real PostgreSQL: no trial lost, none done twice, a dead worker's trial put back."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import optuna
import pytest

from spoc_lib.search import storage as search_storage
from spoc_lib.search.sampler import interrupted
from spoc_lib.search.storage import open_storage
from spoc_lib.search.study import record_of

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "analytic.py"


def programs() -> Path:
    """The folder of initdb and postgres; skips where there is no PostgreSQL server."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    pytest.skip("PostgreSQL's server programs (initdb, postgres) are not installed")


@pytest.fixture(scope="module")
def database():
    """The URL of a fresh PostgreSQL on a port of its own."""
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("psycopg is not installed (extra: distributed)")
    binaries = programs()
    user = "postgres" if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
    if user and subprocess.run(["id", user], capture_output=True, check=False).returncode:
        user = "nobody"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="spoc-pg-"))
    if user:
        shutil.chown(folder, user)
    role = user or getpass.getuser()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder, "user": user}
    subprocess.run([binaries / "initdb", "-D", folder / "data", "-U", role, "-A", "trust", "--no-sync"], check=True,
                   **quiet)
    server = subprocess.Popen([binaries / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-h",
                               "127.0.0.1", "-F"], **quiet)
    url = f"postgresql+psycopg://{role}@127.0.0.1:{port}/postgres"
    try:
        wait_for(url, server)
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(url: str, server: subprocess.Popen) -> None:
    import psycopg

    plain = url.replace("+psycopg", "")
    deadline = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(plain, connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            if time.monotonic() > deadline or server.poll() is not None:
                raise
            time.sleep(0.1)


def worker(folder: Path, trials: int, url: str, *, seconds: float = 0.05, seed: int = 1) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(PROGRAM), str(folder), str(trials), str(seconds), url, str(seed)],
                            cwd=PROGRAM.parents[2])


def only_study(url: str, trials: int) -> optuna.Study:
    names = [n for n in optuna.get_all_study_names(open_storage(url)) if f"-tickets-{trials}" in n]
    return optuna.load_study(study_name=names[0].removesuffix(f"-tickets-{trials}"), storage=open_storage(url))


def test_two_workers_share_the_trials(database, tmp_path):
    pair = [worker(tmp_path / name, 30, database) for name in ("a", "b")]
    assert [one.wait(timeout=120) for one in pair] == [0, 0]
    every = only_study(database, 30).get_trials()
    trials = [t for t in every if not interrupted(t)]
    assert len(every) <= 31, "the loser of the race for the last slot leaves a trial without an answer, at most"
    assert [t.number for t in trials] == list(range(30)) and all(record_of(t) for t in trials)
    done = [sorted(int(p.parent.name) for p in (tmp_path / name).glob("trials/*/verdict.json")) for name in "ab"]
    assert done[0] and done[1], "both workers had a share"
    assert not set(done[0]) & set(done[1]), "no trial twice"
    answered = {t.number for t in trials if record_of(t)["state"] in ("duplicate", "invalid")}
    assert set(done[0]) | set(done[1]) | answered == set(range(30)), "no trial lost"


def test_a_dead_workers_trial_is_put_back(database, tmp_path, monkeypatch):
    monkeypatch.setattr(search_storage, "HEARTBEAT_S", 1)
    monkeypatch.setattr(search_storage, "GRACE_S", 2)
    slow = worker(tmp_path / "slow", 12, database, seconds=600, seed=2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "slow").glob("trials/*")):
        time.sleep(0.05)
    os.kill(slow.pid, signal.SIGKILL)
    slow.wait()
    time.sleep(3.5)
    spec = importlib.util.spec_from_file_location("analytic_worker", PROGRAM)
    analytic = importlib.util.module_from_spec(spec)
    sys.modules["analytic_worker"] = analytic
    spec.loader.exec_module(analytic)
    rest = analytic.study(tmp_path / "rest", storage=database, seed=2)
    rest.run(12)
    trials = rest.trials()
    answered = [t for t in trials if record_of(t)]
    assert len([t for t in trials if interrupted(t)]) == 1 and len(answered) == 12
