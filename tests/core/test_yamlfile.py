"""What a YAML file says is what a person reads in it, or one sentence with the line and the way out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from spoc_lib.config import load_cluster
from spoc_lib.config.access import Access
from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import Strict, dump, load
from spoc_lib.pipeline.record import keep_inputs


class Any1(Strict):
    """One value of any type."""

    a: Any


def read(folder, text: str | bytes, model=Any1):
    path = folder / "f.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(model, path)


@pytest.mark.parametrize(("text", "value"), [
    ("010", 10), ("08", 8), ("0o10", 8), ("0x10", 16), ("1_000", 1000), ("-3", -3), ("1e5", 1e5), ("1.5e-3", 0.0015),
    (".5", 0.5), (".inf", math.inf), ("1:30", "1:30"), ("1:30:00", "1:30:00"), ("2026-01-02", "2026-01-02"),
    ("yes", "yes"), ("NO", "NO"), ("on", "on"), ("off", "off"), ("true", True), ("False", False), ("null", None),
    ("~", None), ("", None), ("'010'", "010"), ("!!int '5'", 5), ("!!str 5", "5"), ("=", "="), ("0b11", "0b11"),
])
def test_a_plain_value_is_what_a_person_reads(text, value, tmp_path):
    found = read(tmp_path, f"a: {text}\n").a
    assert found == value and isinstance(found, type(value))


@pytest.mark.parametrize(("text", "sentence"), [
    ("a: 1\nb: 2\na: 3\n", "f.yaml: the key 'a' stands twice, at lines 1 and 3: keep one"),
    ("{a: 1, a: 2}\n", "the key 'a' stands twice, at line 1"),
    ("a:\n- x: 1\n  y: 2\n  'x': 3\n", "the key 'x' stands twice, at lines 2 and 4"),
    ("a: &m {x: 1, x: 2}\nb: {<<: *m}\n", "the key 'x' stands twice, at line 1"),
    ("a: {<<: {x: 1}, <<: {y: 2}}\n", "the key '<<' stands twice"),
    ("a: !!binary aGk=\n", "at line 1: the tag !!binary has no meaning here: write the plain value"),
    ("a: !mine 1\n", "the tag !mine has no meaning"), 
    ("a: 2026-02-31\n", "'2026-02-31' cannot be read as timestamp: .* quotes"),
    ("a:\n\n- 12e5678\n", "at line 3: '12e5678' cannot be read as float: if it is text, write it in quotes"),
    ("a: " + "9" * 5000, "at line 1: .* cannot be read as int"), ("a: !!bool maybe\n", "cannot be read as bool"),
    ("a: 1\n---\na: 2\n", "at line 2: expected a single document"), ("a:\n\tb: 1\n", "at line 2: .*indent with blanks"),
    (b"a: 1\nb: caf\xe9\n", "not a text file in UTF-8 .line 2.: save it as UTF-8"), ("? [a]\n: 1\n", "at line 1"),
    ("a: &a [*a]\n", "too large"), ("a: b: c\n", "at line 1"), ("b: 1\n", "field 'a': this field is required"),
])
def test_what_cannot_be_meant_is_one_sentence(text, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence) as caught:
        read(tmp_path, text)
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


@pytest.mark.parametrize("data", [
    b"\xef\xbb\xbfa: \xc3\xa9\r\n", "a: é\n".encode("utf-16"), "\ufeffa: é\n".encode("utf-16-be"), "a: é".encode()])
def test_files_of_other_editors_are_read(data, tmp_path):
    assert read(tmp_path, data).a == "é"


def test_merge_keys_still_fill_in_and_are_overridden(tmp_path):
    assert read(tmp_path, "a: {<<: &m {x: 1, y: 2}, x: 3}\n").a == {"x": 3, "y": 2}


CLUSTER = """name: no
title: on
hardware: {gpu: h100-sxm, count: 04}
engine: {kind: remote, base_url: "http://127.0.0.1:1", verify_tls: no, environment: {DEBUG: on}}
model: gpt-oss-120b
flags: {max_num_batched_tokens: 1e4, enable_prefix_caching: yes}
ladder: {users: [10, 1_000]}
slos:
  - {persona: all, metric: ttft, limit_s: 5}
"""


def test_a_cluster_is_read_as_it_is_meant(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CLUSTER)
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.title, cluster.hardware.count, cluster.engine.verify_tls) == ("no", "on", 4, False)
    assert cluster.engine.environment == {"DEBUG": "on"} and cluster.ladder.users == [10, 1000]
    assert cluster.flags == {"max_num_batched_tokens": 10_000, "enable_prefix_caching": True}
    for more, sentence in (("flags: {}\n", "the key 'flags' stands twice, at lines 6 and 10"),
                           ("Name: x\n", "c.yaml: line 10: field 'Name': no such field"),
                           ("slos:\n  - {persona: all}\n", "the key 'slos' stands twice, at lines 8 and 10")):
        path.write_text(CLUSTER + more)
        with pytest.raises(InputError, match=sentence):
            load_cluster(str(path))
    path.write_text(CLUSTER.replace("limit_s: 5", "limit_s: 1:30"))
    with pytest.raises(InputError, match="c.yaml: line 9: field 'slos.0.limit_s': .*1:30"):
        load_cluster(str(path))


def test_a_truth_without_a_type_is_asked_for(tmp_path):
    with pytest.raises(InputError, match="extra_body': holds yes, .* write true or false, or 'yes' in quotes"):
        read(tmp_path, "extra_body: {options: [{usage: yes}]}\n", Access)
    body = read(tmp_path, "extra_body: {ignore_eos: true, effort: 'off'}\n", Access).extra_body
    assert body == {"ignore_eos": True, "effort": "off"}


@pytest.mark.parametrize("value", [
    "010", "08", "1e5", "0o10", "1_000", "1:30", "no", "on", "null", "~", "", "2026-01-02", ".inf", "=", "<<", "é",
    "a: b", 10, 1e5, 1e20, 0.1, math.inf, True, None, [], {"x": ["y"]}])
def test_what_is_written_is_read_back_as_it_was(value, tmp_path):
    found = read(tmp_path, dump({"a": value})).a
    assert found == value and isinstance(found, type(value))
    assert yaml.safe_load(dump({"a": value})) == {"a": value}


def test_the_copy_that_a_run_keeps_means_what_the_file_meant(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    path = tmp_path / "c.yaml"
    path.write_bytes(CLUSTER.replace("title: on", "title: '1e5'\ncorpus: .").encode("utf-16"))
    parameters = {"cluster": str(path), "profile": "quick"}
    kept = keep_inputs(folder, load_cluster(str(path)), parameters)
    assert load_cluster(str(folder / kept["cluster"])) == load_cluster(str(path))
