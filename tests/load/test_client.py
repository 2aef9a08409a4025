"""The client measured against a paced server, its isolation, and its command line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict

import numpy as np
import orjson
import pytest

from spoc_lib.config.access import api_url, root_url
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.load import FixedTurns, LoadPlan, read_run, run, selfcheck
from spoc_lib.load.bodies import BodyEncoder
from spoc_lib.load.clientcheck import judge, paced_server
from spoc_lib.load.gate import client_limits, stored

KEY = "sk-very-secret-0123456789"


def test_importing_the_package_patches_nothing():
    code = ("import threading, socket, sys; before = threading.Thread.start, socket.socket\n"
            "from spoc_lib.load import LoadPlan, run, selfcheck, read_run\n"
            "import spoc_lib.load.reader, spoc_lib.load.window, spoc_lib.load.figures, spoc_lib.load.summary\n"
            "assert before == (threading.Thread.start, socket.socket)\n"
            "assert not [name for name in sys.modules if name.split('.')[0] in ('locust', 'gevent')]\n")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    import os

    folder = tmp_path_factory.mktemp("check")
    os.environ["SPOC_CACHE"] = str(folder)
    try:
        yield selfcheck(20, 5.0, folder=folder / "rung"), stored()
    finally:
        del os.environ["SPOC_CACHE"]


@pytest.mark.alone
def test_stamps_are_exact(check):
    """The kernel's stamps leave the client's own lateness out: far below a millisecond even on a busy machine."""
    result, _ = check
    if result.stamps != "kernel":
        pytest.skip("this system stamps no arrivals: the client's own clock was used")
    assert 0 <= result.lag_p50_s < 0.001
    if result.server_late_p99_s > result.itl_s / 2:
        pytest.skip("this machine is too busy: the paced server writes late, and tokens are read together")
    assert result.lag_p99_s < 0.002 and result.passed, result.sentence


@pytest.mark.alone
def test_every_stream_is_held(check):
    result, _ = check
    assert result.in_flight_users > 19
    assert result.tokens_per_s == pytest.approx(20 * 200 / (0.2 + 199 * 0.02), rel=0.1)


@pytest.mark.alone
def test_the_check_is_stored_for_this_host(check):
    result, kept = check
    assert kept == result


@pytest.mark.alone
def test_a_check_that_measured_nothing_is_none(check, tmp_path, tmp_path_factory, monkeypatch):
    """On a busy machine no answer may be whole: nothing is stored, and what once was is no check."""
    monkeypatch.setenv("SPOC_CACHE", str(tmp_path))
    (tmp_path / "selfcheck.json").write_bytes(orjson.dumps({**asdict(check[0]), "lag_p99_s": float("nan")}))
    assert stored() is None
    folder = tmp_path_factory.getbasetemp() / "check0" / "rung"
    with pytest.raises(SpocError, match="no answer that began in the 5 s .* was whole: run it for longer"):
        judge(read_run(folder), 0.2, 0.02, {"writes": {}})


@pytest.mark.alone
def test_the_gate(check):
    from dataclasses import replace

    result, _ = check
    fine = {"client_cpu_ratio": 0.1, "output_tokens_per_s": 100.0, "itl_s": {"p50": 0.02}, "users": 8,
            "late_users": 0.1, "late_prepare_ratio": 0.25, "client_loop_lag_p99_s": 0.174,
            "schedule_lag_s": {"p95": 0.2}}
    assert client_limits(fine, 1, replace(result, ceiling_tokens_per_s=1000.0, lag_p99_s=0.001)) == []
    assert "ceiling" in client_limits(fine, 1, replace(result, ceiling_tokens_per_s=150.0, lag_p99_s=0.0))[0]
    assert client_limits(fine, 2, replace(result, ceiling_tokens_per_s=150.0, lag_p99_s=0.0)) == []
    assert "lag p99" in client_limits(fine, 1, replace(result, ceiling_tokens_per_s=1e6, lag_p99_s=0.003))[0]
    assert "of its core" in client_limits({**fine, "client_cpu_ratio": 0.95}, 1, None)[0]
    late = client_limits({**fine, "late_users": 0.46}, 1, None)[0]
    assert "0.46 of 8 users (5.8 %)" in late and "25 % of it for the next prompt" in late and "174 ms late" in late


def test_two_processes_share_the_users_and_merge_their_books(tmp_path):
    with paced_server(0.05, 0.02, log=False) as url:
        plan = LoadPlan(base_url=url, model="paced", users=5, duration_s=3.0, processes=2, stop_timeout_s=3,
                        fixed=FixedTurns(output_tokens=20, think_time_s=0.2))
        result = run(plan, tmp_path)
    requests, summary = result.requests, result.summary
    assert sorted(requests["user"].unique()) == [0, 1, 2, 3, 4]
    assert requests["request"].is_unique
    assert summary["planned"] == summary["completed"] + summary["failed"] + summary["censored"] == len(requests)
    assert summary["live_users"] == pytest.approx(5) and summary["valid"]
    assert (requests["user"] % 2 == requests["request"] % 2).all()


def test_personas_play_whole_conversations(tmp_path):
    with paced_server(0.05, 0.01, log=False) as url:
        result = run(LoadPlan(base_url=url, model="paced", users=6, duration_s=3.0, personas="tiny"), tmp_path)
    requests = result.requests
    assert (requests["outcome"] == "completed").all()
    assert requests.groupby("user")["turn"].count().max() > 1
    assert {"T0", "T1"} >= set(requests["persona"]) == set(result.summary["per_persona"])
    lag = requests["send_s"] - requests["intended_send_s"]
    assert lag.min() >= 0 and np.median(lag) < 0.05
    sums = result.chunks.groupby("request")["tokens"].sum()
    assert (sums == requests.set_index("request")["output_tokens"]).all()


def test_a_turn_beyond_the_context_is_not_sent(tmp_path):
    with paced_server(0.05, 0.01, log=False) as url:
        plan = LoadPlan(base_url=url, model="paced", users=2, duration_s=1.0, context_limit=100,
                        fixed=FixedTurns(prompt_tokens=90, output_tokens=20))
        summary = run(plan, tmp_path).summary
    assert summary["errors"] == {"context_overflow": summary["planned"]} and summary["planned"] > 0
    assert not summary["valid"]


def test_the_key_stays_in_the_environment(tmp_path, monkeypatch, server):
    seen = set()

    async def handler(request):
        seen.add(b"Bearer " + KEY.encode() in request.head)
        if request.number % 2:
            await request.json("401 Unauthorized", {"error": {"message": f"bad key {KEY}"}})
        else:
            await request.answer(["a", "b"], usage={"prompt_tokens": 1, "completion_tokens": 2})

    monkeypatch.setenv("MY_KEY", KEY)
    with server(handler) as url:
        plan = LoadPlan(base_url=url, model="m", users=2, duration_s=1.0, api_key_env="MY_KEY",
                        fixed=FixedTurns(output_tokens=2, think_time_s=0.1))
        result = run(plan, tmp_path)
    assert seen == {True} and "http_401" in result.summary["errors"]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert KEY.encode() not in path.read_bytes(), path
    assert KEY not in repr(result.summary)


def test_a_missing_key_is_one_sentence(tmp_path):
    plan = LoadPlan(base_url="http://127.0.0.1:1", model="m", users=1, duration_s=1, api_key_env="NO_SUCH_KEY")
    with pytest.raises(InputError, match="NO_SUCH_KEY"):
        run(plan, tmp_path)


@pytest.mark.parametrize("key", ["sk-secret-123\n", "sk-secret\r\nX-Evil: 1", "sk-secr\u00e9t-123", "sk-\u4e16-secret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(tmp_path, monkeypatch, key, server):
    monkeypatch.setenv("MY_KEY", key)

    async def never(request):
        raise AssertionError("no request was due")

    with server(never) as url, pytest.raises(InputError, match="MY_KEY holds characters") as caught:
        run(LoadPlan(base_url=url, model="m", users=1, duration_s=1, api_key_env="MY_KEY"), tmp_path)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(("change", "said"), [
    ({"base_url": "http://h/v1?key=1"}, "no '\\?'"), ({"base_url": "http://h/a b"}, "no space"),
    ({"base_url": "http://"}, "name a host"), ({"base_url": "http://h:99999"}, "Port out of range"),
    ({"headers": {"X A": "b"}}, "does not carry"), ({"headers": {"X-A": "b\nc"}}, "does not carry"),
    ({"headers": {"X-A": "\u4e16"}}, "does not carry"), ({"headers": {"content-length": "5"}}, "the client's own"),
    ({"headers": {"Ocp-Apim-Subscription-Key": "x"}}, "credential"), ({"headers": {"X-A": "Bearer x"}}, "credential"),
    ({"headers": {"X-Auth": "x"}}, "credential"), ({"extra_body": {"api_key": "x"}}, "credential"),
    ({"extra_body": {"n": 2}}, "may not hold 'n'"), ({"extra_body": {"messages": []}}, "may not hold 'messages'"),
    ({"extra_body": {"stream": False}}, "may not hold 'stream'"), ({"extra_body": {"max_tokens": 5}}, "'max_tokens'"),
])
def test_a_plan_that_cannot_be_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        LoadPlan(**{"base_url": "http://h", "model": "m", "users": 1, "duration_s": 1, **change})


def test_headers_and_fields_that_are_no_credential_are_taken():
    plan = LoadPlan(base_url="http://h:1/x", model="m", users=1, duration_s=1,
                    headers={"X-Author": "me", "X-Keyed": "1"},
                    extra_body={"min_tokens": 3, "stop_token_ids": [1], "max_tokens": None})
    assert plan.headers["X-Author"] == "me"


def test_urls():
    assert api_url("https://h/v1beta/openai/") == "https://h/v1beta/openai"
    assert root_url("https://h/v1beta/openai") == root_url("https://h") == "https://h"
    assert api_url("https://h/client/v4/x/ai/v1") == "https://h/client/v4/x/ai/v1"
    assert root_url("http://v1/p") == "http://v1/p" and api_url("http://[::1]:8000") == "http://[::1]:8000/v1"
    assert api_url("http://h:1") == api_url("http://h:1/v1/") == "http://h:1/v1"
    assert api_url("https://h/openai") == "https://h/openai/v1"
    assert root_url("http://h/v1") == "http://h" and root_url("http://h/x") == "http://h/x"


def test_bodies_are_valid_json_and_grow():
    plan = LoadPlan(base_url="http://h", model="m", users=1, duration_s=1, extra_body={"ignore_eos": None, "top_p": 1})
    encoder, messages = BodyEncoder(plan), [{"role": "user", "content": 'a"\n世'}]
    for _ in range(3):
        body = orjson.loads(encoder.encode(messages, 7))
        assert body["messages"] == messages and (body["max_tokens"], body["top_p"]) == (7, 1)
        assert "ignore_eos" not in body and body["stream_options"] == {"include_usage": True}
        messages = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert len(orjson.loads(encoder.encode([{"role": "user", "content": "new"}], 1))["messages"]) == 1
    newer = BodyEncoder(plan.model_copy(update={"extra_body": {"max_tokens": None, "temperature": None}}))
    body = orjson.loads(newer.encode(messages[:1], 9))
    assert body["max_completion_tokens"] == 9 and not {"max_tokens", "temperature"} & set(body)
    completions = BodyEncoder(plan.model_copy(update={"api": "completions"}))
    assert orjson.loads(completions.encode(messages[:1], 5))["prompt"] == 'a"\n世\n'


@pytest.mark.parametrize(("words", "sentence"), [
    (["--base-url", "127.0.0.1:8000"], "must start with http:// or https://"),
    (["--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1"),
    (["--base-url", "http://127.0.0.1:1", "--model", "m", "--start", "warm"], "'start'"),
    (["--base-url", "http://127.0.0.1:1", "--body", "[]"], "--body must be a JSON object"),
    (["--base-url", "http://127.0.0.1:1", "--model", "m", "--header", "X-Auth-Token: hunter2"], "environment variable"),
    (["--base-url", "http://me:hunter2@127.0.0.1:1", "--model", "m"], "environment variable"),
    (["--base-url", "http://127.0.0.1:1", "--model", "m", "--duration", "5", "--ramp", "5"], "duration_s"),
])
def test_bad_input_is_one_sentence(words, sentence, here):
    result = here("load", "run", *words)
    assert result.returncode == 2 and sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and "hunter2" not in result.stderr


@pytest.mark.slow
def test_unknown_model_and_unknown_personas(server, tmp_path, here):
    async def never(request):
        await request.json("404 Not Found", {"error": {"message": "no such model"}})

    with server(never) as url:
        wrong = here("load", "run", "--base-url", url, "--model", "nope")
        assert wrong.returncode == 2 and "does not serve the model 'nope': it serves m" in wrong.stderr
        assert "no such model" in wrong.stderr
        persona = here("load", "run", "--base-url", url, "--personas", "nobody", "--out", str(tmp_path))
        assert persona.returncode == 2 and "nobody" in persona.stderr and "Traceback" not in persona.stderr
        (tmp_path / "void").mkdir()
        empty = here("load", "run", "--base-url", url, "--personas", "tiny", "--corpus", tmp_path / "void", "--out",
                     tmp_path / "out")
        assert empty.returncode == 2 and "no text to send" in empty.stderr
