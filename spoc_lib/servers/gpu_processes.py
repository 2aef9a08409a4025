"""Which processes hold GPU memory, asked of NVIDIA's own tool; where there is none, there is nothing to prove."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from spoc_lib.core.errors import SpocError

TIMEOUT_S = 20
FREE_WITHIN_S = 15.0


class GpuMemoryHeld(SpocError):
    """An engine was stopped and a process of it still holds GPU memory."""


def session_members(leader: int) -> set[int]:
    """Processes of the session that `leader` leads (Linux; empty elsewhere)."""
    members: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            pid = int(entry.name)
            if os.getsid(pid) == leader:
                members.add(pid)
        except (OSError, ValueError):
            continue  # it ended meanwhile
    return members


def gpu_memory_holders() -> set[int]:
    """Process ids that hold memory on any GPU; empty without nvidia-smi or when it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return set()
    try:
        answer = subprocess.run([tool, "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True,
                                encoding="utf-8", errors="replace", timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return {int(line) for line in answer.stdout.split() if line.isdigit()}


def prove_gpu_free(pids: set[int], within_s: float = FREE_WITHIN_S) -> None:
    """Return when none of `pids` holds GPU memory; GpuMemoryHeld when one does for longer."""
    if shutil.which("nvidia-smi") is None:
        return
    deadline = time.monotonic() + within_s
    while held := gpu_memory_holders() & pids:
        if time.monotonic() > deadline:
            raise GpuMemoryHeld("gpu-memory-held", f"processes {sorted(held)} of the stopped engine still hold GPU "
                                "memory: end them before the next launch, or it fails for lack of memory")
        time.sleep(0.5)
