"""The timeline with eight GPUs, one of them hot: still a line for the mean, and the hot one by name."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from spoc_lib.core.schemas import METRICS, REQUESTS
from spoc_lib.report.story_figure import story
from spoc_lib.telemetry.story import build

HOT = "GPU-5"


def metrics() -> pd.DataFrame:
    rows = []
    for gpu in range(8):
        for field, value, hot in (("DCGM_FI_DEV_SM_CLOCK", 1980.0, 1386.0), ("DCGM_FI_PROF_SM_ACTIVE", 0.8, 0.9),
                                  ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", 0.0, 64.0)):
            slow = f"GPU-{gpu}" == HOT
            rows += [dict(source="dcgm", metric=field, labels=json.dumps({"UUID": f"GPU-{gpu}"}), time_s=at,
                          value=hot if slow and at >= 20 else value) for at in np.arange(0.0, 40.0)]
    return pd.DataFrame(rows)[METRICS.names]


def test_eight_gpus_are_one_line_and_the_hot_one_stands_out():
    told = build(REQUESTS.empty_table().to_pandas(), metrics(), (10.0, 40.0), 0.004)
    figure = story(told)
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(legend) == ["each GPU", "mean of 8 GPUs", f"throttled: {HOT}"]
    assert "good to 4 ms" in figure.layout.title.text
    clocks = [trace for trace in figure.data if trace.name == f"throttled: {HOT}"]
    assert min(clocks[-1].y) == 1386.0 and len(figure.data) == 2 * 9


def test_a_rung_without_telemetry_says_so():
    empty = build(REQUESTS.empty_table().to_pandas(), METRICS.empty_table().to_pandas(), (0.0, 1.0))
    assert story(empty).layout.annotations[0].text == "no telemetry was recorded for this rung"
