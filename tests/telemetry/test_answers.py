"""Pages and stores that answer in other ways than a plain vLLM and a plain Prometheus."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from spoc_lib.config.cluster import TelemetryEndpoints
from spoc_lib.core.clock import Anchor
from spoc_lib.servers.metricnames import EXPECTED, canonical, engine_of
from spoc_lib.telemetry import prometheus
from spoc_lib.telemetry.page import PageReader, ScrapeError
from spoc_lib.telemetry.parse import parse
from spoc_lib.telemetry.preflight import preflight
from spoc_lib.telemetry.recorder import kept
from spoc_lib.telemetry.whose import Ours

PAGE = b'vllm:num_requests_running{engine="0"} 3\n'


@pytest.fixture
def serve():
    """A function that serves `answer(path, headers) -> (status, headers, body)` and returns the address."""
    running = []

    def start(answer: Callable) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = answer(self.path, self.headers)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def read(url: str) -> str:
    reader = PageReader(url, 2.0)
    try:
        return reader.read().text
    finally:
        reader.close()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_within_the_host_is_followed_and_kept(serve, status):
    asked = []

    def answer(path, headers):
        asked.append(path)
        return (200, {}, PAGE) if path == "/metrics/" else (status, {"Location": "/metrics/"}, b"moved")

    reader = PageReader(serve(answer) + "/metrics", 2.0)
    assert reader.read().text == reader.read().text == PAGE.decode()
    assert asked == ["/metrics", "/metrics/", "/metrics/"]
    reader.close()


@pytest.mark.parametrize("where, said", [
    ("https://other.example/metrics", "the page is at https://other.example/metrics"),
    ("/metrics", "redirects to /metrics")])
def test_a_redirect_elsewhere_or_in_a_circle_is_named(serve, where, said):
    with pytest.raises(ScrapeError, match=said):
        read(serve(lambda path, headers: (307, {"Location": where}, b"")) + "/metrics")


def test_a_packed_page_is_unpacked_and_a_broken_one_said(serve):
    packed = gzip.compress(PAGE)
    assert read(serve(lambda path, headers: (200, {"Content-Encoding": "gzip"}, packed))) == PAGE.decode()
    with pytest.raises(ScrapeError, match="cannot be unpacked"):
        read(serve(lambda path, headers: (200, {"Content-Encoding": "gzip"}, PAGE)))
    with pytest.raises(ScrapeError, match="packed as 'zstd'"):
        read(serve(lambda path, headers: (200, {"Content-Encoding": "zstd"}, PAGE)))


def test_open_metrics_with_stamps_exemplars_and_odd_labels_is_read():
    page = ('# TYPE vllm:prompt_tokens counter\n'
            'vllm:prompt_tokens_total{model_name="a\\"b\\\\c\\nd{,}"} 5 1700000000.5\n'
            'vllm:prompt_tokens_created{model_name="a"} 1.7e9\n'
            'vllm:time_to_first_token_seconds_bucket{le="0.1"} 8 # {trace_id="x}"} 0.07 1.7e9\n# EOF\n')
    first, second = kept(parse(page))
    assert json.loads(first.labels)["model_name"] == 'a"b\\c\nd{,}' and (first.value, second.value) == (5, 8)


@pytest.mark.parametrize("name, today", [
    ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    ("ray_vllm_gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    ("vllm_num_preemptions", "vllm:num_preemptions_total"),
    ("vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    ("vllm:request_time_per_output_token_seconds_sum", "vllm:request_time_per_output_token_seconds_sum"),
    ("ray_vllm:num_requests_running", "vllm:num_requests_running"),
    ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    ("sglang:time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
    ("tgi_queue_size", "vllm:num_requests_waiting"), ("http_requests_total", "http_requests_total"),
])
def test_names_of_one_quantity_are_one(name, today):
    assert canonical(name) == today


def test_of_two_names_on_one_page_the_newer_counts_once():
    page = "vllm:kv_cache_usage_perc 0.5\nvllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_hits_total 3\n"
    assert [one.metric for one in kept(parse(page))] == ["vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total"]


def test_another_engines_page_is_called_by_its_name(serve):
    url = serve(lambda path, headers: (200, {}, b"sglang:num_running_reqs 3\nsglang:token_usage 0.5\n"))
    page, complete, *_ = preflight(url + "/metrics", None, None)
    assert "SGLang" in page.detail and f"{EXPECTED[1]}, " in complete.detail and EXPECTED[0] not in complete.detail
    assert engine_of({"tgi_queue_size"}) == "TGI" and engine_of({"vllm:x", "sglang:y"}) is None


def store(instant, targets, *, prefix="", every=1.0, wants=None):
    """What a store answers: one server's series, sampled every `every` seconds, its time() as `instant` says."""
    labels = {"instance": "a:8000", "job": "vllm", "model_name": "m"}

    def answer(path, headers):
        parts = urlsplit(path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if wants is not None and headers.get("Authorization") != wants:
            return 401, {}, b"who are you?"
        if parts.path == f"{prefix}/api/v1/query":
            data = instant(time.time())
        elif parts.path == f"{prefix}/api/v1/targets":
            data = targets
        elif parts.path == f"{prefix}/api/v1/query_range":
            times, stamps = range(int(asked["start"]), int(asked["end"]) + 1), asked["query"].startswith("timestamp(")
            name = {} if stamps else {"__name__": "vllm:num_requests_running"}
            found = [] if "DCGM" in asked["query"] else [{"metric": {**labels, **name}, "values": [
                [at, str(at // every * every) if stamps else "3"] for at in times]}]
            data = {"resultType": "matrix", "result": found}
        else:
            return 404, {}, b"404 page not found"
        return 200, {}, json.dumps({"status": "success", "data": data}).encode()

    return answer


def scalar(now):
    return {"resultType": "scalar", "result": [now, str(now)]}


def vector(now):
    return {"resultType": "vector", "result": [{"metric": {}, "value": [now, str(now)]}]}


def fetched(url: str, **more) -> prometheus.Fetched:
    now = time.time()
    return prometheus.fetch_run(url, now - 65, now - 5, anchor=Anchor.now(), **more)


@pytest.mark.parametrize("instant, targets, prefix", [
    (vector, {"activeTargets": []}, ""), (scalar, None, ""), (scalar, {"activeTargets": None}, "/select/0/prometheus")])
def test_other_stores_answer_as_well(serve, instant, targets, prefix):
    url = serve(store(instant, targets, prefix=prefix)) + prefix
    assert set(fetched(url).metrics["value"]) == {3.0}
    assert {one.what for one in preflight(None, None, url) if one.present} == {"Prometheus", "clock of Prometheus"}


def test_the_interval_of_the_scrapes_is_told_from_the_samples(serve):
    assert fetched(serve(store(scalar, None, every=15.0))).interval_s == {"vllm": 15.0}


@pytest.mark.parametrize("secret, header", [("abc", "Bearer abc"), (
    "me:word", "Basic " + base64.b64encode(b"me:word").decode())])
def test_a_credential_comes_from_the_environment(serve, monkeypatch, secret, header):
    url = serve(store(scalar, None, wants=header))
    with pytest.raises(prometheus.PrometheusUnavailable, match="telemetry.auth_env"):
        fetched(url)
    monkeypatch.setenv("PROM_TOKEN", secret)
    headers = TelemetryEndpoints(auth_env="PROM_TOKEN").credential()
    assert len(fetched(url, headers=headers, ours=Ours(models=["m"])).metrics)


def test_a_proxy_is_not_asked_for_this_machine_and_is_named_for_others(serve, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert len(fetched(serve(store(scalar, None))).metrics)
    with pytest.raises(prometheus.PrometheusUnavailable, match="proxy 127.0.0.1 .NO_PROXY"):
        fetched("http://prometheus.example.org:9090")


def test_a_label_or_pattern_that_is_none_is_refused():
    for bad in ({"a-b": "x"}, {"job": "("}):
        with pytest.raises(ValueError, match="label|regular expression"):
            TelemetryEndpoints(match=bad)
