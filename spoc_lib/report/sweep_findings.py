"""The sentences under the figures of the concurrency sweep, each computed from the table that its figure draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from spoc_lib.config import SHARES, Slo
from spoc_lib.metrics import LITTLE_TOLERANCE
from spoc_lib.report.findings import crossed
from spoc_lib.report.sweep_figures import one_driver
from spoc_lib.report.tables import column
from spoc_lib.report.verdict import metric_name, metric_value, time_text
from spoc_lib.report.wording import amount, change, counted, listed, moved
from spoc_lib.sweep.rung import pressure
from spoc_lib.telemetry.story import BIN_S, Story


def _valid(rungs: pd.DataFrame) -> pd.DataFrame:
    return rungs[rungs["verdict"] != "invalid"]


def ladder(rungs: pd.DataFrame, slo: pd.DataFrame, slos: Sequence[Slo], capacity: Mapping[str, Any]) -> list[str]:
    """Between which rungs each limit is passed, the interval that follows, and which rungs say nothing."""
    climbed = {row["rung"] for row in capacity["rungs"] if row["on_ladder"]} & set(_valid(rungs)["rung"])
    said = crossed(slo[slo["rung"].isin(climbed)], slos)
    if capacity["verdict"] != "resolved" or capacity["max_users"] is None:
        said.append(f"So the capacity is not resolved: {capacity['reason']}.")
    else:
        low, high = capacity["interval"]
        said.append(f"So the capacity is {counted(capacity['max_users'], 'user')}, between {low} and {high} at "
                    f"{capacity['level']:.0%} (shaded).")
    invalid = rungs[rungs["verdict"] == "invalid"]
    if len(invalid):
        reasons = listed(list(dict.fromkeys(invalid["reason"].fillna("no reason recorded"))))
        said.append(f"{counted(len(invalid), 'rung')} invalid, with no say in it: {reasons}.")
    return said


def slo_matrix(slo: pd.DataFrame, personas: pd.DataFrame, rungs: pd.DataFrame) -> list[str]:
    """Which SLO is missed first, which persona first, and what stays undecided. slo, personas: SLO_VERDICTS."""
    valid = set(_valid(one_driver(rungs))["rung"])
    everybody, each = (part[part["rung"].isin(valid)] for part in (slo, personas))
    if everybody.empty:
        return ["No valid rung judges any SLO."]
    most = counted(int(everybody["users"].max()), "user")
    first = _first_missed(everybody)
    said = [f"First missed, {first}." if first else f"No SLO is missed up to {most}, the most that were run."]
    if each["persona"].nunique() > 1:
        first = _first_missed(each)
        said.append(f"Persona by persona the first misses come {first}." if first else
                    "No persona by itself misses a limit.")
    open_ones = everybody[everybody["verdict"] == "undecided"]
    if len(open_ones):
        at = listed([str(users) for users in sorted(open_ones["users"].unique())])
        said.append(f"{len(open_ones)} of {counted(len(everybody), 'verdict')} undecided (a rung of {at} users), for "
                    "the interval reaches over the limit: longer rungs would tell.")
    return said


def _first_missed(rows: pd.DataFrame) -> str:
    """`at 139 users: ITL p95 (62 ms against 50 ms)`; '' where nothing is missed."""
    missed = rows[rows["verdict"] == "missed"]
    fewest = missed[missed["users"] == missed["users"].min()].drop_duplicates(
        ["persona", "metric", "percentile"], keep="last")
    fewest = fewest.reset_index(drop=True)
    if fewest.empty:
        return ""
    worst = fewest.loc[[max(fewest.index, key=lambda row: pressure(fewest.loc[row]))]]
    named = listed(_named(fewest)) if len(fewest) <= 2 else \
        f"{counted(len(fewest), 'limit')}, furthest beyond {_named(worst)[0]}"
    return f"at {counted(int(fewest['users'].iloc[0]), 'user')}: {named}"


def _named(rows: pd.DataFrame) -> list[str]:
    """`ITL p95 of P1 (62 ms against 50 ms)`, a row each."""
    said = []
    for row in rows.to_dict("records"):
        whose = "" if row["persona"] == "all" else f" of {row['persona']}"
        if row["metric"] in SHARES:
            said.append(f"{metric_name(row['metric'])}{whose} ({row['beyond_ratio']:.1%} of the requests beyond, "
                        f"{1 - row['percentile'] / 100:.1%} allowed)")
        else:
            said.append(f"{metric_name(row['metric'])} p{row['percentile']:g}{whose} "
                        f"({metric_value(row['metric'], row['value_s'])} against "
                        f"{metric_value(row['metric'], row['limit_s'])})")
    return said


def users(rungs: pd.DataFrame, limit_rung: int | None) -> list[str]:
    """Users that one request in flight stands for: with the fewest users, at the limit, with the most; and whether
    Little's law holds."""
    rows = _valid(one_driver(rungs)).drop_duplicates("users", keep="last")
    rows = rows.dropna(subset=["in_flight_users", "thinking_users"])
    if rows.empty:
        return ["No valid rung says where its users are."]
    at_limit = rungs.loc[rungs["rung"] == limit_rung, "users"]
    shown = rows[rows["users"].isin([rows["users"].min(), rows["users"].max(), *at_limit])]
    said = []
    for row in shown.itertuples():
        live, limit = row.in_flight_users + row.thinking_users, " (the limit)" if row.users in set(at_limit) else ""
        text = f"of {row.users} users{limit} {row.in_flight_users:.1f} are in flight"
        said.append(f"{text}, one in {live / row.in_flight_users:.1f}" if row.in_flight_users else text)
    text = "; ".join(said)
    return [f"{text[0].upper()}{text[1:]}.", _little(rows)]


def _little(rows: pd.DataFrame) -> str:
    error = rows["little_error_ratio"].dropna()
    if error.empty:
        return "Little's law could not be checked."
    worst = rows.loc[error.idxmax()]
    if error.max() <= LITTLE_TOLERANCE:
        return f"Little's law holds in each rung, within {max(0.001, error.max()):.1%}."
    return f"Little's law misses by {error.max():.1%} at {counted(int(worst['users']), 'user')}: requests are missing."


def throughput(rungs: pd.DataFrame) -> list[str]:
    """How output grows beside the users, where it peaks, and what the cache does meanwhile."""
    rows = _valid(one_driver(rungs)).groupby("users", as_index=False)[
        ["output_tokens_per_s", "cached_ratio", "kv_usage_ratio"]].median()
    if len(rows) < 2:
        return ["Fewer than two valid rungs: how throughput grows with users is not seen."]
    first, last = rows.iloc[0], rows.iloc[-1]
    peak = rows.loc[rows["output_tokens_per_s"].idxmax()]
    name = "output_tokens_per_s"
    spans = f"From {first['users']:.0f} to {last['users']:.0f} users ({last['users'] / first['users']:.2g} times) " \
        f"output {change(name, first[name], last[name])}"
    if moved(last[name], peak[name]) and peak["users"] > first["users"]:
        spans += f"; the most is {amount(name, peak[name])} at {peak['users']:.0f} users"
    return [f"{spans}.", *(_cache(rows, name) for name in ("cached_ratio", "kv_usage_ratio"))]


def _cache(rows: pd.DataFrame, name: str) -> str:
    known, what = rows.dropna(subset=[name]), column(name).label
    what = what[0].upper() + what[1:]
    if known.empty:
        return f"{what}: not recorded."
    places = dict.fromkeys([known["users"].iloc[0], known.loc[known[name].idxmax(), "users"], known["users"].iloc[-1]])
    at = known.set_index("users")[name]
    return f"{what}: {listed([f'{amount(name, at[place])} at {place:.0f} users' for place in sorted(places)])}."


def story(told: Story) -> list[str]:
    """What the rung's measured part shows: waiting, KV blocks, GPUs, and whether one was slowed down."""
    measured = told.phases[told.phases["phase"] == "measured"]
    if told.series.empty or measured.empty:
        return ["No telemetry was recorded for this rung, so nothing is seen of it."]
    start, stop = measured["start_s"].iloc[0], measured["end_s"].iloc[0]
    rows = told.series[told.series["time_s"].between(start, stop)]
    clocks = "All stamps are of one clock." if not told.alignment_error_s else \
        f"Stamps of client and server agree to {time_text(told.alignment_error_s)}."
    return [f"Measured from {start:.0f} s to {stop:.0f} s of the rung. {_client(rows)}", _engine(rows),
            _gpus(rows, told), clocks]


def _values(rows: pd.DataFrame, panel: str, series: str | None = None) -> pd.Series:
    return rows.loc[(rows["panel"] == panel) & ((rows["series"] == series) | (series is None)), "value"]


def _client(rows: pd.DataFrame) -> str:
    late = _values(rows, "TTFT (s)", "p95")
    if late.empty:
        return "No request that was sent in it had an answer to time."
    middle, worst = (amount("ttft_p95_s", value) for value in (late.median(), late.max()))
    return f"The client's TTFT p95, {BIN_S:g} s at a time, is {middle} in the middle and {worst} at worst."


def _engine(rows: pd.DataFrame) -> str:
    running, waiting = (_values(rows, "requests", name) for name in ("running", "waiting"))
    blocks = _values(rows, "KV in use (%)")
    if running.empty and waiting.empty and blocks.empty:
        return "The engine's gauges were not recorded."
    lacks = "not recorded"
    return (f"Requests running: {f'{running.mean():.1f}' if len(running) else lacks}; waiting: "
            f"{f'{waiting.mean():.1f}, at most {waiting.max():.0f}' if len(waiting) else lacks}; KV blocks in use: "
            f"{f'at most {blocks.max():.3g}%' if len(blocks) else lacks}.")


def _gpus(rows: pd.DataFrame, told: Story) -> str:
    active = rows[rows["panel"] == "SM active (%)"]
    busy = f"The SMs of {counted(active['series'].nunique(), 'GPU')} are active {active['value'].mean():.0f}% of the " \
        "time" if len(active) else "No GPU's SM activity was recorded"
    if len(told.events):
        slowed = listed([f"{row.gpu} from {row.start_s:.0f} s to {row.end_s:.0f} s ({row.what})"
                         for row in told.events.itertuples()])
        return f"{busy}; slowed down: {slowed}."
    return f"{busy}; " + ("no clock event slowed a GPU." if told.clock_events_known else
                          "whether a GPU was slowed down was not recorded.")
