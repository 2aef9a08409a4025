"""The sentences under the workload's figures, from tables with known answers and from those that say too little."""

from __future__ import annotations

import math

import pandas as pd

from spoc_lib.report import workload_findings as findings
from spoc_lib.workload.audit import Gate


def quantity(persona: str, name: str, intended: float, realised: float, samples: int = 100, conversations: int = 0):
    return {"persona": persona, "quantity": name, "intended_p50": intended, "realised_p50": realised,
            "samples": samples, "conversations": conversations}


def gate(name: str, value: float, passed: bool = True) -> Gate:
    return Gate(name, passed, value, 0.1, "")


def test_quantities_names_the_median_furthest_off_and_counts_what_no_gate_judged():
    table = pd.DataFrame([quantity("P0", "output, tokens", 400, 420), quantity("P0", "gap after a tool, s", 0.0, 0.0),
                          quantity("P1", "growth a turn, tokens", 1000, 900, 30, 30),
                          quantity("P1", "output, tokens", 100, 300, 5)])
    gates = [gate("P0: output, tokens", 0.02), gate("P0: gap after a tool, s", 0.0), gate("mix of personas", 0.5),
             gate("P1: growth a turn, tokens", 0.05), gate("P1: output, tokens", math.nan)]
    judged, furthest, few = findings.quantities(table, gates)
    assert judged == "3 distributions judged, all as intended."
    assert furthest.endswith("P1, growth a turn, tokens: 900 against 1,000 (-10%, 30 conversations).")
    assert few == "Too few samples to judge: 1 of 4 distributions; play more turns or users."
    failed = findings.quantities(table, [gate("P0: output, tokens", 0.3, passed=False)])
    assert failed[0] == "Not as intended, 1 of 1 distribution: P0: output, tokens."
    assert findings.quantities(table, [gate("P1: output, tokens", math.nan)]) == [
        "Too few samples to judge: 1 of 1 distribution; play more turns or users."]


def test_the_mix_is_as_near_as_whole_users_come_or_says_how_far_off():
    table = pd.DataFrame({"persona": ["P0", "P1"], "intended_share": [0.7, 0.3], "users": [7, 3]})
    assert findings.mix(table) == [
        "Of 10 users 7 P0 (70% intended) and 3 P1 (30% intended): as near as whole users come."]
    assert findings.mix(table.assign(users=[5, 5]))[0].endswith("off by 2.0 users at most.")
    assert findings.mix(table[:1]) == ["All 7 users are P0."]
    assert findings.mix(table.assign(users=0)) == ["No user was drawn, so there is no mix."]


def layer(name: str, prompt: int, reused: int) -> dict:
    return {"layer": name, "prompt_tokens": prompt, "reused_tokens": reused, "first_seen_tokens": prompt - reused}


def test_layers_parts_common_ground_from_a_users_own_and_what_no_cache_spares():
    common, own, first = findings.layers(pd.DataFrame([layer("organisation", 400_000, 300_000),
                                                       layer("turn", 1_600_000, 1_200_000)]))
    assert common == "Common ground is 20% of 2 million prompt tokens; 75% of it was seen before."
    assert own == "The users' own conversation is 80% of 2 million prompt tokens; 75% of it was seen before."
    assert "500,000 tokens that come for the first time (25%)" in first and "'turn' brings 80%" in first
    alone = findings.layers(pd.DataFrame([layer("turn", 100, 100)]))
    assert alone[0].startswith("No text is common") and len(alone) == 2, "nothing came for the first time"
    assert findings.layers(pd.DataFrame([layer("turn", 0, 0)])) == ["No prompt was drawn, so nothing can be shared."]


def test_the_cache_that_serves_nine_tenths_and_half_of_it():
    curve = pd.DataFrame({"cache_tokens": [100, 200, 400, 800], "hit_ratio": [0.1, 0.3, 0.75, 0.8]})
    assert findings.cache_curve(curve, 0.8) == [
        "A cache of 400 tokens serves 75% of these prompt tokens, an infinite one 80%; half that size serves 30%."]
    assert findings.cache_curve(curve, 0.1) == [
        "A cache of 100 tokens serves 10% of these prompt tokens, an infinite one 10%."], "no smaller one was drawn"
    assert "largest cache drawn, 200 tokens, serves 30%" in findings.cache_curve(curve[:2], 0.8)[0]
    assert "serves nothing" in findings.cache_curve(curve, 0.0)[0]


def test_gap_caps_says_how_far_the_cap_alone_moves_users():
    caps = pd.DataFrame({"gap_cap_s": [30.0, 60.0, 600.0], "users_per_request": [4.0, 6.0, 12.0],
                         "in_use": [False, True, False]})
    used, moved = findings.gap_caps(caps)
    assert "60 s, the cap in use, one request in flight stands for 6.0 users" in used
    assert "from 4.0 to 12.0: the cap alone counts 3.0 times the users" in moved
    assert "hardly matters" in findings.gap_caps(caps.assign(users_per_request=4.0))[-1]
    assert findings.gap_caps(caps.assign(users_per_request=math.nan))[0].endswith("is not known.")
    assert findings.gap_caps(caps[:1])[0].startswith("With think times capped at 30 s one request")


def test_a_first_look_says_who_holds_and_who_does_not_at_the_cap_in_use():
    answers = pd.DataFrame({"low": [90, 120, None, 200], "high": [100, None, None, 220],
                            "in_use": [True, True, True, False]}).astype({"low": "Int64", "high": "Int64"})
    both, open_end = findings.first_look(answers)
    assert "90 users hold, 100 do not;" in both and "120 users hold; notebook 03" in open_end
    assert findings.first_look(None) == []
