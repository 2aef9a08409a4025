"""A real Prometheus server scrapes the embedded engine's two pages, side by side with the recorder."""

from __future__ import annotations

import concurrent.futures
import http.client
import http.server
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from urllib.parse import parse_qs, urlencode, urlsplit

import pandas as pd
import pytest
import yaml

from spoc_lib.config import load_cluster
from spoc_lib.core.clock import Anchor
from spoc_lib.core.errors import InputError
from spoc_lib.servers import launch
from spoc_lib.telemetry import prometheus
from spoc_lib.telemetry.deploy import prometheus_config, write_deployment
from spoc_lib.telemetry.page import PageReader
from spoc_lib.telemetry.parse import parse
from spoc_lib.telemetry.preflight import preflight
from spoc_lib.telemetry.recorder import Recorder
from spoc_lib.telemetry.series import counter_increase, histogram_increase, select
from spoc_lib.telemetry.timeline import window_summary

LOAD_S = 6.0
pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def binary() -> str:
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("no Prometheus server is installed (apt install prometheus)")
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with launch(load_cluster("sim-2xh200"), {}, tmp_path_factory.mktemp("engine")) as server:
        yield server


class Running:
    """A Prometheus server in a folder, started and stopped at will; it keeps its data and its port."""

    def __init__(self, binary: str, folder, engine) -> None:
        config = prometheus_config([engine.metrics_url], [engine.dcgm_url], 1.0)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
                        f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error"]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):  # its discovery takes up to 5 s before the first scrape
            try:
                with urllib.request.urlopen(f"{self.url}/api/v1/targets?state=active", timeout=1) as answer:
                    targets = json.load(answer)["data"]["activeTargets"]
                if len(targets) == 2 and all(target["health"] == "up" for target in targets):
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError("Prometheus did not scrape its targets")

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)
            self.process = None


@pytest.fixture(scope="module")
def served(binary, engine, tmp_path_factory):
    running = Running(binary, tmp_path_factory.mktemp("prometheus"), engine)
    running.start()
    yield running
    running.stop()


def chat(engine, tokens: int) -> None:
    parts = urlsplit(engine.base_url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    body = {"model": engine.model, "max_tokens": tokens, "ignore_eos": True,
            "messages": [{"role": "user", "content": "def f(x): return x + 1\n" * 200}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().read()
    connection.close()


def load(engine, seconds: float) -> None:
    """Four clients, one request after the other."""
    until = time.monotonic() + seconds

    def client() -> None:
        while time.monotonic() < until:
            chat(engine, 100)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(client) for _ in range(4)]:
            done.result()


@pytest.fixture(scope="module")
def both(engine, served, tmp_path_factory):
    """(recorder, what Prometheus has of the same time), with idle seconds on both sides of the load."""
    anchor = Anchor.now()
    with Recorder(engine.metrics_url, engine.dcgm_url, tmp_path_factory.mktemp("side") / "m.parquet") as recorder:
        time.sleep(2.5)
        load(engine, LOAD_S)
        time.sleep(2.5)
    time.sleep(1.2)
    fetched = prometheus.fetch_run(served.url, anchor.to_wall(recorder.started_s), anchor.to_wall(recorder.ended_s),
                                   anchor=anchor)
    return recorder, fetched


def test_the_two_ways_give_the_same_table(both):
    recorder, fetched = both
    direct, asked = recorder.metrics, fetched.metrics
    assert not fetched.problems and fetched.alignment_error_s == pytest.approx(2.0)
    keys = {(row.metric, row.labels) for row in direct.itertuples()}
    found = {(row.metric, row.labels) for row in asked.itertuples()}
    assert keys == found
    assert set(asked["source"]) == {"vllm", "dcgm", "engine"}


def test_the_two_ways_give_the_same_answers(both):
    recorder, fetched = both
    start, end = recorder.started_s + 1.0, recorder.ended_s - 0.5
    for metric in ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"):
        ours = counter_increase(recorder.metrics, metric, start, end)
        assert ours > 0 and counter_increase(fetched.metrics, metric, start, end) == pytest.approx(ours), metric
    name = "vllm:time_to_first_token_seconds"
    ours, theirs = (histogram_increase(one, name, start, end) for one in (recorder.metrics, fetched.metrics))
    assert ours.counts.tolist() == pytest.approx(theirs.counts.tolist()) and ours.mean == pytest.approx(theirs.mean)
    one, other = (window_summary(metrics, start, end) for metrics in (recorder.metrics, fetched.metrics))
    assert one["missing"] == other["missing"] and one["gpus"] == other["gpus"] == 2
    assert one["running"] == pytest.approx(other["running"], abs=1.0)
    assert one["sm_active_ratio"] == pytest.approx(other["sm_active_ratio"], abs=0.15)
    assert one["cached_ratio"] == pytest.approx(other["cached_ratio"], abs=1e-6)


def test_samples_stand_on_one_clock(both):
    """The moment at which tokens begin to flow is the same in both, within the stated alignment error."""
    recorder, fetched = both

    def begin(metrics: pd.DataFrame) -> float:
        (series,) = select(metrics, "vllm:generation_tokens_total")
        return float(series.time_s[series.value > series.value[0]][0])

    assert abs(begin(recorder.metrics) - begin(fetched.metrics)) <= fetched.alignment_error_s


def test_scraping_costs_the_server_less_than_a_hundredth_of_a_core(engine, both):
    """CPU time of the server, which is the same on a busy machine: a scrape of both pages once a second."""
    readers = [PageReader(url, 10.0) for url in (engine.metrics_url, engine.dcgm_url)]

    def cpu_s() -> float:
        return next(one.value for one in parse(readers[0].read().text) if one.metric == "process_cpu_seconds_total")

    before = cpu_s()
    for _ in range(40):
        for reader in readers:
            reader.read()
    assert (cpu_s() - before) / 40 < 0.01
    for reader in readers:
        reader.close()


def test_a_long_range_is_split_below_the_servers_limit(served):
    """A day at a step of two seconds is 43 200 points: refused in one query, answered in five."""
    now = time.time()
    spans = list(prometheus._spans(now - 86_400, now, 2.0))
    assert len(spans) == 5 and all((end - begin) / 2.0 < 11_000 for begin, end in spans)
    assert all(after[0] - before[1] == 2 for before, after in zip(spans, spans[1:], strict=False))
    found = prometheus.fetch(served.url, ["vllm:num_requests_running"], now - 86_400, now, 2.0, Anchor.now())
    assert len(found) and not found.duplicated(["time_s", "labels"]).any()


def test_a_function_keeps_its_query_as_name(served):
    now = time.time()
    found = prometheus.fetch(served.url, ["rate(vllm:generation_tokens_total[5s])"], now - 5, now, 1.0, Anchor.now())
    assert set(found["metric"]) <= {"rate(vllm:generation_tokens_total[5s])"}


def test_prometheus_down_in_mid_run_loses_only_what_it_missed(served):
    anchor = Anchor.now()
    time.sleep(1.5)
    served.stop()
    with pytest.raises(prometheus.PrometheusUnavailable, match="cannot be reached"):
        prometheus.fetch_run(served.url, time.time() - 5, time.time(), anchor=anchor)
    served.start()
    time.sleep(1.5)
    fetched = prometheus.fetch_run(served.url, anchor.wall_s, time.time(), anchor=anchor,
                                   queries=["vllm:num_requests_running", "no_such_metric"])
    assert any("nothing for no_such_metric" in text for text in fetched.problems)
    assert any("no samples from" in text for text in fetched.problems)
    assert fetched.metrics["time_s"].min() < anchor.monotonic_s + 2.0 and len(fetched.metrics) >= 3


class Ahead(http.server.BaseHTTPRequestHandler):
    """The real Prometheus behind a clock that is `SKEW_S` ahead of this host's."""

    SKEW_S, behind = 40.0, ""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        for name in ("start", "end"):
            if name in asked:
                asked[name] = str(float(asked[name]) - self.SKEW_S)
        with urllib.request.urlopen(f"{self.behind}{parts.path}?{urlencode(asked)}", timeout=5) as answer:
            body = json.load(answer)
        found = body["data"]
        for result in found.get("result", []) if isinstance(found, dict) else []:
            for point in result["values"] if isinstance(result, dict) else []:
                point[0] += self.SKEW_S
                if asked["query"].startswith("timestamp("):
                    point[1] = str(float(point[1]) + self.SKEW_S)
        if isinstance(found, dict) and found.get("resultType") == "scalar":
            found["result"] = [found["result"][0] + self.SKEW_S, str(float(found["result"][1]) + self.SKEW_S)]
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.alone
def test_a_prometheus_whose_clock_is_ahead_is_said_and_its_samples_are_shifted_back(served):
    handler = type("Handler", (Ahead,), {"behind": served.url})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url, now, anchor = f"http://127.0.0.1:{proxy.server_address[1]}", time.time(), Anchor.now()
        ahead = prometheus.fetch_run(url, now - 5, now, anchor=anchor, queries=["vllm:num_requests_running"])
        proxy.shutdown()
    plain = prometheus.fetch_run(served.url, now - 5, now, anchor=anchor, queries=["vllm:num_requests_running"])
    assert any("is +40.0 s from this host's: its samples are shifted by that" in text for text in ahead.problems)
    assert len(ahead.metrics) == len(plain.metrics) and not plain.problems
    assert ahead.metrics["time_s"].tolist() == pytest.approx(plain.metrics["time_s"].tolist(), abs=0.5)


def test_the_preflight_says_what_is_there_and_what_a_lack_costs(engine, served):
    found = {one.what: one for one in preflight(engine.metrics_url, engine.dcgm_url, served.url)}
    assert found["engine metrics page"].present and found["DCGM_FI_PROF_SM_ACTIVE"].present
    assert found["Prometheus"].present and abs(float(found["clock of Prometheus"].detail.split()[0])) < 1
    assert any(name.startswith("target vllm") and one.present for name, one in found.items())
    bare = {one.what: one for one in preflight("http://127.0.0.1:9/metrics", None, None)}
    assert not bare["engine metrics page"].present and "saturates" in bare["engine metrics page"].cost
    assert "hidden" in bare["DCGM page"].cost


def test_what_is_written_for_deployment_is_valid(binary, tmp_path):
    paths = write_deployment(tmp_path, ["10.0.0.1:8000", "10.0.0.2:8000"])
    command = [shutil.which("promtool") or "promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert {path.name for path in paths} == {"prometheus.yml", "dcgm-counters.csv", "compose.yaml", "kubernetes.yaml"}
    compose = yaml.safe_load((tmp_path / "compose.yaml").read_text())
    assert compose["services"]["dcgm-exporter"]["command"][-1] == "1000"
    kinds = [one["kind"] for one in yaml.safe_load_all((tmp_path / "kubernetes.yaml").read_text())]
    assert kinds.count("ConfigMap") == 2 and "DaemonSet" in kinds


def test_bad_addresses_are_refused_with_a_sentence(tmp_path):
    with pytest.raises(InputError, match="http://host:9090"):
        prometheus.fetch("localhost:9090", ["up"], 0, 1, 1.0, Anchor.now())
    with pytest.raises(InputError, match="at least one engine"):
        write_deployment(tmp_path, [])
    with pytest.raises(prometheus.PrometheusUnavailable, match="cannot be reached"):
        prometheus.fetch(f"http://127.0.0.1:{free_port()}", ["up"], 0, 1, 1.0, Anchor.now())
