"""Cached tokens laid along the layers of a prompt, with known answers."""

from __future__ import annotations

import pandas as pd
import pytest

from spoc_lib.load.layers import boundaries
from spoc_lib.load.reuse import reuse_table, warmed
from spoc_lib.workload.script import Segment, Turn


def planned(request: int, user: int, prompt_tokens: int, new_tokens: int, **more) -> dict:
    return {"request": request, "user": user, "conversation": 0, "send_s": float(request),
            "intended_prompt_tokens": prompt_tokens, "new_tokens": new_tokens, **more}


def answered(cached: dict[int, float | None]) -> pd.DataFrame:
    return pd.DataFrame({"request": list(cached), "cached_tokens": list(cached.values()), "prompt_tokens": 1.0})


SHARED = [("organisation", 7, 100), ("repository", 8, 50)]
ROWS = [planned(0, 0, 200, 50, shared=SHARED),
        planned(1, 1, 200, 50, shared=[("organisation", 7, 100), ("repository", 9, 50)]),
        planned(2, 0, 300, 40)]


def test_boundaries_of_a_start_and_of_a_later_turn():
    def turn(starts: bool, *append: Segment, history=()) -> Turn:
        return Turn("p", 0, 0, 0, "start", starts, append, 500, 10, 0.0, history)

    ground, own = Segment(7, 100, "organisation"), Segment(11, 60, "session")
    assert boundaries(turn(True, ground, own)) == {"shared": [("organisation", 7, 100)], "new_tokens": 400}
    assert boundaries(turn(False, Segment(12, 30, "turn"))) == {"new_tokens": 30}
    middle = turn(True, Segment(12, 30, "turn"), history=((ground, 0), (own, 20)))
    assert boundaries(middle)["shared"] == [("organisation", 7, 100)]  # a start in mid-conversation


def test_intended_and_cached_stand_side_by_side():
    table = reuse_table(ROWS, answered({0: 0, 1: 96, 2: 256})).set_index("layer")
    assert list(table["prompt_tokens"]) == [300, 150, 0, 0, 110, 140]
    assert list(table["intended_tokens"]) == [200, 50, 0, 0, 110, 0]  # the first to send a text finds nothing
    assert list(table["cached_tokens"]) == [196, 50, 0, 0, 106, 0]
    assert table.loc["organisation", "cached_ratio"] == pytest.approx(196 / 300)
    assert pd.isna(table.loc["files", "cached_ratio"])


def test_a_longer_text_of_the_same_stream_is_shared_as_far_as_it_was_sent():
    rows = [planned(0, 0, 80, 20, shared=[("organisation", 7, 60)]),
            planned(1, 1, 130, 30, shared=[("organisation", 7, 100)])]
    assert reuse_table(rows, answered({1: 60})).set_index("layer").loc["organisation", "intended_tokens"] == 60


def test_only_the_given_requests_count_but_all_have_been_sent():
    table = reuse_table(ROWS, answered({2: 0})).set_index("layer")
    assert table["prompt_tokens"].sum() == 300 and table.loc["history", "intended_tokens"] == 110


@pytest.mark.parametrize(("cached", "cache", "warm"), [
    ({0: 250, 1: 10_000}, "salt", False), ({0: 15_000, 1: 15_000}, "salt", True),
    ({0: 15_000, 1: 15_000}, "warm", False)])
def test_a_cache_that_knows_more_than_the_rung_has_sent_was_warm(cached, cache, warm):
    rows = [planned(0, 0, 20_000, 5_000, shared=[("organisation", 7, 10_000), ("repository", 8, 5_000)]),
            planned(1, 1, 20_000, 5_000, shared=[("organisation", 7, 10_000), ("repository", 9, 5_000)])]
    said = warmed(reuse_table(rows, answered(cached)), len(cached), cache)
    assert [text[:18] for text in said] == ["the cache was warm"] * warm


@pytest.mark.parametrize("rows, cached", [(ROWS, {0: None}), ([{"request": 0, "send_s": 0.0}], {0: 5.0})])
def test_without_usage_or_layers_there_is_no_table(rows, cached):
    assert reuse_table(rows, answered(cached)).empty
