"""Of Prometheus and the direct scrape, the one that tells more of a window is used, and it is said."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from spoc_lib.config import load_cluster
from spoc_lib.config.cluster import metrics_page
from spoc_lib.core.clock import Anchor
from spoc_lib.sweep.drivers import _telemetry, ours_of
from spoc_lib.telemetry.recorder import Recorder


class Both(BaseHTTPRequestHandler):
    """A server's page (3 requests run) beside a Prometheus that has 30 of it, scraped every `every` seconds."""

    protocol_version = "HTTP/1.1"
    every, model = 1.0, "m"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/metrics":
            return self.answer(b'vllm:num_requests_running{model_name="m"} 3\n')
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path.endswith("/query"):
            now = time.time()
            return self.answer(json.dumps({"data": {"resultType": "scalar", "result": [now, str(now)]}}).encode())
        stamps = asked.get("query", "").startswith("timestamp(")
        labels = {"instance": "10.0.0.1:8000", "model_name": self.model}
        times = range(int(asked.get("start", 0)), int(asked.get("end", -1)) + 1)
        found = [{"metric": labels if stamps else {**labels, "__name__": "vllm:num_requests_running"},
                  "values": [[at, str(at // self.every * self.every) if stamps else "30"] for at in times]}]
        return self.answer(json.dumps({"data": {"result": [] if "DCGM" in asked.get("query", "") else found}}).encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def used(tmp_path, *, direct: bool = True, **changed) -> tuple[set[float], str]:
    handler = type("Handler", (Both,), changed)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        cluster = load_cluster("vllm-cpu")
        cluster = cluster.model_copy(update={"telemetry": cluster.telemetry.model_copy(update={"prometheus_url": url})})
        anchor = Anchor.now()
        with Recorder(f"{url}/metrics" if direct else None, None, tmp_path / "m.parquet", 0.05) as recorder:
            time.sleep(0.2)
        recorder.started_s -= 40  # the rung has lasted longer than this test
        facts = SimpleNamespace(base_url=f"{url}/v1", model="m", flags={})
        found, said, _ = _telemetry(cluster, facts, anchor, recorder, (recorder.ended_s - 18, recorder.ended_s))
        server.shutdown()
    return set(found["value"]), " ".join(said)


def test_a_prometheus_that_scrapes_often_is_used(tmp_path):
    assert used(tmp_path)[0] == {30.0}


def test_one_that_scrapes_less_than_twice_in_the_window_proves_nothing(tmp_path):
    values, said = used(tmp_path, every=15.0)
    assert values == {3.0} and "every 15 s, more than half of the window of 18 s" in said and "direct scrape" in said
    values, said = used(tmp_path, every=15.0, direct=False)
    assert not values and "is left out" in said


def test_one_that_holds_others_only_is_not_used(tmp_path):
    values, said = used(tmp_path, model="theirs")
    assert values == {3.0} and "taken for others'" in said and "direct scrape is used" in said


def test_the_gpus_that_a_launched_process_sees_are_its_own():
    cluster = load_cluster("vllm-cpu")
    engine = cluster.engine.model_copy(update={"environment": {"CUDA_VISIBLE_DEVICES": "2,3"}})
    facts = SimpleNamespace(base_url="http://127.0.0.1:8000", model="m", flags={"tensor_parallel_size": 2,
                                                                               "data_parallel_size": 2})
    ours = ours_of(cluster.model_copy(update={"engine": engine}), facts)
    assert ours.gpus == ["2", "3"] and ours.gpu_count == 4 and not ours.all_gpus


@pytest.mark.parametrize("page, key", [
    (None, "KEY"), ("http://10.0.0.5:8000/prom", "KEY"), ("http://10.0.0.6/m", None)])
def test_the_key_goes_to_the_engines_own_host_only(page, key):
    cluster = load_cluster("vllm-cpu")
    cluster = cluster.model_copy(update={
        "engine": cluster.engine.model_copy(update={"api_key_env": "KEY"}),
        "telemetry": cluster.telemetry.model_copy(update={"metrics_url": page})})
    url, access = metrics_page(cluster, "http://10.0.0.5:8000/v1")
    assert url == (page or "http://10.0.0.5:8000/metrics") and access.api_key_env == key
