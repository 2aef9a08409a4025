"""A step's time as plain arrays and one function of numbers, for loops that numba compiles.

The formula, in the order of `COEFFICIENTS`:

    gpu  = table[0, tokens] + table[1, logits] + step + mixed · [prefills > 0] + decodes · … + prefill_context · …
    gap  = gap_step + gap_request · (decodes + prefills) + gap_mixed · [prefills > 0]
    time = gpu + gap

`table[0]` holds all kernels whose work depends only on the tokens of the step, `table[1]` the head and the sampler.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

#: Meaning of each entry of `CompiledStep.coeffs`, all in seconds (per unit of the `Batch` field where it is one).
COEFFICIENTS = (
    "step", "mixed", "decodes", "decode_context", "decode_window", "prefill_tokens", "prefill_pairs",
    "prefill_window_pairs", "prefill_context", "gap_step", "gap_request", "gap_mixed",
)


class CompiledStep(NamedTuple):
    """`table`: float64 (2, max_tokens + 1), seconds; `coeffs`: float64 (12,), see `COEFFICIENTS`."""

    table: np.ndarray
    coeffs: np.ndarray

    @property
    def max_tokens(self) -> int:
        """The largest step that the table holds, tokens."""
        return self.table.shape[1] - 1

    def seconds(self, batch) -> float:
        """Time of a `Batch` in seconds, through the compiled function."""
        return step_seconds(self.table, self.coeffs, *batch)


@numba.njit(cache=False, nogil=True)
def step_seconds(table, coeffs, tokens, decodes, decode_context, decode_window, prefills, prefill_tokens,
                 prefill_pairs, prefill_window_pairs, prefill_context, logits):
    """Seconds from the start of this step to the start of the next one (the formula above). The arguments after
    `coeffs` are the fields of `Batch`, in order; `tokens` and `logits` must be integers of at most max_tokens."""
    time = (table[0, tokens] + table[1, logits] + coeffs[0] + coeffs[2] * decodes + coeffs[3] * decode_context
            + coeffs[4] * decode_window + coeffs[9] + coeffs[10] * (decodes + prefills))
    if prefills > 0:
        time += (coeffs[1] + coeffs[5] * prefill_tokens + coeffs[6] * prefill_pairs
                 + coeffs[7] * prefill_window_pairs + coeffs[8] * prefill_context + coeffs[11])
    return time
