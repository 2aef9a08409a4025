"""The second port: GPU counters as NVIDIA's dcgm-exporter would show them, derived from the engine's own steps.

Sampled once a second like an exporter with a one-second interval; a scrape shows the last sample. Labels as in
dcgm-exporter: gpu, UUID, pci_bus_id, device, modelName, Hostname.
"""

from __future__ import annotations

import asyncio
import socket
import time

from spoc_lib.core.errors import InputError
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.gpu_counters import GpuCounters, Throttle
from spoc_lib.engine.http.metrics_page import ActivitySum
from spoc_lib.engine.http.prometheus_text import Registry
from spoc_lib.workload.identity import mix

INTERVAL_S = 1.0
_COUNTERS = {
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "Energy since the start, in mJ.",
    "DCGM_FI_DEV_THERMAL_VIOLATION": "Time throttled by temperature, in ns.",
    "DCGM_FI_DEV_POWER_VIOLATION": "Time throttled by the power limit, in ns.",
}
_GAUGES = {
    "DCGM_FI_DEV_SM_CLOCK": "SM clock, in MHz.",
    "DCGM_FI_DEV_GPU_TEMP": "GPU temperature, in degrees Celsius.",
    "DCGM_FI_DEV_POWER_USAGE": "Power draw, in W.",
    "DCGM_FI_DEV_GPU_UTIL": "Share of time with a kernel running, in %.",
    "DCGM_FI_DEV_FB_USED": "Memory used, in MiB.",
    "DCGM_FI_DEV_FB_FREE": "Memory free, in MiB.",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "Why the clock is lowered, as a bit mask.",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "Share of time with the graphics engine active.",
    "DCGM_FI_PROF_SM_ACTIVE": "Share of time with a warp resident, over SMs.",
    "DCGM_FI_PROF_DRAM_ACTIVE": "Share of time with memory traffic.",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "Share of time with the tensor pipe active.",
    "DCGM_FI_PROF_NVLINK_TX_BYTES": "NVLink bytes sent per second.",
    "DCGM_FI_PROF_NVLINK_RX_BYTES": "NVLink bytes received per second.",
}


class DcgmPage:
    """Samples `activity` and renders the page. `started_s`: when the throttle's clock began (monotonic)."""

    def __init__(self, engine: EmbeddedEngine, activity: ActivitySum, throttle: Throttle | None = None,
                 started_s: float | None = None) -> None:
        if throttle and throttle.gpu >= engine.gpu_count:
            raise InputError("bad-throttle",
                             f"--throttle gpu={throttle.gpu}: the engine has GPUs 0 to {engine.gpu_count - 1}")
        self._activity = activity
        self._started_s = time.monotonic() if started_s is None else started_s
        used_gib = engine.flags.gpu_memory_utilization * engine.gpu.memory_gib
        self._counters = GpuCounters(engine.gpu, engine.gpu_count, used_gib, throttle)
        self._registry = Registry()
        self._samples: dict[str, list] = {}
        for kind, families in (("gauge", _GAUGES), ("counter", _COUNTERS)):
            for name, description in families.items():
                family = self._registry.family(name, kind, description)
                self._samples[name] = [family.child(**_labels(engine, gpu)) for gpu in range(engine.gpu_count)]
        passport = self._registry.family("spoc:passport_info", "gauge", "Every value of this page is simulated.")
        passport.child(simulated="true", model=engine.model.name, gpu=engine.gpu.name).value = 1

    async def run(self) -> None:
        """Sample for ever."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample(time.monotonic())

    def sample(self, now: float) -> None:
        """Take what happened since the last sample."""
        sums, start, seconds = self._activity.take(now)
        if seconds <= 0:
            return
        for name, values in self._counters.advance(sums, seconds, start - self._started_s).items():
            for sample, value in zip(self._samples[name], values[-1], strict=True):
                sample.value = float(value)

    def render(self) -> bytes:
        """The page as it stands now."""
        return self._registry.render()


def _labels(engine: EmbeddedEngine, gpu: int) -> dict[str, str]:
    """The UUID says what it is: SPOC in place of a board's own, the same on every start."""
    identity = f"{mix(gpu):016x}"
    return {"gpu": str(gpu), "UUID": f"GPU-5b0c0000-{identity[:4]}-{identity[4:8]}-{identity[8:12]}-{identity:0>12.12}",
            "pci_bus_id": f"00000000:{gpu + 1:02X}:00.0", "device": f"nvidia{gpu}",
            "modelName": f"{engine.gpu.title} (simulated)", "Hostname": socket.gethostname()}
