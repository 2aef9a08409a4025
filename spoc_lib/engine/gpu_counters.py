"""What a GPU's counters would have shown, derived from what the step model says that the GPU did.

Both clocks of the twin use these functions: the HTTP server a second at a time, the virtual clock on arrays.

    sums = activity(step_time.components(batch), batch, model, gpu, gpu_count)   # per step: floats or arrays
    sums = sums.per_window(time_s, start_s, window_s, windows)              # arrays of steps: sums per window
    counters = GpuCounters(gpu, gpu_count, memory_used_gib)
    values = counters.advance(sums, window_s, start_s)                      # {DCGM field: (windows, GPUs)}

Every quantity of `Activity` is additive over steps and means ONE GPU of the tensor-parallel group (all do the
same, unless one is throttled). Bytes and operations follow from the model's shape and the batch alone; time
on the SMs follows from the step model's kernel categories. The weights of `SM_COVERAGE`, the power and the
thermal constants are assumptions of the twin, not measurements: the values agree with the step model and
share its passport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.config.specs import Part
from spoc_lib.engine.batch import Batch

Number = float | np.ndarray

#: Share of the SMs that hold a warp while a kernel of the category runs. Collectives use a few dozen blocks;
#: routing, norms and sampling at decode sizes launch fewer blocks than there are SMs.
SM_COVERAGE = {
    "attn": 0.85, "moe_gemm": 0.95, "moe_route": 0.4, "gemm": 0.85, "comm": 0.25, "norm": 0.5, "rope": 0.4,
    "kv": 0.4, "act": 0.7, "sample": 0.4, "mem": 0.7, "other": 0.6,
}
IDLE_POWER_SHARE = 0.12        # of the board limit, clocks up and no kernel
SM_POWER, DRAM_POWER, TENSOR_POWER = 0.35, 0.35, 0.55  # shares of the dynamic range at full activity
AMBIENT_C, C_PER_WATT, THERMAL_TIME_S = 28.0, 0.055, 15.0
THROTTLE_C = 88.0
CLOCK_POWER_CAP, CLOCK_SW_THERMAL, CLOCK_HW_THERMAL = 0x4, 0x20, 0x40


class Activity(NamedTuple):
    """What one GPU did, summed over steps: floats, or arrays of one shape.

    busy_s: some kernel runs; comm_s: of it, collectives; sm_active_s: mean over SMs of the time with a
    resident warp; read_bytes, write_bytes: DRAM traffic; tensor_flops: matrix operations; tensor_s: their time at
    the rate of their precision; nvlink_bytes: sent = received.
    """

    busy_s: Number
    comm_s: Number
    sm_active_s: Number
    read_bytes: Number
    write_bytes: Number
    tensor_flops: Number
    tensor_s: Number
    nvlink_bytes: Number

    def plus(self, other: Activity) -> Activity:
        """The sum, counter by counter."""
        return Activity(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def per_window(self, time_s: np.ndarray, start_s: float, window_s: float, windows: int) -> Activity:
        """Sums of steps (ending at `time_s`) in `windows` windows of `window_s` from `start_s` on."""
        index = np.floor((np.asarray(time_s) - start_s) / window_s).astype(np.int64)
        inside = (index >= 0) & (index < windows)
        return Activity(*(
            np.bincount(index[inside], weights=np.broadcast_to(field, index.shape)[inside], minlength=windows)
            for field in self
        ))


NOTHING = Activity(*[0.0] * len(Activity._fields))


def activity(components: Mapping[str, Number], batch: Batch, model: ModelSpec, gpu: GpuSpec,
             gpu_count: int) -> Activity:
    """One GPU's part of the step(s): `components` as `StepTime.components` gives them (seconds per category
    and `idle`), `batch` with numbers or equally long arrays in its fields."""
    kernels = {name: seconds for name, seconds in components.items() if name != "idle"}
    busy = sum(kernels.values(), 0.0)
    covered = sum((seconds * SM_COVERAGE[name] for name, seconds in kernels.items()), 0.0)
    read, write = dram_bytes(batch, model, gpu_count)
    tensor_s = _scores(batch, model, gpu_count) / gpu.bf16_flops_per_s + sum(
        (flops / gpu.peak(*model.weights(part)) for part, flops in _products(batch, model, gpu_count).items()), 0.0)
    return Activity(busy, components.get("comm", 0.0), covered, read, write, tensor_flops(batch, model, gpu_count),
                    tensor_s, nvlink_bytes(batch, model, gpu_count))


def tensor_flops(batch: Batch, model: ModelSpec, gpu_count: int) -> Number:
    """Matrix operations of one GPU: 2 per weight and token, 4 × head_dim per head and query-key pair."""
    return _scores(batch, model, gpu_count) + sum(_products(batch, model, gpu_count).values(), 0.0)


def _matrices(model: ModelSpec) -> dict[Part, int]:
    """Weights of one layer by the part that they belong to; of the experts, one expert's."""
    sizes: dict[Part, int] = {"attention": model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)}
    if model.d_ff:
        sizes["dense"] = 3 * model.hidden * model.d_ff
    if model.moe:
        sizes |= {"router": model.hidden * model.moe.experts, "experts": 3 * model.hidden * model.moe.d_ff}
    return sizes


def _scores(batch: Batch, model: ModelSpec, gpu_count: int) -> Number:
    """Operations of attention between queries and keys, which are BF16."""
    pairs = ((model.layers - model.sliding_layers) * (batch.decode_context + batch.prefill_pairs)
             + model.sliding_layers * (batch.decode_window + batch.prefill_window_pairs))
    return 4.0 * model.heads * model.head_dim * pairs / gpu_count


def _products(batch: Batch, model: ModelSpec, gpu_count: int) -> dict[Part, Number]:
    """Operations of one GPU by the part whose weights they use."""
    chosen = {"experts": model.moe.top_k} if model.moe else {}
    products: dict[Part, Number] = {part: 2.0 * model.layers * chosen.get(part, 1) * size * batch.tokens / gpu_count
                                    for part, size in _matrices(model).items()}
    return products | {"head": 2.0 * model.hidden * model.vocabulary * batch.logits / gpu_count}


def dram_bytes(batch: Batch, model: ModelSpec, gpu_count: int) -> tuple[Number, Number]:
    """(read, written) by one GPU: weights once a step, in the bits of their part (only the experts that are hit), KV of
    the attended context, hidden states in and out of each layer's operations (replicated under tensor parallelism)."""
    hit: dict[Part, Number] = {}
    if model.moe:
        miss = (1 - model.moe.top_k / model.moe.experts) ** np.asarray(batch.tokens, dtype=float)
        hit["experts"] = model.moe.experts * (1 - miss)
    read = (np.asarray(batch.logits) > 0) * (model.hidden * model.vocabulary * model.weights("head")[0] / 8)
    for part, size in _matrices(model).items():
        read = read + model.layers * hit.get(part, 1) * size * model.weights(part)[0] / 8
    kv = 2 * model.kv_heads * model.head_dim * model.kv_bits / 8
    full = model.layers - model.sliding_layers
    window = model.sliding_window or 0
    attended = (full * (batch.decode_context + batch.prefill_context)
                + model.sliding_layers * (batch.decode_window + window * batch.prefills))
    hidden = model.layers * 2.0 * model.hidden * batch.tokens
    read = (read + kv * attended) / gpu_count + 8 * hidden
    write = kv * model.layers * batch.tokens / gpu_count + 6 * hidden
    return read, write


def nvlink_bytes(batch: Batch, model: ModelSpec, gpu_count: int) -> Number:
    """Bytes that one GPU sends: two all-reduces a layer, each 2 (n - 1) / n of the BF16 hidden states."""
    if gpu_count == 1:
        return 0.0 * batch.tokens
    return 2 * model.layers * 2.0 * model.hidden * batch.tokens * 2 * (gpu_count - 1) / gpu_count


@dataclass(frozen=True, slots=True)
class Throttle:
    """One GPU that overheats: from `at_s` on its clock is `factor` of nominal (0 < factor < 1)."""

    gpu: int
    at_s: float
    factor: float

    def extra_s(self, components: Mapping[str, Number], time_s: float) -> Number:
        """How much longer a tensor-parallel step becomes: the slow GPU's own kernels stretch by 1 / factor,
        and every other GPU waits for it in the next collective."""
        if time_s < self.at_s:
            return 0.0
        own = sum((seconds for name, seconds in components.items() if name not in ("idle", "comm")), 0.0)
        return own * (1 / self.factor - 1)


class GpuCounters:
    """The DCGM-like fields of all GPUs of one replica, advanced window by window (temperature, energy and
    violation counters have memory). `memory_used_gib` per GPU."""

    def __init__(self, gpu: GpuSpec, gpu_count: int, memory_used_gib: float,
                 throttle: Throttle | None = None) -> None:
        self._gpu, self._count, self._throttle = gpu, gpu_count, throttle
        self._memory_used_mib = memory_used_gib * 1024
        self._temperature_c = np.full(gpu_count, AMBIENT_C + C_PER_WATT * IDLE_POWER_SHARE * gpu.power_w)
        self._energy_mj = np.zeros(gpu_count)
        self._violation_ns = {"THERMAL": np.zeros(gpu_count), "POWER": np.zeros(gpu_count)}

    def advance(self, sums: Activity, window_s: float, start_s: float = 0.0) -> dict[str, np.ndarray]:
        """Values at the end of each window, {DCGM field: array (windows, GPUs)}; `sums` per window (a float
        is one window), the first from `start_s` on. Ratios 0-1, W, °C, MHz, MiB, mJ, ns, bytes/s; GPU_UTIL
        in %."""
        busy_s, comm_s, sm_s, read, written, _, tensor_s, sent = (
            np.atleast_1d(np.asarray(field, dtype=float)) for field in sums)
        windows, gpu = len(busy_s), self._gpu
        ends = start_s + window_s * (1 + np.arange(windows))
        clock = np.ones((windows, self._count))
        hot = np.zeros((windows, self._count), dtype=bool)
        busy = np.repeat(busy_s[:, None], self._count, axis=1)
        sm = np.repeat(sm_s[:, None], self._count, axis=1)
        throttle = self._throttle
        if throttle and throttle.gpu < self._count:  # it computes longer, the others wait for it in collectives
            late = ends > throttle.at_s
            stretch = np.where(late, 1 / throttle.factor - 1, 0.0)
            extra = (busy_s - comm_s) * stretch
            busy += extra[:, None]
            waiting = np.arange(self._count) != throttle.gpu
            sm += np.where(waiting[None, :], SM_COVERAGE["comm"] * extra[:, None],
                           ((sm_s - SM_COVERAGE["comm"] * comm_s) * stretch)[:, None])
            clock[late, throttle.gpu] = throttle.factor
            hot[late, throttle.gpu] = True
        sm = np.minimum(sm / window_s, 1.0)
        dram = np.minimum(np.repeat((read + written)[:, None], self._count, 1) / (gpu.dram_bytes_per_s * window_s), 1.0)
        tensor = np.minimum(tensor_s[:, None] / (window_s * clock), sm)
        load = np.minimum(SM_POWER * sm + DRAM_POWER * dram + TENSOR_POWER * tensor, 1.0)
        power = gpu.power_w * (IDLE_POWER_SHARE + (1 - IDLE_POWER_SHARE) * load * clock)
        capped = load >= 1.0
        link = np.repeat(sent[:, None], self._count, 1) / window_s
        return {
            "DCGM_FI_DEV_GPU_UTIL": np.minimum(busy / window_s, 1.0) * 100,
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE": np.minimum(busy / window_s, 1.0),
            "DCGM_FI_PROF_SM_ACTIVE": sm,
            "DCGM_FI_PROF_DRAM_ACTIVE": dram,
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": tensor,
            "DCGM_FI_DEV_POWER_USAGE": power,
            "DCGM_FI_DEV_GPU_TEMP": self._temperatures(power, hot, window_s),
            "DCGM_FI_DEV_SM_CLOCK": gpu.sm_clock_mhz * clock,
            "DCGM_FI_DEV_FB_USED": np.full_like(clock, self._memory_used_mib),
            "DCGM_FI_DEV_FB_FREE": np.full_like(clock, gpu.memory_gib * 1024 - self._memory_used_mib),
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": self._grow(self._energy_mj, power * window_s * 1000),
            "DCGM_FI_DEV_THERMAL_VIOLATION": self._grow(self._violation_ns["THERMAL"], hot * window_s * 1e9),
            "DCGM_FI_DEV_POWER_VIOLATION": self._grow(self._violation_ns["POWER"], capped * window_s * 1e9),
            "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": (
                hot * float(CLOCK_SW_THERMAL | CLOCK_HW_THERMAL) + capped * float(CLOCK_POWER_CAP)),
            "DCGM_FI_PROF_NVLINK_TX_BYTES": link,
            "DCGM_FI_PROF_NVLINK_RX_BYTES": link,
        }

    def _temperatures(self, power: np.ndarray, hot: np.ndarray, window_s: float) -> np.ndarray:
        """First-order lag of the steady temperature; a throttled GPU sits at its slowdown threshold."""
        steady = np.where(hot, THROTTLE_C, AMBIENT_C + C_PER_WATT * power)
        share = 1 - np.exp(-window_s / THERMAL_TIME_S)
        result = np.empty_like(steady)
        now = self._temperature_c
        for window in range(len(steady)):
            now = now + share * (steady[window] - now)
            result[window] = now
        self._temperature_c = now
        return result

    @staticmethod
    def _grow(counter: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The counter after each window; `counter` is advanced in place."""
        result = counter + np.cumsum(steps, axis=0)
        counter[:] = result[-1]
        return result
