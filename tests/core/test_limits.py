"""Workers end with whoever started them; file handles are raised, or refused with a sentence."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

PARENT = """
import os, time
from spoc_lib.core.limits import worker_pool

if __name__ == "__main__":
    with worker_pool(2) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        list(pool.map(time.sleep, [60, 60]))
"""
HANDLES = """
import resource, sys
from spoc_lib.core.limits import need_file_handles

need_file_handles(int(sys.argv[1]))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def test_no_worker_outlives_a_process_that_is_killed(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    os.kill(worker, 0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the worker lives on")


def opened(soft: int, hard: int, needed: int) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", HANDLES, str(needed)], capture_output=True, text=True, check=False,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))


def test_a_soft_limit_is_raised_and_a_hard_one_is_told():
    assert opened(30, 500, 200).stdout == "500\n"
    refused = opened(30, 100, 200)
    assert refused.returncode == 1 and "may open 100 files and needs 200" in refused.stderr
