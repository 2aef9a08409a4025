"""The text format, from real pages and from pages that are not."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spoc_lib.telemetry.parse import BadPage, parse


def test_a_page_by_hand():
    page = """# HELP vllm:x some text with "quotes" and {braces}
# TYPE vllm:x counter
vllm:x{engine="0",model_name="a\\"b\\\\c\\nd"} 1.5e3
plain 7
stamped{le="+Inf"} 3 1700000000000
nan NaN
inf{a="}",b=","} +Inf
exemplar_bucket{le="1"} 8 # {trace_id="abc"} 0.67
# EOF
"""
    samples = list(parse(page))
    assert [sample.metric for sample in samples] == ["vllm:x", "plain", "stamped", "nan", "inf", "exemplar_bucket"]
    assert json.loads(samples[0].labels) == {"engine": "0", "model_name": 'a"b\\c\nd'}
    assert samples[0].value == 1500 and samples[1].labels == "{}" and samples[2].value == 3
    assert math.isnan(samples[3].value) and samples[4].value == math.inf
    assert json.loads(samples[4].labels) == {"a": "}", "b": ","} and samples[5].value == 8


@pytest.mark.parametrize("line", ["<html>", "metric{a=1} 2", 'metric{a="1} 2', "metric", "metric abc", "9metric 1"])
def test_what_is_no_page_is_refused_with_its_line(line):
    with pytest.raises(BadPage, match="line 2"):
        list(parse(f"ok 1\n{line}\n"))


def test_the_real_page_is_read_whole(shared):
    text = shared("data/vllm_metrics_0.32.txt").read_text()
    samples = list(parse(text))
    assert len(samples) == sum(1 for line in text.splitlines() if line and not line.startswith("#"))
    assert {"vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= {sample.metric for sample in samples}


NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.dictionaries(NAMES, TEXTS, max_size=4), st.floats(allow_nan=False))
def test_labels_and_values_survive_the_round_trip(labels, value):
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    body = ",".join(f'{key}="{escaped(text)}"' for key, text in labels.items())
    text = "+Inf" if value == math.inf else "-Inf" if value == -math.inf else repr(value)
    (sample,) = parse(f"m{{{body}}} {text}\n")
    assert json.loads(sample.labels) == labels and sample.value == value
