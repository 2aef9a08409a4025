"""Waiting for a moment to within some 0.1 ms. asyncio alone rounds every wait up to a whole millisecond (the
resolution of epoll), which is 10 % of a decode step; a Linux timer descriptor has no such grain."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import struct
import sys
import time

CLOCK_MONOTONIC, TFD_NONBLOCK, TFD_TIMER_ABSTIME = 1, 0o4000, 1


class Timer:
    """One waiter at a time, on the running loop. Elsewhere than on Linux it is `asyncio.sleep`."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._waiter: asyncio.Future | None = None
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._descriptor = self._libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK)

    def __enter__(self) -> Timer:
        if self._descriptor >= 0:
            asyncio.get_running_loop().add_reader(self._descriptor, self._expired)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)

    async def until(self, moment_s: float | None) -> None:
        """Return at `moment_s` (CLOCK_MONOTONIC; None: never), or earlier on `wake`. Other tasks run at least once."""
        if moment_s is not None and moment_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        handle = None
        if self._descriptor >= 0:
            self._arm(moment_s or 0.0)
        elif moment_s is not None:
            handle = loop.call_later(moment_s - time.monotonic(), self.wake)
        try:
            await self._waiter
        finally:
            if handle:
                handle.cancel()

    def wake(self) -> None:
        """End the wait now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _arm(self, moment_s: float) -> None:
        """Fire at the moment; 0 disarms."""
        seconds = int(moment_s)
        spec = struct.pack("@llll", 0, 0, seconds, int((moment_s - seconds) * 1e9))
        if self._libc.timerfd_settime(self._descriptor, TFD_TIMER_ABSTIME, spec, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # armed anew since the loop saw it fire
            os.read(self._descriptor, 8)
            self.wake()
