"""What this process may take of the machine: file handles, and processors through workers that never outlive it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from spoc_lib.core.errors import InputError

PR_SET_PDEATHSIG = 1
#: As many as anybody here will want.
MOST_HANDLES = 65536


def need_file_handles(needed: int) -> None:
    """Raise this process's soft limit as far as it may; InputError when even that is fewer than `needed`.

    Children inherit it. A kernel that runs out of handles aborts in the middle of its libraries: better not to begin.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_HANDLES if hard == resource.RLIM_INFINITY else min(hard, MOST_HANDLES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < needed:
        raise InputError("few-file-handles", f"this process may open {most} files and needs {needed}: raise the limit, "
                         "for example with ulimit -n 65536")


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh processes that end with this one, even when it is killed: otherwise they would wait for ever."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=fresh, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        yield pool


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it had ended before we asked to be told
        os._exit(1)
