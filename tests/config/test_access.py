"""How a server is reached: credentials are refused wherever they would be written down, and never repeated."""

from __future__ import annotations

import pytest

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.config.access import Access, server_address
from spoc_lib.config.cluster import Engine
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.pipeline.parameters import P03

SECRET = "sk-0123456789abcdef"
PROCESS = {"kind": "process", "command": ["vllm", "serve", "m"]}


def given(**changed) -> dict:
    return {**load_cluster("sim-2xh200").model_dump(mode="json"), **changed}


@pytest.mark.parametrize("changed", [
    {"flags": {"api_key": SECRET}}, {"flags": {"api-key": SECRET}}, {"flags": {"--hf-token": SECRET}},
    {"engine": {**PROCESS, "command": ["vllm", "serve", "m", "--api-key", SECRET]}},
    {"engine": {**PROCESS, "command": ["vllm", "serve", "m", f"--hf_token={SECRET}"]}},
    {"engine": {**PROCESS, "headers": {"X-Api-Key": SECRET}}},
    {"engine": {**PROCESS, "headers": {"X": f"Bearer {SECRET}"}}},
    {"engine": {**PROCESS, "extra_body": {"api_key": SECRET}}},
    {"engine": {"kind": "remote", "base_url": f"http://me:{SECRET}@h"}},
    {"telemetry": {"prometheus_url": f"http://me:{SECRET}@h"}},
])
def test_a_credential_in_a_cluster_file_is_refused_and_not_repeated(changed):
    with pytest.raises(InputError, match="credential") as refused:
        yamlfile.parse(Cluster, given(**changed), "x.yaml")
    assert SECRET not in refused.value.message and "api_key_env" in refused.value.message


def test_a_credential_among_a_notebooks_flags_is_refused_and_not_repeated():
    with pytest.raises(InputError, match="credential") as refused:
        yamlfile.parse(P03, {"flags": f"max_num_seqs=64,api_key={SECRET}"}, "03")
    assert SECRET not in refused.value.message
    assert P03(flags="max_num_batched_tokens=8192 tokenizer=x").flags


def test_the_key_goes_as_a_bearer_token_or_alone(monkeypatch):
    monkeypatch.setenv("A_KEY", SECRET)
    assert Access().request_headers() == {}
    bearer = Access(api_key_env="A_KEY", headers={"X-Team": "perf"})
    assert bearer.request_headers() == {"X-Team": "perf", "Authorization": f"Bearer {SECRET}"}
    assert Access(api_key_env="A_KEY", api_key_header="api-key").request_headers() == {"api-key": SECRET}
    assert SECRET not in bearer.model_dump_json() + repr(bearer)


@pytest.mark.parametrize(("changed", "said"), [
    ({"api_key_header": "X Y"}, "does not carry"), ({"api_key_header": "content-length"}, "the client's own"),
    ({"api_key_env": "A", "api_key_header": "X-Team", "headers": {"x-team": "perf"}}, "leave it out of 'headers'"),
])
def test_what_cannot_carry_a_key_is_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        Access(**changed)


def test_a_body_takes_the_budget_under_the_name_that_the_server_wants():
    fields = {"model": "m", "ignore_eos": True}
    assert Access().body(fields) == ({"model": "m", "ignore_eos": True}, "max_tokens")
    other = Access(extra_body={"max_tokens": None, "ignore_eos": None, "reasoning_effort": "low"})
    assert other.body(fields) == ({"model": "m", "reasoning_effort": "low"}, "max_completion_tokens")


@pytest.mark.parametrize(("given", "api", "meant"), [
    ("http://h:8000/v1/chat/completions", "chat", "http://h:8000/v1"), ("http://h/chat/completions/", "chat", "http://h"),
    ("http://h/v1/completions", "completions", "http://h/v1"), ("http://h//v1/", "chat", "http://h/v1"),
    ("http://h/proxy//", "chat", "http://h/proxy"), ("HTTPS://h/v1/models", "chat", "https://h/v1"),
    (" http://h:8000\n", "chat", "http://h:8000"), ("http://[::1]:8000", "chat", "http://[::1]:8000"),
    ("http://0.0.0.0:8000", "chat", "http://0.0.0.0:8000"), ("http://h?", "chat", "http://h")])
def test_an_address_as_pasted_is_the_address_of_the_api(given, api, meant):
    assert server_address(given, api) == meant
    assert Engine(kind="remote", base_url=given, api=api).base_url == meant


@pytest.mark.parametrize(("given", "said"), [
    ("127.0.0.1:8000", "write http://127.0.0.1:8000"), ("gpu-1/v1", "write http://gpu-1/v1"),
    ("[::1]:8000", r"write http://\[::1\]:8000"), ("http://::1:8000/v1", r"in brackets: write http://\[::1\]:8000/v1"),
    ("http://h/v1?api-version=1", "no '\\?' and no '#': write http://h/v1$"), ("ftp://h", "http:// or https://"),
    ("http://h/v1/completions", "write http://h/v1, with api: completions"), ("http:///v1", "name a host"),
    ("http://h:8000/metrics", "write http://h:8000$"), ("http://h/v1/messages", "not in its API: write http://h/v1"),
    ("http://h:port", "[Pp]ort"), ("http://h :8000", "hold no space"), ("", "http:// or https://")])
def test_an_address_that_is_none_is_told_how_to_write_it(given, said):
    with pytest.raises(ValueError, match=said):
        server_address(given)


@pytest.mark.parametrize(("refusal", "fields"), [
    ("[{'type': 'extra_forbidden', 'loc': ['body', 'ignore_eos'], 'msg': 'Extra inputs are not permitted'}]",
     ["ignore_eos"]),
    ("Unsupported value: 'temperature' does not support 0.0 with this model.", ["temperature"]),
    ("temperature must be strictly positive", ["temperature"]),
    ("Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead.", ["max_tokens"]),
    ("Unrecognized request argument supplied: include_usage", ["stream_options"]),
    ("body -> ignore_eos\n  extra fields\nbody -> stream_options\n  extra fields", ["ignore_eos", "stream_options"]),
    ("max_tokens is too large: 9000", []), ("the model does not exist", []), ("", [])])
def test_a_refused_field_has_a_remedy_that_works(refusal, fields):
    said = Access().remedy(refusal)
    nulls = ", ".join(f'"{name}": null' for name in fields)
    assert (f"--body '{{{nulls}}}'" in said) if fields else not said
    assert ("max_completion_tokens" in said) == (fields == ["max_tokens"])
    sent, budget = Access(extra_body=dict.fromkeys(fields)).body(dict.fromkeys(("ignore_eos", "temperature"), 1))
    assert not {*sent, budget} & set(fields)


def test_a_refused_field_of_ones_own_is_to_be_taken_out():
    given = Access(extra_body={"max_tokens": None, "min_tokens": 3})
    assert "take min_tokens out of --body" in given.remedy("min_tokens: extra fields not permitted")
    assert "take max_tokens: null out of" in given.remedy("loc: max_completion_tokens, Extra inputs are not permitted")
