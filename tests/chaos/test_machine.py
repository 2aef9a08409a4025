"""Faults of the machine: a full disk, no file handles, a clock that jumps, and two runs that share what they can."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

#: The notebook that is quickest by itself.
SHORT = ("--only", "04", "--set", "users=5")

JUMP = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* The wall clock stands an hour ahead as long as the file exists. The monotonic clock is left alone, as by date -s. */
static long ahead(void) {
    struct stat seen;
    const char *file = getenv("SPOC_CHAOS_AHEAD");
    return file && stat(file, &seen) == 0 ? 3600 : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    long failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec, now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *kept) {
    struct timespec fine;
    clock_gettime(CLOCK_REALTIME, &fine);
    if (kept) *kept = fine.tv_sec;
    return fine.tv_sec;
}
"""


@pytest.fixture
def small_disk(place):
    """`outputs/` of the place as a file system of its own, of 16 MB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place.outputs)],
                             capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here (root is needed): {mounted.stderr.strip()}")
    yield place.outputs
    subprocess.run(["umount", "-l", str(place.outputs)], check=True)


@pytest.mark.chaos
def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(place, small_disk):
    ballast = small_disk / "ballast.bin"
    ballast.write_bytes(bytes(16_500_000))
    done = place.run("r", *SHORT, check=1)
    assert "No space left on device" in done.stderr or "no space is left on the disk" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stdout
    place.whole()
    place.no_orphans()
    assert place.stage("r", "04") != "done"
    ballast.unlink()
    place.spoc("run", "small.yaml", "--run-id", "r", "--resume", "--only", "04")
    assert place.stage("r", "04") == "done" and (place.outputs / "r" / "04_nsight_trace_analysis.html").exists()
    place.whole()


@pytest.mark.chaos
def test_a_limit_on_file_sizes_is_one_sentence_too(place):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = place.run("r", *SHORT, check=1, before=small_files)
    assert "File too large" in done.stderr or "size limit" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    place.whole()
    place.no_orphans()


@pytest.mark.parametrize("handles", [64, 200])
def test_too_few_file_handles_are_refused_before_anything_starts(place, handles):
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (handles, handles))

    done = place.run("r", *SHORT, check=2, before=few)
    assert f"may open {handles} files and needs 256" in done.stderr and "ulimit -n" in done.stderr
    place.whole()
    place.no_orphans()


def test_a_low_soft_limit_is_raised_and_more_users_than_the_hard_one_are_refused(place):
    port = _serve(place)
    words = ("load", "run", "--base-url", f"http://127.0.0.1:{port}", "--model", "m", "--duration", "3",
             "--personas", "tiny", "--gap-cap", "0.2", "--out", "rung", "--json", "rung.json")

    def limits(soft: int, hard: int):
        return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    refused = place.spoc(*words, "--users", "120", check=2, before=limits(150, 150))
    assert "may open 150 files and needs 220" in refused.stderr
    place.spoc(*words, "--users", "60", before=limits(40, 4000))
    rung = json.loads((place.folder / "rung.json").read_text())
    assert rung["planned"] == rung["completed"] + rung["failed"] + rung["censored"] > 0 and not rung["errors"]


@pytest.mark.chaos
def test_the_wall_clock_jumps_an_hour_and_no_duration_notices(place):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler to build the clock with")
    (place.folder / "jump.c").write_text(JUMP)
    library, ahead = place.folder / "jump.so", place.folder / "ahead"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(place.folder / "jump.c")], check=True)
    clocks = {"LD_PRELOAD": str(library), "SPOC_CHAOS_AHEAD": str(ahead)}
    port = _serve(place, **clocks)
    began = time.monotonic()
    process = place.start("load", "run", "--base-url", f"http://127.0.0.1:{port}", "--model", "m", "--users", "6",
                          "--duration", "6", "--personas", "tiny", "--gap-cap", "0.2", "--out", "rung",
                          "--json", "rung.json", **clocks)
    assert place.wait(lambda: list(place.folder.glob("rung/client-0/planned.jsonl")), 60)
    time.sleep(2)
    ahead.touch()
    time.sleep(2)
    ahead.unlink()
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, out + said
    took = time.monotonic() - began
    requests = pd.read_parquet(place.folder / "rung" / "requests.parquet")
    assert len(requests) > 10
    ended = requests[requests["outcome"] == "completed"]
    assert ((ended["ttft_s"] > 0) & (ended["ttft_s"] < took)).all()
    assert ((ended["end_s"] >= ended["first_token_s"]) & (ended["end_s"] - ended["send_s"] < took)).all()
    assert requests["send_s"].max() - requests["send_s"].min() < took


def _serve(place, **more: str) -> int:
    """The embedded engine of the tiny model in its own process; its port."""
    place.tiny_model("engine", {"kind": "embedded", "served_model": "m"})
    ready = place.folder / "ready.json"
    place.servers = [*getattr(place, "servers", []),
                     place.start("engine", "serve", "--cluster", "engine.yaml", "--ready-file", str(ready), **more)]
    assert place.wait(ready.exists, 60)
    return int(json.loads(ready.read_text())["base_url"].rpartition(":")[2])


@pytest.fixture(autouse=True)
def servers_end(place):
    yield
    for server in getattr(place, "servers", []):
        server.terminate()
        server.communicate(timeout=30)


@pytest.mark.chaos
def test_two_runs_in_one_outputs_folder(place):
    """Different runs do not meet; the same run is held by one; the index lists both."""
    litter = set(Path("notebooks").glob("kernel*")) if Path("notebooks").is_dir() else set()
    first = place.start("run", "small.yaml", "--profile", "tiny.yaml", "--run-id", "a", "--only", "01")
    second = place.start("run", "small.yaml", "--profile", "tiny.yaml", "--run-id", "b", "--only", "01")
    assert place.wait(lambda: place.stage("a", "01") == "running", 300)
    third = place.spoc("run", "small.yaml", "--profile", "tiny.yaml", "--run-id", "a", "--only", "01", check=2)
    assert "another process is working on run 'a'" in third.stderr
    for process in (first, second):
        _, said = process.communicate(timeout=800)
        assert process.returncode == 0, said
    page = (place.outputs / "index.html").read_text()
    assert ">a<" in page and ">b<" in page
    one, other = (json.loads((place.outputs / run / "workload" / "audit.json").read_text()) for run in "ab")
    assert one.pop("provenance") and other.pop("provenance"), "each names its own run"
    assert one == other
    place.whole()
    assert not set(Path(os.getcwd(), "notebooks").glob("kernel*")) - litter
