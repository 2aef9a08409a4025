"""What a run on the virtual clock leaves behind, and the tables made of it.

Whichever core played, it leaves a `RunLog`: columns only, one row a request, a delivered token or a step. The tables
of the workbench follow from it by whole-array operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import pyarrow as pa

from spoc_lib.core.schemas import CHUNKS, REQUESTS
from spoc_lib.engine.batch import Batch
from spoc_lib.workload.script import Turn

#: Columns of `RunLog.steps`: the batch, and the state after scheduling. start_s, end_s: when the step ran.
STEP_COLUMNS = ("start_s", "end_s", *Batch._fields, "running", "waiting", "kv_usage_ratio", "preempted",
                "prefix_queries", "prefix_hits")
WAITING, DONE, REFUSED = 0, 1, 2


@dataclass(slots=True)
class RunLog:
    """turns, send_s: one entry a request; its number is its place here.

    state (int8: in flight, done, refused), cached (int32 tokens, -1 = never admitted), admit_step (int64, -1): by
    request. token_request, token_step (int64): one entry a delivered token, in order of delivery; a token is visible
    at the end of its step. steps: float64 columns by `STEP_COLUMNS`, prefix_* of the requests admitted in the step.
    refusals: {request: (error class, HTTP status)}.
    """

    turns: list[Turn]
    send_s: list[float]
    state: np.ndarray
    cached: np.ndarray
    admit_step: np.ndarray
    token_request: np.ndarray
    token_step: np.ndarray
    steps: dict[str, np.ndarray]
    refusals: dict[int, tuple[str, int]]

    def until(self, end_s: float) -> RunLog:
        """The log as it stands at `end_s`: later tokens and steps are cut off, unfinished requests in flight."""
        keep = int(np.searchsorted(self.steps["end_s"], end_s, side="right"))
        tokens = int(np.searchsorted(self.token_step, keep, side="left"))
        state = self.state.copy()
        state[self.token_request[tokens:]] = WAITING
        return RunLog(self.turns, self.send_s, state, self.cached, self.admit_step, self.token_request[:tokens],
                      self.token_step[:tokens], {name: column[:keep] for name, column in self.steps.items()},
                      self.refusals)


@dataclass(frozen=True, slots=True)
class Progress:
    """Token times by request: number delivered, first and last (seconds, NaN where there is none)."""

    tokens: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray


def progress(log: RunLog) -> Progress:
    """Tokens of each request, and when its first and its last came (NaN: none), in simulated seconds."""
    requests = len(log.turns)
    times = log.steps["end_s"][log.token_step]
    first, last = np.full(requests, np.nan), np.full(requests, np.nan)
    last[log.token_request] = times
    first[log.token_request[::-1]] = times[::-1]
    return Progress(np.bincount(log.token_request, minlength=requests), first, last)


def chunks_table(log: RunLog, stream_interval: int) -> tuple[pd.DataFrame, np.ndarray]:
    """CHUNKS, and the number of chunks by request.

    vLLM sends the first token, then whenever `stream_interval` tokens have gathered, and what is left at the end.
    """
    requests = len(log.turns)
    tokens = np.ones(len(log.token_request))
    request, step = log.token_request, log.token_step
    if stream_interval > 1 and len(request):
        order = np.argsort(request, kind="stable")
        request, step = request[order], step[order]
        starts = np.flatnonzero(np.diff(request, prepend=-1))
        nth = np.arange(len(request)) - np.repeat(starts, np.diff(np.append(starts, len(request))))
        last = np.append(np.diff(request) != 0, True) & (log.state[request] == DONE)
        sent = (nth % stream_interval == 0) | last
        kept = np.flatnonzero(sent)
        before = np.where(nth[kept] == 0, -1, np.append(-1, nth[kept][:-1]))
        tokens = (nth[kept] - before).astype(float)
        back = np.argsort(step[kept], kind="stable")
        request, step, tokens = request[kept][back], step[kept][back], tokens[back]
    table = pd.DataFrame({"request": request.astype(np.int64), "time_s": log.steps["end_s"][step], "tokens": tokens})
    return table[CHUNKS.names], np.bincount(request, minlength=requests)


def requests_table(log: RunLog, chunks: np.ndarray) -> pd.DataFrame:
    """REQUESTS. What was in flight at the end is censored; the server's usage is known where it completed."""
    at = progress(log)
    send = np.array(log.send_s, dtype=float)
    done, refused = log.state == DONE, log.state == REFUSED
    turns = log.turns
    errors = [log.refusals.get(number, (None, 200 if done[number] else None)) for number in range(len(turns))]
    admitted = log.cached >= 0
    columns = {
        "request": np.arange(len(turns), dtype=np.int64),
        "persona": [turn.persona for turn in turns],
        "user": _ints(turns, "user"), "conversation": _ints(turns, "conversation"), "turn": _ints(turns, "turn"),
        "kind": [turn.kind for turn in turns],
        "intended_send_s": send, "send_s": send,
        "first_token_s": pa.array(at.first_s, mask=at.tokens == 0),
        "end_s": pa.array(np.where(refused, send, at.last_s), mask=~(done | refused)),
        "ttft_s": pa.array(at.first_s - send, mask=at.tokens == 0),
        "intended_prompt_tokens": _ints(turns, "prompt_tokens"),
        "intended_output_tokens": _ints(turns, "output_tokens"),
        "prompt_tokens": pa.array(_ints(turns, "prompt_tokens"), mask=~done),
        "output_tokens": pa.array(at.tokens.astype(np.int32), mask=~done),
        "cached_tokens": pa.array(log.cached.astype(np.int32), mask=~(done & admitted)),
        "tokens_source": ["usage" if one else "none" for one in done],
        "chunks": chunks.astype(np.int32),
        "outcome": ["completed" if one else "failed" if two else "censored"
                    for one, two in zip(done, refused, strict=True)],
        "error_class": pa.array([error for error, _ in errors], pa.string()),
        "http_status": pa.array([status for _, status in errors], pa.int32()),
        "finish_reason": pa.array(["length" if one else None for one in done], pa.string()),
    }
    return pa.table({name: columns[name] for name in REQUESTS.names}, schema=REQUESTS).to_pandas()


def _ints(turns: list[Turn], field: str) -> np.ndarray:
    return np.fromiter((getattr(turn, field) for turn in turns), dtype=np.int32, count=len(turns))


def steps_table(log: RunLog) -> pd.DataFrame:
    """One row a step: time_s (its start), duration_s, end_s, the `Batch` fields, running, waiting, kv_usage_ratio."""
    steps = log.steps
    columns = {"time_s": steps["start_s"], "duration_s": steps["end_s"] - steps["start_s"], "end_s": steps["end_s"]}
    for name in STEP_COLUMNS[2:]:
        whole = name not in ("prefill_pairs", "prefill_window_pairs", "kv_usage_ratio")
        columns[name] = steps[name].astype(np.int64) if whole else steps[name]
    return pd.DataFrame(columns)
