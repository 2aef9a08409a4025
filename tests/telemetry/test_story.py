"""The run on one clock, with known moments."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from spoc_lib.core.schemas import METRICS, REQUESTS
from spoc_lib.core.tables import as_table
from spoc_lib.telemetry.story import build


def requests_of(send_s, first_token_s, end_s) -> pd.DataFrame:
    """REQUESTS that were sent, answered and ended at these times; what the story does not ask is empty."""
    table = pd.DataFrame(dict(request=range(len(send_s)), persona="P0", user=0, send_s=send_s, intended_send_s=send_s,
                              first_token_s=first_token_s, end_s=end_s, outcome="completed"))
    return as_table(table.reindex(columns=REQUESTS.names), REQUESTS).to_pandas()


def test_phases_percentiles_gauges_and_throttling_stand_on_one_clock():
    send = 100.0 + np.arange(60.0)
    requests = requests_of(send, send + np.where(send < 130, 0.5, 2.0), send + 3)
    requests.loc[59, "first_token_s"] = np.nan
    rows = []
    for at in np.arange(95.0, 170.0):
        for gpu in range(8):
            labels = json.dumps({"UUID": f"GPU-{gpu}"})
            hot = gpu == 3 and 140 <= at < 150
            for metric, value in (("DCGM_FI_PROF_SM_ACTIVE", 0.5), ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
                                                                    0x44 if hot else 0x4)):
                rows.append(dict(source="dcgm", metric=metric, labels=labels, time_s=at, value=float(value)))
        rows.append(dict(source="vllm", metric="vllm:num_requests_running", labels="{}", time_s=at, value=7.0))
    story = build(requests, as_table(rows, METRICS).to_pandas(), (110.0, 160.0), 0.02)
    assert story.phases.to_numpy().tolist() == [["cold start and warm-up", 0, 10], ["measured", 10, 60],
                                                ["drain", 60, 62]]
    ttft = story.series[(story.series["panel"] == "TTFT (s)") & (story.series["series"] == "p50")]
    assert ttft.loc[ttft["time_s"] < 30, "value"].tolist() == pytest.approx([0.5] * 6)
    assert np.isfinite(story.series["value"]).all()
    assert story.series.loc[story.series["panel"] == "SM active (%)", "series"].nunique() == 8
    assert story.events.to_numpy().tolist() == [["GPU-3", 40.0, 49.0, "hardware thermal slowdown"]]
    assert story.alignment_error_s == 0.02


def test_a_rung_without_telemetry_still_has_its_client():
    requests = requests_of([1.0, 2.0], [1.5, 2.5], [3.0, 4.0])
    story = build(requests, METRICS.empty_table().to_pandas(), (1.0, 4.0))
    assert set(story.series["panel"]) == {"TTFT (s)"} and story.events.empty
