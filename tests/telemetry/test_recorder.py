"""The recorder against pages that fail in every way a page can fail."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.telemetry.recorder import Recorder
from spoc_lib.telemetry.series import counter_increase

PAGE = """# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {tokens}
vllm:num_requests_running{{engine="0",model_name="m"}} 3
vllm:num_requests_running_created 1
python_info{{version="3"}} 1
DCGM_FI_PROF_SM_ACTIVE{{gpu="0",UUID="GPU-a"}} 9223372036854775794
DCGM_FI_DEV_SM_CLOCK{{gpu="0",UUID="GPU-a"}} 1980
"""


class Pages:
    """A server of one page; `mode` says how it behaves: fine | hang | trickle | error | garbage | restart."""

    def __init__(self) -> None:
        self.mode, self.tokens, self.requests = "fine", 0.0, 0
        pages = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                pages.requests += 1
                if pages.mode == "hang":
                    time.sleep(3)
                body = pages.body()
                self.send_response(500 if pages.mode == "error" else 200)
                self.send_header("Content-Length", str(len(body) + 1000 * (pages.mode == "trickle")))
                self.end_headers()
                if pages.mode == "trickle":
                    for character in body[:20]:
                        self.wfile.write(bytes([character]))
                        time.sleep(0.2)
                    self.close_connection = True
                    return
                self.wfile.write(body)

            def log_message(self, *values: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def body(self) -> bytes:
        if self.mode == "garbage":
            return b"<html>not metrics</html>"
        self.tokens = 5.0 if self.mode == "restart" and self.tokens > 50 else self.tokens + 10.0
        return PAGE.format(tokens=self.tokens).encode()


@pytest.fixture
def pages():
    served = Pages()
    yield served
    served.server.shutdown()
    served.server.server_close()


def test_a_healthy_page_is_recorded_at_both_ends(pages, tmp_path):
    with Recorder(pages.url, None, tmp_path / "m.parquet", 0.1) as recorder:
        time.sleep(0.45)
    metrics = recorder.metrics
    assert set(metrics["metric"]) == {"vllm:prompt_tokens_total", "vllm:num_requests_running", "DCGM_FI_DEV_SM_CLOCK"}
    assert json.loads(metrics["labels"].iloc[0])["model_name"] == "m"
    tokens = metrics[metrics["metric"] == "vllm:prompt_tokens_total"]
    assert len(tokens) >= 4 and tokens["time_s"].is_monotonic_increasing
    assert counter_increase(metrics, "vllm:prompt_tokens_total", recorder.started_s, recorder.ended_s) == \
        10 * (len(tokens) - 1)
    assert recorder.alignment_error_s < 0.1 and recorder.overhead()["vLLM"] < 1
    assert not (tmp_path / "m.parquet.parts").exists()
    assert any("no DCGM page" in text for text in recorder.problems)
    assert any("DCGM_FI_PROF_SM_ACTIVE" in text and "not supported" in text for text in recorder.problems) or \
        "DCGM_FI_PROF_SM_ACTIVE" not in set(metrics["metric"])


def test_unsupported_counters_are_said_not_stored(pages, tmp_path):
    with Recorder(None, pages.url, tmp_path / "m.parquet", 0.1) as recorder:
        time.sleep(0.15)
    assert "DCGM_FI_PROF_SM_ACTIVE" not in set(recorder.metrics["metric"])
    assert any("DCGM_FI_PROF_SM_ACTIVE" in text and "not supported" in text for text in recorder.problems)
    assert any("THERMAL_VIOLATION is not exported: time lost to heat" in text for text in recorder.problems)


@pytest.mark.parametrize("mode, word", [("hang", "no answer within"), ("trickle", "no answer within"),
                                        ("error", "HTTP status 500"), ("garbage", "no metric sample")])
def test_a_page_that_fails_for_a_while_is_said_and_survived(pages, tmp_path, mode, word):
    with Recorder(pages.url, None, tmp_path / "m.parquet", 0.1, timeout_s=0.4) as recorder:
        time.sleep(0.25)
        pages.mode = mode
        time.sleep(0.9)
        pages.mode = "fine"
        time.sleep(0.8)
    assert any(word in text and "failed" in text for text in recorder.problems), recorder.problems
    times = recorder.metrics["time_s"].drop_duplicates().sort_values()
    assert times.iloc[0] - recorder.started_s < 0.2 and recorder.ended_s - times.iloc[-1] < 0.6


def test_a_hanging_page_holds_up_nobody_else(pages, tmp_path):
    other = Pages()
    other.mode = "hang"
    with Recorder(pages.url, other.url, tmp_path / "m.parquet", 0.1, timeout_s=0.5) as recorder:
        time.sleep(1.0)
    other.server.shutdown()
    assert (recorder.metrics["metric"] == "vllm:prompt_tokens_total").sum() >= 8


def test_nobody_there_is_one_sentence_not_a_traceback(tmp_path):
    with Recorder("http://127.0.0.1:9/metrics", None, tmp_path / "m.parquet", 0.1) as recorder:
        time.sleep(0.3)
    assert recorder.metrics.empty
    assert sum("refused" in text for text in recorder.problems) == 1, recorder.problems


def test_a_server_that_restarts_is_said_and_its_tokens_added(pages, tmp_path):
    with Recorder(pages.url, None, tmp_path / "m.parquet", 0.05) as recorder:
        time.sleep(0.5)
        pages.mode = "restart"
        time.sleep(0.2)
        pages.mode = "fine"
        time.sleep(0.2)
    assert any("restarted 1 time" in text for text in recorder.problems), recorder.problems
    rise = counter_increase(recorder.metrics, "vllm:prompt_tokens_total", recorder.started_s, recorder.ended_s)
    assert rise > pages.tokens


def test_an_address_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="not an http\\(s\\) address"):
        Recorder("localhost", None, tmp_path / "m.parquet")
