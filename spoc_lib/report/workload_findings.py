"""The sentences under the figures of the workload, each computed from the table that its figure draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from spoc_lib.report.wording import counted, listed, millions
from spoc_lib.workload.audit import Gate
from spoc_lib.workload.model.geometry import SHARED_LAYERS

#: Share of the infinite cache's hits that a cache of some size is asked for.
MOST_HITS = 0.9


def quantities(table: pd.DataFrame, gates: Sequence[Gate]) -> list[str]:
    """How many distributions are as intended by the audit's own gates, and which median lies furthest off."""
    names = set(table["persona"] + ": " + table["quantity"])
    own = [gate for gate in gates if gate.name in names]
    judged = [gate for gate in own if not math.isnan(gate.value)]
    failed = [gate.name for gate in judged if not gate.passed]
    few = f"Too few samples to judge: {len(own) - len(judged)} of {counted(len(own), 'distribution')}; play more " \
        "turns or users."
    if not judged:
        return [few]
    said = [f"Not as intended, {len(failed)} of {counted(len(judged), 'distribution')}: {listed(failed)}." if failed
            else f"{counted(len(judged), 'distribution')} judged, all as intended."]
    known = table[(table["persona"] + ": " + table["quantity"]).isin([gate.name for gate in judged])]
    off = (known["realised_p50"] / known["intended_p50"].replace(0, np.nan) - 1).dropna()
    if len(off):
        row = known.loc[off.abs().idxmax()]
        kind = "conversation" if row["conversations"] else "sample"
        said.append(f"The median furthest from its intention is that of {row['persona']}, {row['quantity']}: "
                    f"{row['realised_p50']:,.4g} against {row['intended_p50']:,.4g} ({off[row.name]:+.0%}, "
                    f"{counted(int(row['samples']), kind)}).")
    return said + ([few] if len(judged) < len(own) else [])


def mix(table: pd.DataFrame) -> list[str]:
    """How many users each persona has, and whether whole users could come nearer to the shares."""
    users = int(table["users"].sum())
    if not users:
        return ["No user was drawn, so there is no mix."]
    if len(table) == 1:
        return [f"All {counted(users, 'user')} are {table['persona'].iloc[0]}."]
    parts = listed([f"{row.users} {row.persona} ({row.intended_share:.0%} intended)" for row in table.itertuples()])
    off = float((table["users"] - table["intended_share"] * users).abs().max())
    end = "as near as whole users come" if off <= 1 else f"off by {off:.1f} users at most"
    return [f"Of {counted(users, 'user')} {parts}: {end}."]


def layers(table: pd.DataFrame) -> list[str]:
    """How much is common ground, how much a user's own, and what no cache can spare."""
    total, first = float(table["prompt_tokens"].sum()), float(table["first_seen_tokens"].sum())
    if not total:
        return ["No prompt was drawn, so nothing can be shared."]
    common = table["layer"].isin(SHARED_LAYERS)
    said = [f"{name} is {rows['prompt_tokens'].sum() / total:.0%} of {millions(total, 'prompt tokens')}; "
            f"{rows['reused_tokens'].sum() / rows['prompt_tokens'].sum():.0%} of it was seen before."
            for name, rows in (("Common ground", table[common]), ("The users' own conversation", table[~common]))
            if rows["prompt_tokens"].sum()]
    if not common.any():
        said.insert(0, "No text is common to the users: they share nothing but their own history.")
    if first:
        most = table.loc[table["first_seen_tokens"].idxmax()]
        said.append(f"No cache spares the {millions(first)} that come for the first time ({first / total:.0%}); the "
                    f"layer '{most['layer']}' brings {most['first_seen_tokens'] / first:.0%} of them.")
    return said


def cache_curve(table: pd.DataFrame, ideal: float) -> list[str]:
    """The smallest cache that serves nearly all that an infinite one would, and what half of it serves."""
    if not ideal > 0 or table.empty:
        return ["No prompt begins like an earlier one, so a cache of any size serves nothing."]
    size, hits = table["cache_tokens"].to_numpy(float), table["hit_ratio"].to_numpy(float)
    enough = np.flatnonzero(hits >= MOST_HITS * ideal)
    if not len(enough):
        return [f"The largest cache drawn, {millions(size[-1])}, serves {hits[-1]:.0%} of the prompt tokens; an "
                f"infinite one would serve {ideal:.0%}."]
    at = enough[0]
    said = f"A cache of {millions(size[at])} serves {hits[at]:.0%} of these prompt tokens, an infinite one {ideal:.0%}"
    half = size[at] / 2
    return [said + (f"; half that size serves {np.interp(half, size, hits):.0%}." if half >= size[0] else ".")]


def gap_caps(table: pd.DataFrame) -> list[str]:
    """What one request in flight stands for under the cap in use, and how far other caps move it."""
    known = table.dropna(subset=["users_per_request"]).sort_values("gap_cap_s")
    if known.empty:
        return ["No think time was played whole, so what a cap does to users is not known."]
    said = [f"With think times capped at {row.gap_cap_s:g} s, the cap in use, one request in flight stands for "
            f"{row.users_per_request:.1f} users." for row in known[known["in_use"]].itertuples()]
    low, high = known.iloc[0], known.iloc[-1]
    if high["users_per_request"] > 1.02 * low["users_per_request"]:
        said.append(f"From a cap of {low['gap_cap_s']:g} s to one of {high['gap_cap_s']:g} s it goes from "
                    f"{low['users_per_request']:.1f} to {high['users_per_request']:.1f}: the cap alone counts "
                    f"{high['users_per_request'] / low['users_per_request']:.1f} times the users.")
    elif len(known) > 1:
        said.append(f"From {low['gap_cap_s']:g} s to {high['gap_cap_s']:g} s the cap hardly matters: nearly all think "
                    f"times are shorter.")
    return said or [f"With think times capped at {low['gap_cap_s']:g} s one request in flight stands for "
                    f"{low['users_per_request']:.1f} users."]


def first_look(answers: pd.DataFrame | None) -> list[str]:
    """The users that hold under the cap in use, from short rungs: known minutes before the sweep. answers: of
    `capacity_by_gap_cap`; None: no embedded engine, so nothing."""
    if answers is None:
        return []
    return [f"A first look on short rungs, at the server's own flags: {row.low} users hold"
            + ("" if pd.isna(row.high) else f", {row.high} do not") + "; notebook 03 measures it."
            for row in answers[answers["in_use"]].dropna(subset=["low"]).itertuples()]
