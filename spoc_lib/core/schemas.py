"""The tables that flow between rooms. Units stand in the names; times are seconds on the
monotonic clock of the run (on the virtual clock: simulated seconds), each run holding one wall-clock anchor."""

from __future__ import annotations

import pyarrow as pa

# fmt: off
_s, _i32, _i64, _f, _b = pa.string(), pa.int32(), pa.int64(), pa.float64(), pa.bool_()


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(list(columns.items()))


#: One row a scripted turn. `kind`: start (opens a conversation), agent (after a tool) or human.
#: The three lists describe the segments appended by this turn, in order (`workload.script.Segment`).
SESSIONS = _schema(persona=_s, user=_i32, conversation=_i32, turn=_i32, kind=_s,
                   segment_streams=pa.list_(_i64), segment_tokens=pa.list_(_i32), segment_layers=pa.list_(_s),
                   append_tokens=_i32, prompt_tokens=_i32, output_tokens=_i32, think_time_s=_f)

#: One row a request, all of them. `request` is unique within the stage. outcome: completed | failed | censored
#: (cut off by the end of the rung). Times are null where the event never happened. `prompt_tokens`,
#: `output_tokens` and `cached_tokens` are the server's own usage (null when it reports none);
#: `tokens_source` is usage | tokenizer | none.
REQUESTS = _schema(request=_i64, persona=_s, user=_i32, conversation=_i32, turn=_i32, kind=_s,
                   intended_send_s=_f, send_s=_f, first_token_s=_f, end_s=_f, ttft_s=_f,
                   intended_prompt_tokens=_i32, intended_output_tokens=_i32,
                   prompt_tokens=_i32, output_tokens=_i32, cached_tokens=_i32, tokens_source=_s,
                   chunks=_i32, outcome=_s, error_class=_s, http_status=_i32, finish_reason=_s)

#: One row a streamed chunk that carries tokens. `tokens` is a share of the server's usage where a chunk
#: carries several.
CHUNKS = _schema(request=_i64, time_s=_f, tokens=_f)

#: One row a sample of telemetry. source: vllm | dcgm | client | engine. `labels` is a JSON object, keys sorted.
METRICS = _schema(source=_s, metric=_s, labels=_s, time_s=_f, value=_f)

#: One row a rung of the concurrency ladder. driver: virtual (the twin's clock) | locust (real HTTP).
#: verdict: met | missed | undecided | invalid.
RUNGS = _schema(
    rung=_i32, users=_i32, driver=_s, start_s=_f, window_start_s=_f, window_end_s=_f, end_s=_f,
    planned=_i32, completed=_i32, failed=_i32, censored=_i32,
    live_users=_f, thinking_users=_f, in_flight_users=_f, little_error_ratio=_f,
    request_rate_per_s=_f, output_tokens_per_s=_f, prompt_tokens_per_s=_f,
    ttft_p50_s=_f, ttft_p95_s=_f, ttft_p99_s=_f, itl_p50_s=_f, itl_p95_s=_f, itl_p99_s=_f,
    tpot_p50_s=_f, tpot_p95_s=_f, cached_ratio=_f, kv_usage_ratio=_f, sm_active_ratio=_f, dram_active_ratio=_f,
    preemptions=_i32, waiting_mean=_f, client_limited=_b, verdict=_s, binding=_s, reason=_s,
)

#: One row an SLO and rung. `value_s` with its interval; verdict: met | missed | undecided. `beyond_ratio`: share of the
#: samples beyond the limit, with its interval; the SLO allows 1 - percentile / 100. `effective`: independent samples.
SLO_VERDICTS = _schema(rung=_i32, users=_i32, driver=_s, persona=_s, metric=_s, percentile=_f, limit_s=_f,
                       value_s=_f, low_s=_f, high_s=_f, samples=_i32, verdict=_s,
                       beyond_ratio=_f, beyond_low_ratio=_f, beyond_high_ratio=_f, effective=_f)

#: One row a trial of the search. state: complete | failed | infeasible | duplicate | invalid. `flags` is JSON.
#: driver: virtual (screening on the twin) | locust (a real launch). `violation` > 0: constraints missed.
#: goodput_per_s: requests a second that met every SLO on latency.
TRIALS = _schema(
    trial=_i32, state=_s, driver=_s, flags=_s, output_tokens_per_s=_f, goodput_per_s=_f, ttft_p95_s=_f, itl_p95_s=_f,
    violation=_f, failure_class=_s, reason=_s, duplicate_of=_i32, evidence=_s, duration_s=_f, hypervolume=_f,
    on_front=_b,
)

#: One row a (process, device, category) in a window of a GPU trace. `busy_ns` are exclusive: with `idle` they
#: sum to the window. `exposed_ns`: for collectives, the part that no compute hides.
DECOMPOSITION = _schema(
    pid=_i64, device=_i32, phase=_s, category=_s, window_ns=_i64, busy_ns=_i64, exposed_ns=_i64, kernels=_i64,
)
