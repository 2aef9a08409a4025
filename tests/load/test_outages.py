"""When the server was gone, by the records; when it only refused or cut somebody, it was not."""

from __future__ import annotations

import pandas as pd

from spoc_lib.load.figures import outages


def records(*rows: tuple[float, float, str | None]) -> pd.DataFrame:
    """(send_s, end_s, error class) of each request."""
    return pd.DataFrame([{"send_s": send, "end_s": end, "error_class": why, "outcome": "failed" if why else "completed"}
                         for send, end, why in rows])


def test_a_server_that_dies_and_stays_away_is_said_with_its_time():
    said = outages(records((100, 101, None), (101, 103.5, "cut"), (102, 103.5, "cut"), (104, 104, "refused")), 100.0)
    assert said == ["the server was gone from 3.5 s and was not back at the end of the rung: 3 requests failed "
                    "(cut 2, refused 1)"]


def test_a_restart_has_an_end():
    said = outages(records((0, 1, None), (2, 2, "refused"), (4, 4, "refused"), (6, 7, None), (8, 9, "cut"),
                           (9, 10, None), (11, 11, "refused")), 0.0)
    assert [text.split(": ")[0] for text in said] == [
        "the server was gone from 2.0 s until 6.0 s",
        "the server was gone from 11.0 s and was not back at the end of the rung"]


def test_a_server_that_refuses_some_or_cuts_one_is_there():
    assert outages(records((0, 9, None), (1, 1, "refused"), (2, 2, "refused")), 0.0) == []
    assert outages(records((0, 1, None), (1, 2, "cut"), (2, 3, None)), 0.0) == []
    assert outages(records((0, 1, None), (1, 61, "timeout")), 0.0) == []
