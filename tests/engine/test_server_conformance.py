"""The embedded server against 40 recorded request → answer pairs of a real vLLM 0.32: case by case, statuses, content
types, fields with their types, and error bodies to the letter."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import pytest
import yaml

from spoc_lib.config import load_cluster
from spoc_lib.servers import launch

RECORDING = "data/vllm_http_0.32.json"
#: The recording's server: started without developer mode or profiler, block size 128, context 4096, model "tiny".
FLAGS = {"block_size": 128, "max_model_len": 4096}


@pytest.fixture(scope="module")
def recording(shared):
    return json.loads(shared(RECORDING).read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory, shared):
    shared(RECORDING)
    folder = tmp_path_factory.mktemp("conformance")
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({
        "name": "tiny", "title": "conformance", "hardware": {"gpu": "h100-sxm", "count": 1},
        "engine": {"kind": "embedded", "served_model": "tiny"}, "model": "tiny-moe", "personas": "tiny",
        "ladder": {"users": [1]},
        "slos": [{"metric": "ttft", "limit_s": 1.0}],
    }))
    with launch(load_cluster(str(path)), FLAGS, folder) as running:
        yield running


def ask(base_url: str, request: dict) -> tuple[int, str | None, str]:
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=20)
    body, headers = request["body"], {}
    if isinstance(body, dict):
        body, headers = json.dumps(body), {"Content-Type": "application/json"}
    elif body is not None and request.get("json", True):
        headers = {"Content-Type": "application/json"}
    try:
        connection.request(request["method"], request["path"], body, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type"), answer.read().decode()
    finally:
        connection.close()


def shape(value):
    """Keys and types, in order; numbers and texts without their values."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return type(value).__name__


def events(body: str) -> list:
    assert body.endswith("data: [DONE]\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in body.split("\n\n")[:-2]]


@pytest.mark.parametrize("number", range(41))
def test_case(number, recording, server):
    case = recording[number]
    request = dict(case["request"], json=case["case"] != "no content type")
    developer = case["case"] in ("reset_prefix_cache", "start_profile", "server_info")
    status, content_type, body = ask(server.base_url, request)
    if developer:  # a launch turns them on; the recorded server had them off
        assert status == 200
        return
    assert status == case["status"], body
    assert content_type == case["content_type"]
    if case["case"] == "metrics" or not case["body"]:
        assert bool(body) == bool(case["body"])
    elif content_type.startswith("text/event-stream"):
        compare_stream(events(body), events(case["body"]))
    else:
        ours, theirs = json.loads(body), json.loads(case["body"])
        if status >= 400:
            assert ours == theirs
        elif "tokenize" in case["case"]:  # another vocabulary
            assert list(ours) == list(theirs)
        else:
            assert shape(ours) == shape(theirs)
            compare_values(ours, theirs)


def compare_stream(ours: list, theirs: list):
    """The same events in the same order, keys in the same order."""
    assert [shape(one) for one in ours] == [shape(one) for one in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert list(one) == list(other)
        assert [list(choice) for choice in one["choices"]] == [list(choice) for choice in other["choices"]]


def compare_values(ours: dict, theirs: dict):
    """What does not depend on the model: object names, roles, finish reasons, counts of what was asked for."""
    assert ours["object"] == theirs["object"] if "object" in theirs else True
    for one, other in zip(ours.get("choices", []), theirs.get("choices", []), strict=True):
        assert one["finish_reason"] == other["finish_reason"]
        assert one.get("message", {}).get("role") == other.get("message", {}).get("role")
    if "usage" in theirs:
        assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]
        cached, recorded = (one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (ours, theirs))
        assert (cached > 0) == (recorded > 0)
