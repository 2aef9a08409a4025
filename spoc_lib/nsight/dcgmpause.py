"""DCGM's profiling counters paused while nsys traces (they share a lock on the GPU), and the gap marked."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd

#: The counters that DCGM reads from the GPU's performance monitor; all others go on during a pause.
PROFILING = "DCGM_FI_PROF_"
_TIMEOUT_S = 30


@dataclass
class Pause:
    """start_s, end_s: monotonic seconds of the pause, None where nothing was paused; sentence: what happened."""

    start_s: float | None = None
    end_s: float | None = None
    sentence: str = ""

    def without_gap(self, metrics: pd.DataFrame) -> pd.DataFrame:
        """METRICS without the profiling counters' samples of the pause: stale values are not measurements."""
        if self.start_s is None or self.end_s is None:
            return metrics
        stale = (metrics.metric.str.startswith(PROFILING)
                 & metrics.time_s.between(self.start_s, self.end_s))
        return metrics[~stale].reset_index(drop=True)


@contextmanager
def paused(recorded: bool) -> Iterator[Pause]:
    """Pause DCGM's profiling around the block where `dcgmi` is here; resumed however the block ends.

    recorded: whether this run reads DCGM at all; without, nothing is paused.
    """
    pause = Pause()
    if not recorded:
        pause.sentence = "No DCGM counters are recorded in this run, so none were paused."
    elif (refused := _dcgmi("--pause")) is not None:
        pause.sentence = (f"DCGM's profiling counters were not paused ({refused}): if nsys reports a lock on the "
                          f"counters, pause them on the host (dcgmi profile --pause).")
    else:
        pause.start_s = time.monotonic()
    try:
        yield pause
    finally:
        if pause.start_s is not None:
            refused = _dcgmi("--resume")
            pause.end_s = time.monotonic()
            pause.sentence = (f"DCGM's profiling counters were paused for {pause.end_s - pause.start_s:.1f} s; the gap "
                              f"is left open." + (f" They did not resume ({refused}): dcgmi profile --resume."
                                                  if refused else ""))


def _dcgmi(option: str) -> str | None:
    """None when done, else the reason."""
    program = shutil.which("dcgmi")
    if program is None:
        return "dcgmi is not on this machine"
    try:
        done = subprocess.run([program, "profile", option], capture_output=True,
                              encoding="utf-8", errors="replace", timeout=_TIMEOUT_S,
                              check=False)
    except subprocess.TimeoutExpired:
        return f"dcgmi did not answer within {_TIMEOUT_S} s"
    return None if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip() or "no reason given")[:200]
