"""What a step's time depends on: the contract between the scheduler (which makes batches) and step-time models."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class Batch(NamedTuple):
    """One scheduled step, summed over its requests.

    tokens: all tokens computed in the step (decode and prefill);
    decodes: requests that compute one token with a finished prompt;
    decode_context: sum over decodes of the tokens attended to by a full-attention layer;
    decode_window: the same, each capped at the sliding window;
    prefills: requests that compute a prompt chunk;
    prefill_tokens: tokens of those chunks;
    prefill_pairs: query-key pairs of those chunks in a full-attention layer, causal:
        sum of new × (context_before + (new + 1) / 2);
    prefill_window_pairs: the same in a sliding layer;
    prefill_context: sum of context_before over chunks: KV read from earlier chunks or from the prefix cache;
    logits: requests that sample a token.
    """

    tokens: int
    decodes: int
    decode_context: int
    decode_window: int
    prefills: int
    prefill_tokens: int
    prefill_pairs: float
    prefill_window_pairs: float
    prefill_context: int
    logits: int


class StepTime(Protocol):
    """A model of a step's duration for one model on one set of GPUs."""

    def seconds(self, batch: Batch) -> float:
        """Time from the start of this step to the start of the next one, engine saturated, in seconds."""
        ...

    def components(self, batch: Batch) -> dict[str, float]:
        """GPU time by kernel category (`attn moe_gemm moe_route gemm comm norm rope kv act sample`) plus `idle`
        (launch gaps and host), in seconds; the sum equals `seconds`. Per GPU; all GPUs do the same under TP."""
        ...

    def components_of(self, batches: Batch) -> dict[str, np.ndarray]:
        """`components` of many steps at once: each field of `batches` is an array (steps,), and so is each value."""
        ...

    def passport(self) -> dict:
        """model, gpu, count, calibration id, range of validity, held-out error."""
        ...
