"""The samples that Python's Prometheus client adds to every page: garbage collector, interpreter, process."""

from __future__ import annotations

import gc
import os
import platform
import resource
import sys
import time

from spoc_lib.engine.http.prometheus_text import Registry


class ProcessMetrics:
    """Puts the families into a registry; `update` reads the process's state."""

    def __init__(self, registry: Registry) -> None:
        self._gc = {name: registry.family(f"python_gc_{full}_total", "counter", description)
                    for name, full, description in (
                        ("collected", "objects_collected", "Objects collected."),
                        ("uncollectable", "objects_uncollectable", "Uncollectable objects found."),
                        ("collections", "collections", "Collections of each generation."))}
        major, minor, patch = platform.python_version_tuple()
        registry.family("python_info", "gauge", "The Python that runs this.").child(
            implementation=platform.python_implementation(), major=major, minor=minor, patchlevel=patch,
            version=platform.python_version()).value = 1
        self._virtual = registry.family("process_virtual_memory_bytes", "gauge", "Virtual memory.").child()
        self._resident = registry.family("process_resident_memory_bytes", "gauge", "Resident memory.").child()
        registry.family("process_start_time_seconds", "gauge", "Start of the process, Unix time."
                        ).child().value = time.time()
        self._cpu = registry.family("process_cpu_seconds_total", "counter", "CPU time, user and system.").child()
        self._open = registry.family("process_open_fds", "gauge", "Open file descriptors.").child()
        self._most = registry.family("process_max_fds", "gauge", "Limit of open file descriptors.").child()

    def update(self) -> None:
        """Read the process's own counters."""
        for generation, stats in enumerate(gc.get_stats()):
            for name, family in self._gc.items():
                family.child(generation=str(generation)).value = stats[name]
        self._cpu.value = time.process_time()
        self._most.value = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if sys.platform == "linux":
            with open("/proc/self/statm", encoding="ascii") as statm:
                virtual, resident = statm.read().split()[:2]
            self._virtual.value = int(virtual) * resource.getpagesize()
            self._resident.value = int(resident) * resource.getpagesize()
            self._open.value = len(os.listdir("/proc/self/fd"))
        else:
            self._resident.value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
