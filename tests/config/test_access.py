"""How a server is reached: credentials are refused wherever they would be written down, and never repeated."""

from __future__ import annotations

import pytest

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.config.access import Access
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
