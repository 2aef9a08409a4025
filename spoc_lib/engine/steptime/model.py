"""How long one engine step takes, for a model on a group of GPUs.

`step_time_model` returns a model calibrated on measurements where the project ships or the user made a calibration
of that model, else a roofline whose passport says that nothing was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.steptime import calibration_file, kernels, passport
from spoc_lib.engine.steptime.calibration_file import Calibration
from spoc_lib.engine.steptime.compiled import COEFFICIENTS, CompiledStep, step_seconds
from spoc_lib.engine.steptime.parameters import ROOFLINE, Parameters

#: Kernel categories of `components`, besides `idle`.
CATEGORIES = ("attn", "moe_gemm", "moe_route", "gemm", "comm", "norm", "rope", "kv", "act", "sample")


#: `Batch` fields that cost attention time in every step, and those that cost it in a step with prompt chunks.
PER_DECODE = ("decodes", "decode_context", "decode_window")
PER_PREFILL = ("prefill_tokens", "prefill_pairs", "prefill_window_pairs", "prefill_context")


@dataclass(frozen=True)
class StepTimeModel:
    """`StepTime` for `model` on `gpu_count` GPUs under tensor parallelism (see `steptime.kernels`).

    slowdown: how much longer every kernel but a collective takes than on a GPU at its nominal clock: the slowest GPU
    of the group paces all of them (`throttled`).
    """

    model: ModelSpec
    gpu: GpuSpec
    gpu_count: int
    parameters: Parameters = ROOFLINE
    calibration: Calibration | None = None
    slowdown: float = 1.0
    _tables: dict = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def shard(self) -> kernels.Shard:
        """The part of the model that one GPU computes."""
        return kernels.Shard(self.model, self.gpu, self.gpu_count, self.parameters)

    @cached_property
    def coefficients(self) -> dict[str, float]:
        """Seconds per unit, by the names of `COEFFICIENTS`."""
        p = self.parameters
        attention = kernels.attention_coefficients(self.shard)
        return {name: self.slowdown * value for name, value in attention.items()} | {
            "gap_step": p.gap_us * 1e-6,
            "gap_request": p.gap_request_us * 1e-6,
            "gap_mixed": p.gap_prefill_us * 1e-6,
        }

    def compiled(self, max_tokens: int) -> CompiledStep:
        """The same times as arrays, for steps of at most `max_tokens` tokens (see `steptime.compiled`)."""
        if max_tokens in self._tables:
            return self._tables[max_tokens]
        tokens = np.arange(max_tokens + 1, dtype=float)
        table = np.stack([sum(part.values()) for part in self._kernels(tokens, tokens)])
        step = CompiledStep(table, np.array([self.coefficients[name] for name in COEFFICIENTS]))
        self._tables[max_tokens] = step
        return step

    def seconds(self, batch: Batch) -> float:
        """Time from the start of this step to the start of the next one, engine saturated, in seconds."""
        if batch.tokens == 0:
            return 0.0
        need = max(int(batch.tokens), int(batch.logits))
        step = self.compiled(max(8192, 2 ** (need - 1).bit_length()))
        return float(step_seconds(step.table, step.coeffs, int(batch.tokens), *batch[1:9], int(batch.logits)))

    def components(self, batch: Batch) -> dict[str, float]:
        """GPU seconds by kernel category, plus `idle` (launch gaps and host); the sum equals `seconds`."""
        one = Batch._make(np.array([value]) for value in batch)
        return {name: float(values[0]) for name, values in self.components_of(one).items()}

    def components_of(self, batches: Batch) -> dict[str, np.ndarray]:
        """`components` of many steps at once: each field of `batches` is an array (steps,), and so is each value."""
        tokens, c = np.asarray(batches.tokens, dtype=float), self.coefficients
        seconds: dict[str, np.ndarray] = {name: np.zeros(len(tokens)) for name in (*CATEGORIES, "idle")}
        for part in self._kernels(tokens, np.asarray(batches.logits, dtype=float)):
            for name, value in part.items():
                seconds[name] = seconds[name] + value
        mixed = np.asarray(batches.prefills) > 0
        seconds["attn"] = c["step"] + sum(c[name] * getattr(batches, name) for name in PER_DECODE) + mixed * (
            c["mixed"] + sum(c[name] * getattr(batches, name) for name in PER_PREFILL))
        seconds["idle"] = (c["gap_step"] + c["gap_request"] * (batches.decodes + batches.prefills)
                           + c["gap_mixed"] * mixed)
        return {name: np.where(tokens > 0, value, 0.0) for name, value in seconds.items()}

    def _kernels(self, tokens: np.ndarray, logits: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Seconds by category of what depends on tokens, and of what depends on logits."""
        by_tokens, by_logits = (
            {name: np.asarray(value if name == "comm" else self.slowdown * value) for name, value in part.items()}
            for part in (kernels.token_seconds(self.shard, tokens), kernels.logits_seconds(self.shard, logits)))
        return by_tokens, by_logits

    def with_parameters(self, parameters: Parameters) -> StepTimeModel:
        """The same shapes under other parameters (a what-if: the passport still names the calibration)."""
        return replace(self, parameters=parameters, _tables={})

    def throttled(self, factor: float) -> StepTimeModel:
        """The group with one GPU whose clock is `factor` (0 to 1) of nominal, from the start and for good: its own
        kernels stretch by 1 / factor and all others wait for it (as `gpu_counters.Throttle` has it over HTTP)."""
        if not 0 < factor <= 1:
            raise InputError("bad-throttle", f"a throttled clock's factor lies between 0 and 1, not {factor:g}")
        return replace(self, slowdown=1 / factor, _tables={})

    def frontend_seconds(self, prompt_tokens: int) -> float:
        """What TTFT holds besides the engine's steps: HTTP, tokenizer, queues between processes and back."""
        return 1e-6 * (self.parameters.frontend_us + self.parameters.frontend_token_us * prompt_tokens)

    def passport(self) -> dict:
        """Model, GPU, calibration id, range of validity, held-out error (see `passport`)."""
        return passport.issue(self.model, self.gpu, self.gpu_count, self.calibration)


def step_time_model(model: ModelSpec, gpu: GpuSpec, gpu_count: int,
                    calibration: Calibration | None = None) -> StepTimeModel:
    """The best step time at hand: `calibration`, else the one in data/kernels for this model, else the roofline.

    A calibration serves GPUs that it did not measure too, scaled by their datasheet: the passport says so.
    InputError when the heads cannot be divided among the GPUs.
    """
    if gpu_count < 1 or model.heads % gpu_count:
        raise InputError("bad-gpu-count", f"the {model.heads} attention heads of {model.name} cannot be divided "
                         f"among {gpu_count} GPUs: use a divisor of {model.heads}")
    if calibration is None and calibration_file.path_of(model.name).is_file():
        calibration = calibration_file.load(calibration_file.path_of(model.name))
    if calibration is None:
        return StepTimeModel(model, gpu, gpu_count)
    return StepTimeModel(model, gpu, gpu_count, calibration.parameters, calibration)
