"""Our exports in the hands of those they are for: aiperf and guidellm read them and play them against one server.

    python benchmarks/peers_imports.py [--folder .venv-peers] [--json FILE]

The embedded engine counts what it was asked; the export says what it should have been asked. Requests and output tokens
must agree exactly. Prompt tokens may differ by half a percent, for a reply that comes back as text is cut into tokens
anew; with Mooncake's lengths by five, for aiperf makes text of that length and the chat template comes on top.
Environments as in `peers.py`. Nine requests each: aiperf 0.13 hands ten trace prompts or more to forked processes, and
here these die.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

from peers import python_of, run, tokenizer_folder

from spoc_lib.config import load_cluster
from spoc_lib.core.files import write_json
from spoc_lib.servers import launch
from spoc_lib.workload import build_script
from spoc_lib.workload import export as exports
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.playback import play

USERS, TURNS, STREAMS = 3, 3, 3
COUNTERS = {"requests": "request_success", "prompt_tokens": "prompt_tokens", "output_tokens": "generation_tokens"}


def counted(metrics_url: str) -> dict[str, float]:
    """Requests, prompt and output tokens of the server so far."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(metrics_url) as answer:
        page = answer.read().decode()
    return {name: sum(map(float, re.findall(rf"^vllm:{counter}_total{{[^}}]*}} (\S+)$", page, re.MULTILINE)))
            for name, counter in COUNTERS.items()}


def by_aiperf(kind: str) -> Callable[..., None]:
    def play_it(python: Path, url: str, model: str, tokenizer: Path, file: Path, folder: Path, count: int) -> None:
        number = ["--conversation-num"] if kind == "multi-turn" else ["--request-count"]
        run([str(python.parent / "aiperf"), "profile", "--model", model, "--url", url, "--endpoint-type", "chat",
             "--streaming", "--tokenizer", str(tokenizer), "--input-file", str(file), "--custom-dataset-type", kind,
             "--concurrency", str(STREAMS), *number, str(count), "--no-fixed-schedule", "--extra-inputs",
             "ignore_eos:true", "--ui", "none", "--output-artifact-dir", str(folder / kind)], folder)
    return play_it


def by_guidellm(python: Path, url: str, model: str, tokenizer: Path, file: Path, folder: Path, count: int) -> None:
    run([str(python.parent / "guidellm"), "run", "--disable-console",
         "--backend", f"kind=openai_http,target={url},model={model}",
         "--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={count}",
         "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--data", f"kind=json_file,path={file}",
         "--output", f"kind=json,path={folder / 'guidellm.json'}"], folder)


#: (peer, export, how, what is counted to the end, tolerance of prompt tokens)
CASES = [("aiperf", "aiperf", by_aiperf("multi-turn"), "conversations", 0.005),
         ("aiperf", "mooncake", by_aiperf("mooncake-trace"), "requests", 0.05),
         ("guidellm", "guidellm", by_guidellm, "requests", 0.005)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".venv-peers"))
    parser.add_argument("--cluster", default="sim-4xh100")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    script, corpus = build_script("tiny", 1, start="cold", gap_cap_s=0.5), Corpus.from_directory()
    played = [item.turn for item in play(script, USERS, TURNS)]
    asked = {"requests": len(played), "prompt_tokens": sum(turn.prompt_tokens for turn in played),
             "output_tokens": sum(turn.output_tokens for turn in played)}
    rows, wrong = [], []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        for peer, form, player, of, tolerance in CASES:
            python = python_of(folder, peer)
            tokenizer = tokenizer_folder(folder, python)
            extra = () if form == "mooncake" else (corpus,)
            records = list(exports.FORMATS[form](script, USERS, TURNS, *extra))
            file = place / f"{form}.jsonl"
            file.write_bytes(b"".join(exports.lines(iter(records))))
            with launch(load_cluster(arguments.cluster), {}, place / f"server-{form}") as server:
                before = counted(server.metrics_url)
                player(python, server.base_url, server.model, tokenizer, file, place,
                       len(records) if of == "conversations" else len(played))
                saw = {name: value - before[name] for name, value in counted(server.metrics_url).items()}
            rows.append({"peer": peer, "export": form, "asked": asked, "server_saw": saw})
            print(json.dumps(rows[-1]), flush=True)
            if saw["requests"] != asked["requests"] or saw["output_tokens"] != asked["output_tokens"] or abs(
                    saw["prompt_tokens"] / asked["prompt_tokens"] - 1) > tolerance:
                wrong.append(f"{form} by {peer}")
    if arguments.json:
        write_json(arguments.json, rows)
    if wrong:
        sys.exit(f"the server was asked for something else: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
