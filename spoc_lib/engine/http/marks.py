"""NVTX ranges around phases, rungs and engine steps, so that a capture can be cut by them.

NVTX keeps every text for ever, and step texts are all different: ranges are only made while a profiler listens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import nvtx

#: Set by a profiler in the programs that it starts.
_PROFILER_VARIABLES = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


def profiled() -> bool:
    """Whether this process was started by a profiler that collects NVTX."""
    return any(os.environ.get(name) for name in _PROFILER_VARIABLES)


@contextmanager
def mark(text: str) -> Iterator[None]:
    """A range named `text` around the block; nothing where no profiler listens. May span awaits and threads."""
    if not profiled():
        yield
        return
    handle = nvtx.start_range(text)
    try:
        yield
    finally:
        nvtx.end_range(handle)
