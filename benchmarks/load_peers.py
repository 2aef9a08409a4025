"""The load client's peers: what to install, how to ask each for the same 300 streams, how to read its report.

Each peer gets one core, the same paced server, a tokenizer of single bytes where it insists on one, and is judged by
its own report of the time to first token and by the server's own count of the streams that were open.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson


@dataclass(frozen=True)
class Task:
    """What a peer is asked for: `users` streams of `output_tokens` for about `seconds`, from the server at `url`.
    `tokenizer` is a folder with a byte tokenizer; reports and data go into `folder`; `binary` is the peer's program."""

    binary: Path
    url: str
    users: int
    output_tokens: int
    seconds: float
    answer_s: float
    folder: Path
    tokenizer: Path

    @property
    def requests(self) -> int:
        """As many as `users` closed loops finish in `seconds`; for peers that count requests rather than time."""
        return self.users * math.ceil(self.seconds / self.answer_s)


@dataclass(frozen=True)
class Peer:
    """requirement: what pip installs; None: the folder is given by hand. python: the oldest interpreter that it takes.
    command: the words to run; read: seconds of TTFT (p50, p99) from its report."""

    requirement: str | None
    program: str
    command: Callable[[Task], list[str]]
    read: Callable[[Task], tuple[float, float]]
    python: tuple[int, int] = (3, 10)
    offline: bool = True


#: Made with the peer's own library: no download, and its cost is the least possible. Tokens are the printable bytes of
#: ASCII, space and newline, so that any sequence of tokens is a text that gives the same tokens again.
BYTE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
alphabet = [*map(chr, range(33, 127)), "\u0120", "\u010a"]
tokenizer = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<eos>",
                        clean_up_tokenization_spaces=False).save_pretrained(sys.argv[1])
"""


def _guidellm(task: Task) -> list[str]:
    data = task.folder / "data.jsonl"
    data.write_text("".join(orjson.dumps({"prompt": f"{k:016x} " + "x" * 48, "output_tokens_count": task.output_tokens})
                            .decode() + "\n" for k in range(4000)))
    return ["run", "--backend", f"kind=openai_http,target={task.url},model=paced",
            "--profile", f"kind=concurrent,streams={task.users}",
            "--constraint", f"kind=max_duration,seconds={int(task.seconds)}",
            "--data", f"kind=json_file,path={data}",
            "--output", f"kind=json,path={task.folder / 'report.json'}", "--disable-progress"]


def _guidellm_report(task: Task) -> tuple[float, float]:
    metrics = orjson.loads((task.folder / "report.json").read_bytes())["benchmarks"][0]["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]["percentiles"]
    return ttft["p50"] / 1e3, ttft["p99"] / 1e3


def _aiperf(task: Task) -> list[str]:
    return ["profile", "--model", "paced", "--url", task.url, "--endpoint-type", "chat", "--streaming",
            "--concurrency", str(task.users), "--benchmark-duration", str(int(task.seconds)),
            "--benchmark-grace-period", "10", "--synthetic-input-tokens-mean", "64",
            "--output-tokens-mean", str(task.output_tokens), "--use-server-token-count",
            "--tokenizer", str(task.tokenizer), "--ui", "none", "--artifact-dir", str(task.folder)]


def _aiperf_report(task: Task) -> tuple[float, float]:
    report = next(task.folder.rglob("profile_export_aiperf.json"))
    ttft = orjson.loads(report.read_bytes())["time_to_first_token"]
    return ttft["p50"] / 1e3, ttft["p99"] / 1e3


def _inference_perf(task: Task) -> list[str]:
    config = task.folder / "config.yaml"  # JSON is YAML
    prompts = {"num_groups": 10, "num_prompts_per_group": math.ceil(task.requests / 10), "system_prompt_len": 16,
               "question_len": 48, "output_len": task.output_tokens}
    config.write_bytes(orjson.dumps({
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "shared_prefix", "shared_prefix": prompts},
        "load": {"type": "concurrent", "num_workers": 1, "worker_max_concurrency": task.users,
                 "stages": [{"num_requests": task.requests, "concurrency_level": task.users}]},
        "server": {"type": "vllm", "model_name": "paced", "base_url": task.url},
        "tokenizer": {"pretrained_model_name_or_path": str(task.tokenizer)},
        "storage": {"local_storage": {"path": str(task.folder / "reports")}}}))
    return ["--config_file", str(config)]


def _inference_perf_report(task: Task) -> tuple[float, float]:
    report = orjson.loads(next(task.folder.rglob("*summary_lifecycle_metrics.json")).read_bytes())
    ttft = report["successes"]["latency"]["time_to_first_token"]
    return ttft["median"], ttft["p99"]


def _genai_bench(task: Task) -> list[str]:
    return ["benchmark", "--api-backend", "openai", "--api-base", task.url, "--api-key", "none",
            "--api-model-name", "paced", "--model-tokenizer", str(task.tokenizer), "--task", "text-to-text",
            "--num-concurrency", str(task.users), "--traffic-scenario", f"D(64,{task.output_tokens})",
            "--max-time-per-run", str(math.ceil(task.seconds / 60)), "--max-requests-per-run", str(task.requests),
            "--experiment-base-dir", str(task.folder), "--log-dir", str(task.folder)]


def _genai_bench_report(task: Task) -> tuple[float, float]:
    report = next(path for path in task.folder.rglob("*.json") if b"aggregated_metrics" in path.read_bytes())
    ttft = orjson.loads(report.read_bytes())["aggregated_metrics"]["stats"]["ttft"]
    return ttft["p50"], ttft["p99"]


#: `vllm bench serve`, without the front that asks for the version of a package named vllm (a CPU build has another).
VLLM_BENCH = ("import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
              "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())")


def _vllm(task: Task) -> list[str]:
    return ["-c", VLLM_BENCH, "--backend", "openai-chat", "--base-url", task.url, "--endpoint", "/v1/chat/completions",
            "--model", "paced", "--tokenizer", str(task.tokenizer), "--dataset-name", "random",
            "--random-input-len", "64", "--random-output-len", str(task.output_tokens), "--ignore-eos",
            "--num-prompts", str(task.requests), "--max-concurrency", str(task.users), "--percentile-metrics", "ttft",
            "--metric-percentiles", "50,99", "--disable-tqdm", "--save-result", "--result-dir", str(task.folder),
            "--result-filename", "report.json"]


def _vllm_report(task: Task) -> tuple[float, float]:
    report = orjson.loads((task.folder / "report.json").read_bytes())
    return report["p50_ttft_ms"] / 1e3, report["p99_ttft_ms"] / 1e3


PEERS = {
    "guidellm": Peer("guidellm==0.8.1", "guidellm", _guidellm, _guidellm_report),
    # without the hub it would look for a cached tokenizer instead of the folder that it is given
    "aiperf": Peer("aiperf==0.13.0", "aiperf", _aiperf, _aiperf_report, offline=False),
    "inference-perf": Peer("inference-perf==0.7.0", "inference-perf", _inference_perf, _inference_perf_report, (3, 12)),
    "genai-bench": Peer("genai-bench==0.0.5", "genai-bench", _genai_bench, _genai_bench_report),
    "vllm-bench": Peer(None, "python", _vllm, _vllm_report),
}


class NotHere(Exception):
    """This peer cannot run on this machine, and why."""


def environment(name: str, folder: Path, vllm: Path) -> Path:
    """The bin folder of the peer's own environment, made on first use; for vLLM the one at `vllm`, where present."""
    peer = PEERS[name]
    home = folder / name if peer.requirement else vllm
    if not (home / "bin" / peer.program).exists():
        if peer.requirement is None:
            raise NotHere(f"no environment with vLLM at {home}")
        subprocess.run([_python(peer.python), "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "-q", peer.requirement], check=True)
    return home / "bin"


def _python(oldest: tuple[int, int]) -> str:
    """An interpreter that is new enough: this one, or a newer one on the path that starts."""
    if sys.version_info[:2] >= oldest:
        return sys.executable
    for minor in range(oldest[1], oldest[1] + 4):
        found = shutil.which(f"python{oldest[0]}.{minor}")
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    raise NotHere(f"it wants Python {oldest[0]}.{oldest[1]} or newer, and none is on the path")


def byte_tokenizer(binaries: Path, folder: Path) -> Path:
    """The byte tokenizer, saved by the peer's own `transformers`; a folder that stays empty where it has none."""
    home = folder / "tokenizer"
    home.mkdir()
    subprocess.run([str(binaries / "python"), "-c", BYTE_TOKENIZER, str(home)], check=False, capture_output=True)
    return home


def surroundings(name: str) -> dict[str, str]:
    """The environment variables of the peer's run."""
    return {**os.environ, **({"HF_HUB_OFFLINE": "1"} if PEERS[name].offline else {})}
