"""Latency samples from the tables: the definitions of the design, once, for both drivers.

TTFT, ITL, TPOT and end-to-end as arrays of seconds, failures as +inf, so that a percentile never forgets them.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from spoc_lib.load.records import CLIENT_CUTS


def started_in(requests: pd.DataFrame, start_s: float, end_s: float) -> pd.DataFrame:
    """The requests whose latency belongs to the window: by start time."""
    return requests[(requests["send_s"] >= start_s) & (requests["send_s"] < end_s)]


def ttft_values(requests: pd.DataFrame) -> np.ndarray:
    """Seconds to the first token. A failed request is +inf; a censored one has its TTFT if it came, else +inf
    (it waited to the end of the rung), unless the client itself was cut."""
    ours = requests["error_class"].isin(CLIENT_CUTS) & requests["ttft_s"].isna()
    kept = requests[~ours]
    return np.where(kept["outcome"] == "failed", math.inf, kept["ttft_s"].astype(float).fillna(math.inf))


def itl_values(requests: pd.DataFrame, chunks: pd.DataFrame) -> np.ndarray:
    """Seconds between tokens: each gap between chunks divided over the tokens that the later chunk carries, one
    sample a token. The tokens that a failed request still owed are +inf."""
    own = chunks[chunks["request"].isin(requests["request"])]
    gaps = gap_table(own)
    repeats = np.maximum(1, np.rint(gaps["tokens"].to_numpy())).astype(int)
    values = np.repeat(gaps["gap_s"].to_numpy() / np.maximum(gaps["tokens"].to_numpy(), 1.0), repeats)
    failed = requests[requests["outcome"] == "failed"]
    got = own[own["request"].isin(failed["request"])]["tokens"].sum()
    owed = int(max(len(failed), failed["intended_output_tokens"].fillna(1).sum() - got)) if len(failed) else 0
    return np.concatenate([values, np.full(owed, math.inf)])


def gap_table(chunks: pd.DataFrame) -> pd.DataFrame:
    """One row a gap between two chunks of a request: request, time_s (of the later), gap_s, tokens (of the later)."""
    request, time_s, tokens = (chunks[name].to_numpy() for name in ("request", "time_s", "tokens"))
    step = np.diff(request)
    if ((step < 0) | (step == 0) & (np.diff(time_s) < 0)).any():  # a rung's books are in order: no second sort
        order = np.lexsort((time_s, request))
        request, time_s, tokens = request[order], time_s[order], tokens[order]
    same = np.flatnonzero(request[1:] == request[:-1])
    return pd.DataFrame({"request": request[same + 1], "time_s": time_s[same + 1],
                         "gap_s": time_s[same + 1] - time_s[same], "tokens": tokens[same + 1]}, copy=False)


def merged_ratio(chunks: pd.DataFrame) -> float:
    """Share of the gaps between a request's chunks that are nothing: both came with one read, so under one stamp.
    Either the server sent them together, or the client read late."""
    request, time_s = chunks["request"].to_numpy(), chunks["time_s"].to_numpy()
    same = request[1:] == request[:-1]
    return float((np.diff(time_s)[same] == 0.0).mean()) if same.any() else 0.0


def tpot_values(requests: pd.DataFrame) -> np.ndarray:
    """(end - first token) / (tokens - 1) of completed requests with two tokens or more; failed ones +inf."""
    done = requests[(requests["outcome"] == "completed") & (requests["output_tokens"].fillna(0) > 1)]
    values = (done["end_s"] - done["first_token_s"]) / (done["output_tokens"] - 1)
    return np.concatenate([values.to_numpy(dtype=float), np.full((requests["outcome"] == "failed").sum(), math.inf)])


def e2e_values(requests: pd.DataFrame) -> np.ndarray:
    """Seconds from sending to the last token; failed and censored ones +inf (but not cuts by the client itself)."""
    kept = requests[~requests["error_class"].isin(CLIENT_CUTS)]
    return np.where(kept["outcome"] == "completed", kept["end_s"] - kept["send_s"], math.inf)


def think_times(requests: pd.DataFrame) -> pd.Series:
    """Seconds between the end of a user's previous request and the intended sending of this one; NaN for the first."""
    ordered = requests.sort_values(["user", "send_s"], kind="stable")
    return (ordered["intended_send_s"] - ordered.groupby("user")["end_s"].shift()).reindex(requests.index)


def late_users(requests: pd.DataFrame, start_s: float, end_s: float) -> float:
    """Mean number of users in the window whose next request was due and not yet sent: the client's own lateness."""
    if requests.empty or end_s <= start_s:
        return 0.0
    late = requests["send_s"].clip(upper=end_s) - requests["intended_send_s"].clip(lower=start_s)
    return float(late.clip(lower=0.0).sum() / (end_s - start_s))


def little(requests: pd.DataFrame, live: float, start_s: float, end_s: float,
           first_think_s: float = math.nan) -> dict[str, float]:
    """Little's law in the window, N = X (R + Z + L): throughput, mean response, think and lateness of the client (from
    the intended to the actual sending), and the error ratio X (R + Z + L) / N - 1. Requests count by their end, with
    the think time and the lateness that went before them. `first_think_s`: what went before a user's first request;
    unknown in a closed loop, nothing where users come as they send."""
    ended = requests[(requests["end_s"] >= start_s) & (requests["end_s"] < end_s)
                     & (requests["outcome"] != "censored")]
    rate = len(ended) / (end_s - start_s) if end_s > start_s else math.nan
    response, late = math.nan, math.nan
    if len(ended):
        response = float((ended["end_s"] - ended["send_s"]).mean())
        late = float((ended["send_s"] - ended["intended_send_s"]).mean())
    thought = think_times(requests).reindex(ended.index).fillna(first_think_s).dropna()
    think = float(thought.mean()) if len(thought) else math.nan
    error = rate * (response + think + late) / live - 1 if live else math.nan
    return {"request_rate_per_s": rate, "response_s": response, "think_s": think, "late_s": late,
            "little_error_ratio": error}


def outages(requests: pd.DataFrame, start_s: float) -> list[str]:
    """A sentence for each stretch in which the server was gone: connections were refused, and of all requests sent
    before its end none was completed after its beginning. Times are seconds after `start_s`."""
    done = requests[requests["outcome"] == "completed"].sort_values("end_s")
    lost = requests[requests["error_class"].isin(("refused", "cut"))].sort_values("end_s")
    said = []
    for answered, stretch in lost.groupby(np.searchsorted(done["end_s"], lost["end_s"])):
        back = done.iloc[int(answered):]
        first_s, last_s = stretch["end_s"].min(), stretch["end_s"].max()
        if not (stretch["error_class"] == "refused").any() or (back["send_s"] < last_s).any():
            continue  # a connection cut, or a queue overrun: the server was there
        counts = ", ".join(f"{name} {count}" for name, count in stretch["error_class"].value_counts().items())
        until = f"until {back['send_s'].min() - start_s:.1f} s" if len(back) else \
            "and was not back at the end of the rung"
        said.append(f"the server was gone from {first_s - start_s:.1f} s {until}: {len(stretch)} requests failed "
                    f"({counts})")
    return said
