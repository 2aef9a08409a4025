"""Classes of failed starts, from log lines as vLLM 0.32 and its surroundings write them."""

from __future__ import annotations

import pickle

import pytest

from spoc_lib.servers import failures
from spoc_lib.servers.failures import LaunchFailure, diagnose, quoted, sentence

P = "(EngineCore pid=812) ERROR 11-29 10:00:00 [core.py:99] "
LOGS = [
    ("free-memory", False, P + "ValueError: Free memory on device cuda:0 (10.2/79.1 GiB) on startup is less than "
     "desired GPU memory utilization (0.92, 72.8 GiB). Decrease GPU memory utilization or reduce GPU memory used by "
     "other processes.", 1),
    ("out-of-memory-at-start", False, P + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", 1),
    ("out-of-memory-under-load", True, P + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", 1),
    ("no-kv-room", False, P + "ValueError: To serve at least one request with the model's max seq len "
     "(131072), (4.50 GiB KV cache is needed, which is larger than the available KV cache memory (2.1 GiB).", 1),
    ("no-kv-room", False, P + "ValueError: No available memory for the cache blocks. Try increasing "
     "`gpu_memory_utilization` when initializing the engine", 1),
    ("port-busy", False, "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address "
     "already in use", 1),
    ("port-busy", False, "docker: Error from daemon: driver failed programming connectivity: "
     "Bind for 127.0.0.1:8000 failed: port is already allocated.", 125),
    ("model-not-found", False, "OSError: nope/model is not a local folder and is not a valid model identifier "
     "listed on 'https://huggingface.co/models'", 1),
    ("bad-flags", False, "api_server.py: error: unrecognized arguments: --nonsense 3", 2),
    ("bad-flags", False, "api_server.py: error: argument --max-num-seqs: Value abc cannot be converted to int", 2),
    ("bad-flags", False, "pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n"
     "  Value error, max_num_batched_tokens (10) must be greater than or equal to max_num_seqs (20).", 1),
    ("bad-flags", False, "spoc: flags of x: field 'nonsense': no such field", 2),
    ("crash", False, "Traceback (most recent call last):\nRuntimeError: something else\nprocess died", 1),
    ("model-not-found", False, "    raise HFValidationError(\nhuggingface_hub.errors.HFValidationError: Repo id must "
     "be in the form 'repo_name' or 'namespace/repo_name': '/tmp/nope/model'.", 1),
    ("crash", True, "Segmentation fault (core dumped)", 139),
    ("crash", True, "", 137),
]


@pytest.mark.parametrize(("wanted", "served", "log", "status"), LOGS)
def test_class_and_quoted_line(tmp_path, wanted, served, log, status):
    path = tmp_path / "server.log"
    consequence = "\nRuntimeError: Engine core initialization failed. See root cause above.\n"
    path.write_text("INFO 11-29 09:59:00 [api_server.py:1] vLLM API server version 0.32.0\n" + log
                    + consequence * bool(log and not served))
    found = diagnose(path, status, served=served)
    assert found.failure_class == wanted
    text = sentence(found, "died", status, path)
    assert text.startswith("the engine died, ") and str(path) in text
    if log and wanted != "crash":
        assert quoted(log.splitlines()[-1])[:40] in found.line
    if "validation error" in log:
        assert "must be greater than or equal to max_num_seqs" in found.line


def test_sigkill_is_named_where_the_log_is_silent(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("")
    assert "SIGKILL" in sentence(diagnose(path, 137, served=True), "died", 137, path)


def test_missing_log_is_a_crash(tmp_path):
    assert diagnose(tmp_path / "none", 1, served=False) == failures.Diagnosis("crash", "")


def test_quoted_line_is_bare_and_short():
    assert quoted(P + "ValueError: x") == "ValueError: x"
    assert quoted("(APIServer pid=1) INFO 11-29 10:00:00 [a.py:1] y") == "y"
    assert len(quoted("z" * 5000)) == failures.QUOTED_CHARACTERS + 1


def test_failure_survives_a_process_pool():
    error = pickle.loads(pickle.dumps(LaunchFailure("crash", "sentence", "line")))
    assert (error.failure_class, error.message, error.line) == ("crash", "sentence", "line")
