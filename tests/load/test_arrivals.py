"""When bytes came, by the kernel's stamps: the two clocks, and a wall clock that is set. In a process of its own, for
gevent patches the interpreter."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
from spoc_lib.load.arrivals import WallOffset

real, ahead = time.time_ns, 0
time.time_ns = lambda: real() + ahead
for _ in range(20):
    WallOffset.refresh()
assert WallOffset.stepped_s == 0.0, WallOffset.stepped_s
wall_ns, now = time.time_ns(), time.monotonic()
told = wall_ns // 10**9 - WallOffset.base_s + wall_ns % 10**9 * 1e-9 + WallOffset.offset_s
assert abs(told - now) < 0.01, told - now
ahead = -300_000_000
WallOffset.refresh()
assert abs(WallOffset.stepped_s - 0.3) < 0.01, WallOffset.stepped_s
ahead = 3600 * 10**9
WallOffset.refresh()
assert abs(WallOffset.stepped_s - 3600.3) < 0.01, WallOffset.stepped_s
"""


def test_a_wall_clock_that_is_set_is_noticed():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
