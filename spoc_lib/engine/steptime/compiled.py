"""A step's time as plain arrays and one function of numbers, for loops that numba compiles.

The formula, in the order of `COEFFICIENTS`:

    gpu  = table[0, tokens] + table[1, logits] + step + mixed · [prefills > 0] + decodes · … + prefill_context · …
    gap  = gap_step + gap_request · (decodes + prefills) + gap_mixed · [prefills > 0]
    time = gpu + gap

The one loop that is kept in numba's cache, `closed_loop`, stands in this file too: numba notices a change in the file
of a function, not in what it calls from other files.

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


@numba.njit(cache=False, nogil=True)
def _window_pairs(before, tokens, window):
    growing = max(0, min(before + tokens, window) - before)
    return growing * (before + (growing + 1) / 2) + (tokens - growing) * window


@numba.njit(cache=True, nogil=True)
def closed_loop(table, coeffs, prompts, outputs, slots, budget, window, asynchronous, fixed, per_token, turnaround):
    """Send, first-token and end time of every request, seconds. A step is planned when the one before it starts
    (asynchronous scheduling), so it holds the requests that had arrived by then."""
    count = len(prompts)
    slots = min(slots, count)
    send, first, end, arrival = np.zeros(count), np.zeros(count), np.zeros(count), np.empty(count)
    for i in range(slots):
        arrival[i] = fixed + per_token * prompts[i]
    queue = np.empty(count, np.int64)  # requests in order of arrival; those before `head` are admitted
    queue[:slots] = np.argsort(arrival[:slots], kind="mergesort")  # equal arrivals: in order of sending
    head, tail, following, finished = 0, slots, slots, 0
    decoding = np.full(slots, -1, np.int64)  # request in each decode slot, -1: free
    left, context = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    completed = np.empty(slots, np.int64)  # prompts that this step completes
    partial, computed = -1, 0  # the one prompt that an exhausted budget left unfinished
    decodes, decode_context, decode_window, prefilling = 0, 0, 0, 0
    now, planned = 0.0, 0.0
    while finished < count:
        if partial < 0 and head == tail and decodes > 0 and decode_window == decodes * window:
            # nobody waits and nobody comes before the next finish: steps differ by their context alone
            ahead = np.min(np.where(decoding >= 0, left, np.iinfo(np.int64).max)) - 1
            if ahead > 0:
                seconds = step_seconds(table, coeffs, decodes, decodes, decode_context, decode_window, 0, 0, 0.0,
                                       0.0, 0, decodes)
                now += ahead * seconds + coeffs[3] * decodes * (ahead * (ahead - 1) / 2)
                decode_context += decodes * ahead
                context += np.where(decoding >= 0, ahead, 0)
                left -= np.where(decoding >= 0, ahead, 0)
                planned = now
        room, prefills, prefill_tokens, cached, ncompleted = budget - decodes, 0, 0, 0, 0
        pairs, window_pairs = 0.0, 0.0
        while room > 0:
            if partial >= 0:
                request, before = partial, computed
            elif head < tail and decodes + prefilling < slots and arrival[queue[head]] <= planned:
                request, before = queue[head], 0
                head += 1
                prefilling += 1
            else:
                break
            tokens = min(prompts[request] - before, room)
            room -= tokens
            prefills += 1
            prefill_tokens += tokens
            cached += before
            pairs += tokens * (before + (tokens + 1) / 2)
            window_pairs += _window_pairs(before, tokens, window)
            if before + tokens == prompts[request]:
                completed[ncompleted] = request
                ncompleted += 1
                partial = -1
            else:
                partial, computed = request, before + tokens
        if decodes + prefill_tokens == 0:
            now = max(now, arrival[queue[head]])
            planned = now
            continue
        seconds = step_seconds(table, coeffs, decodes + prefill_tokens, decodes, decode_context, decode_window,
                               prefills, prefill_tokens, pairs, window_pairs, cached, decodes + ncompleted)
        planned = now if asynchronous else now + seconds
        now += seconds
        if decodes > 0:
            for slot in range(slots):
                request = decoding[slot]
                if request < 0:
                    continue
                decode_context += 1
                if context[slot] < window:
                    decode_window += 1
                context[slot] += 1
                left[slot] -= 1
                if left[slot] == 0:
                    decoding[slot] = -1
                    decodes -= 1
                    decode_context -= context[slot]
                    decode_window -= min(context[slot], window)
                    finished += 1
                    end[request] = now
                    if following < count:
                        send[following] = now + turnaround
                        arrival[following] = send[following] + fixed + per_token * prompts[following]
                        place = tail
                        while place > head and arrival[queue[place - 1]] > arrival[following]:
                            queue[place] = queue[place - 1]
                            place -= 1
                        queue[place] = following
                        tail += 1
                        following += 1
        for k in range(ncompleted):
            request = completed[k]
            first[request] = now
            prefilling -= 1
            slot = int(np.argmin(decoding))
            decoding[slot] = request
            left[slot], context[slot] = outputs[request] - 1, prompts[request] + 1
            decodes += 1
            decode_context += context[slot]
            decode_window += min(context[slot], window)
    return send, first, end
