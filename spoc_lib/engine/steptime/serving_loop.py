"""A closed-loop benchmark against the twin: mean TTFT and TPOT of one serving point.

`on_core` drives the engine's core step by step. `compiled` takes the same decisions from sums alone, where nothing
can be preempted: hundreds of times faster, and held equal to `on_core` by a test. `measure` chooses.
"""

from __future__ import annotations

import heapq

import numpy as np

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.engine.flags import EngineFlags
from spoc_lib.engine.memory import kv_windows, num_kv_blocks
from spoc_lib.engine.scheduling.content import Piece, SymbolicContent
from spoc_lib.engine.scheduling.core import EngineCore, EngineLoop
from spoc_lib.engine.steptime import serving_points
from spoc_lib.engine.steptime.compiled import CompiledStep, closed_loop
from spoc_lib.engine.steptime.model import StepTimeModel
from spoc_lib.engine.steptime.parameters import Parameters
from spoc_lib.engine.steptime.serving_points import ServingPoint


def flags_of(point: ServingPoint, model: ModelSpec) -> EngineFlags:
    """The server's flags in the benchmark."""
    return EngineFlags(
        max_num_batched_tokens=serving_points.MAX_NUM_BATCHED_TOKENS, max_num_seqs=point.concurrency,
        gpu_memory_utilization=serving_points.GPU_MEMORY_UTILIZATION, enable_prefix_caching=False,
        tensor_parallel_size=point.gpu_count,
        max_model_len=min(model.max_model_len, point.prompt + point.output + 1))


def served_by(point: ServingPoint, step_time: StepTimeModel) -> StepTimeModel:
    """`step_time` with the step overhead of the release that served `point`."""
    if not point.earlier_release:
        return step_time
    p = step_time.parameters
    return step_time.with_parameters(p.model_copy(update={"gap_us": p.gap_us + p.earlier_release_gap_us}))


def measure(point: ServingPoint, model: ModelSpec, gpu: GpuSpec, step_time: StepTimeModel,
            exact: bool = False) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) in seconds, as the twin gives them; `step_time` is the server's (see `served_by`).

    exact: on the core even where sums suffice. InputError when the model does not fit or a request exceeds
    the context limit.
    """
    flags = flags_of(point, model)
    blocks = num_kv_blocks(flags, model, gpu, point.gpu_count)
    prompts, outputs = point.lengths()
    if exact or not _always_fits(flags, model, blocks, prompts, outputs):
        return on_core(EngineCore(flags, model, blocks, step_time), prompts, outputs, step_time.parameters)
    step = step_time.compiled(flags.max_num_batched_tokens)
    return compiled(step, prompts, outputs, flags, model, step_time.parameters)


def _always_fits(flags: EngineFlags, model: ModelSpec, blocks: int, prompts: np.ndarray, outputs: np.ndarray) -> bool:
    """Whether even the longest requests at once leave blocks free, whatever the groups' windows save."""
    longest = int((prompts + outputs).max()) + 2 * flags.max_num_batched_tokens // flags.max_num_seqs
    each = len(kv_windows(model)) * (longest // flags.block_size + 2)
    return flags.max_num_seqs * each < blocks


def _frontend(parameters: Parameters) -> tuple[float, float, float]:
    return (parameters.frontend_us * 1e-6, parameters.frontend_token_us * 1e-6,
            parameters.client_turnaround_us * 1e-6)


def on_core(core: EngineCore, prompts: np.ndarray, outputs: np.ndarray, parameters: Parameters
            ) -> tuple[float, float]:
    """The benchmark against the plain core, `core.flags.max_num_seqs` requests at a time."""
    fixed, per_token, turnaround = _frontend(parameters)
    count, slots = len(prompts), min(core.flags.max_num_seqs, len(prompts))
    send, first, end = np.zeros(count), np.zeros(count), np.zeros(count)
    arrivals = [(fixed + per_token * prompts[i], i) for i in range(slots)]
    heapq.heapify(arrivals)
    loop, now, following = EngineLoop(core), 0.0, slots
    while True:
        while arrivals and arrivals[0][0] <= now:
            _, i = heapq.heappop(arrivals)
            content = SymbolicContent([Piece(i, 0, int(prompts[i] + outputs[i]))], core.flags.block_size)
            core.add_request(str(i), content, int(outputs[i]), num_prompt=int(prompts[i]))
        step_end = loop.start(now)
        if step_end is None:
            if not arrivals:
                break
            now = arrivals[0][0]
            continue
        now = step_end
        for one in loop.finish().outputs:
            i = int(one.request_id)
            if one.num_output == 1:
                first[i] = now
            if one.finish_reason:
                end[i] = now
                if following < count:
                    send[following] = now + turnaround
                    arrival = send[following] + fixed + per_token * prompts[following]
                    heapq.heappush(arrivals, (arrival, following))
                    following += 1
    return float((first - send).mean()), float(((end - first) / (outputs - 1)).mean())


def compiled(step: CompiledStep, prompts: np.ndarray, outputs: np.ndarray, flags: EngineFlags, model: ModelSpec,
             parameters: Parameters) -> tuple[float, float]:
    """The same from sums alone; right where no request ever lacks a block and no prompt has a cached prefix."""
    window = model.sliding_window or model.max_model_len
    send, first, end = closed_loop(step.table, step.coeffs, prompts, outputs, flags.max_num_seqs,
                                   flags.max_num_batched_tokens, window, flags.async_scheduling,
                                   *_frontend(parameters))
    return float((first - send).mean()), float(((end - first) / (outputs - 1)).mean())
