"""DCGM's fields: the ones the workbench reads, what each is for, and the values that mean "no value".

Names and units: NVIDIA DCGM field identifiers (`dcgm_fields.h`) as dcgm-exporter prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

#: dcgm_structs.h: 64-bit blank is 0x7ffffffffffffff0, the next three mean not found, not supported, no
#: permission (9223372036854775794 = not supported); as doubles they all round to 2**63. Doubles: 2**47 and
#: the next three. 32-bit: 0x7ffffff0 and the next three.
_BLANK_INT64 = 9.2e18
_BLANK_FP64 = range(140737488355328, 140737488355332)
_BLANK_INT32 = range(2147483632, 2147483636)

#: Bits of DCGM_FI_DEV_CLOCKS_EVENT_REASONS that slow a GPU down. The power cap (0x4) is normal at full load.
CLOCK_EVENTS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal slowdown",
                0x40: "hardware thermal slowdown", 0x80: "power brake"}
ALARMING_EVENTS = 0x8 | 0x20 | 0x40 | 0x80


class Counter(NamedTuple):
    """A field that the counters file asks dcgm-exporter for, and what its absence costs."""

    field: str
    kind: str
    help: str
    cost: str
    default_on: bool


COUNTERS: tuple[Counter, ...] = (
    Counter("DCGM_FI_PROF_SM_ACTIVE", "gauge", "Ratio of cycles an SM has at least one warp assigned",
            "the report cannot say how busy the GPUs are at the limit", False),
    Counter("DCGM_FI_PROF_SM_OCCUPANCY", "gauge", "Ratio of warps resident on an SM",
            "busy SMs cannot be told from well-filled ones", False),
    Counter("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles the tensor pipe is active",
            "compute-bound prefill cannot be told from other SM activity", True),
    Counter("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "Ratio of cycles the device memory interface is active",
            "decode bound by memory bandwidth is inferred, not seen", True),
    Counter("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active",
            "host-bound idling shows only through SM activity", True),
    Counter("DCGM_FI_PROF_NVLINK_TX_BYTES", "gauge", "NVLink bytes sent in a second",
            "communication between GPUs is not seen", False),
    Counter("DCGM_FI_PROF_NVLINK_RX_BYTES", "gauge", "NVLink bytes received in a second",
            "communication between GPUs is not seen", False),
    Counter("DCGM_FI_PROF_PCIE_TX_BYTES", "gauge", "PCIe bytes sent in a second",
            "transfers to the host are not seen", True),
    Counter("DCGM_FI_PROF_PCIE_RX_BYTES", "gauge", "PCIe bytes received in a second",
            "transfers from the host are not seen", True),
    Counter("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock (MHz)",
            "a throttled GPU that holds its peers back stays hidden", True),
    Counter("DCGM_FI_DEV_MEM_CLOCK", "gauge", "Memory clock (MHz)", "a memory clock held low stays hidden", True),
    Counter("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (C)", "the cause of a throttled GPU stays unknown", True),
    Counter("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (W)", "power-capped load cannot be recognised", True),
    Counter("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since boot (mJ)",
            "no energy a token in the report", True),
    Counter("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (MiB)", "memory headroom is unknown", True),
    Counter("DCGM_FI_DEV_FB_FREE", "gauge", "Framebuffer memory free (MiB)", "memory headroom is unknown", True),
    Counter("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilisation (%): any kernel running at all",
            "none: SM activity says more", True),
    Counter("DCGM_FI_DEV_POWER_VIOLATION", "counter", "Time throttled by power (ns)",
            "time lost to the power cap is not counted", False),
    Counter("DCGM_FI_DEV_THERMAL_VIOLATION", "counter", "Time throttled by temperature (ns)",
            "time lost to heat is not counted", False),
    Counter("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "gauge", "Bits: why clocks are below the maximum",
            "the reason of a low clock stays unknown", False),
    Counter("DCGM_FI_DEV_XID_ERRORS", "gauge", "Last XID error", "a failing GPU is noticed late", True),
)


def unsupported(values: np.ndarray | float) -> np.ndarray:
    """Mask of values by which DCGM says "blank", "not found", "not supported" or "no permission"; never
    plotted."""
    array = np.asarray(values, dtype=float)
    blank = np.isnan(array) | (np.abs(array) >= _BLANK_INT64)
    return blank | np.isin(array, list(_BLANK_FP64)) | np.isin(array, list(_BLANK_INT32))


def is_dcgm(metric: str) -> bool:
    """Whether a metric is one of DCGM's."""
    return metric.startswith("DCGM_")


#: Names that one field has had: `clock_event_reasons` was `clock_throttle_reasons` before DCGM 3.3.
_ALIASES = ({"DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_EVENT_REASONS",
             "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"},)


def aliases(field: str) -> set[str]:
    """All names of a field, old and new."""
    return next((names for names in _ALIASES if field in names), {field})


def of_instance(field: str) -> bool:
    """Whether a field is a MIG instance's own; all others (power, energy, clocks, heat) have one meter a board."""
    return field.startswith(("DCGM_FI_PROF_", "DCGM_FI_DEV_FB_", "DCGM_FI_DEV_GPU_UTIL")) \
        and not field.startswith(("DCGM_FI_PROF_NVLINK", "DCGM_FI_PROF_PCIE"))


def gpu_of(labels: Mapping[str, str]) -> str:
    """A board's identity: its UUID (an index means another GPU in another container), else host and index."""
    uuid = labels.get("UUID") or labels.get("uuid") or ""
    if uuid and not uuid.startswith("MIG-"):
        return uuid
    return f"{host_of(labels)}:{labels.get('gpu', labels.get('device', '?'))}"


def host_of(labels: Mapping[str, str]) -> str:
    """The node that a series is about: dcgm-exporter's own label, else the address of the exporter."""
    return labels.get("hostname") or labels.get("Hostname") or labels.get("node") or \
        labels.get("instance", "").rpartition(":")[0]


def counters_csv() -> str:
    """The counters file for dcgm-exporter's `-f`: every field of `COUNTERS`."""
    lines = ["# Format: DCGM field, Prometheus type, help. Read once a second (see the collect interval)."]
    lines += [f"{counter.field}, {counter.kind}, {counter.help}." for counter in COUNTERS]
    return "\n".join(lines) + "\n"
