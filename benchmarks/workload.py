"""How fast a workload is built: scripts, texts and the audit, in CPU seconds of one core and MB of memory.

    python benchmarks/workload.py [--users 300] [--turns 20] [--personas spoc]

The script is played as the HTTP driver plays it: every appended segment becomes text, every reply is added.
"""

from __future__ import annotations

import argparse
import resource
import time

from spoc_lib.core.files import to_json
from spoc_lib.workload import build_script, load_personas
from spoc_lib.workload.audit import audit
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.messages import Conversation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=300)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--personas", default="spoc")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}

    began = time.process_time()
    corpus = Corpus.from_directory()
    figures["corpus_cpu_s"] = time.process_time() - began

    script = build_script(arguments.personas, 1)
    began = time.process_time()
    built = prompts = 0
    for user in script.users(arguments.users):
        conversation = Conversation(corpus)
        for _ in range(arguments.turns):
            turn = user.next(conversation.history_tokens)
            conversation.apply(turn)
            built += sum(s.tokens + reply for s, reply in turn.history) + sum(s.tokens for s in turn.append)
            built += turn.output_tokens
            prompts += turn.prompt_tokens
            reply = corpus.stream_text(turn.append[-1].stream ^ 1, turn.output_tokens)
            conversation.add_reply(reply, turn.output_tokens)
    figures |= {"texts_cpu_s": time.process_time() - began, "text_tokens": built, "prompt_tokens": prompts}

    users = list(script.users(arguments.users))
    for user in users:
        user.next(0)
    began, count = time.process_time(), 0
    for user in users:
        history = 40_000
        for _ in range(50):
            turn = user.next(history)
            history = min(history, 40_000)
            count += 1
    figures["next_turn_us"] = (time.process_time() - began) / count * 1e6

    personas = load_personas(arguments.personas)
    began = time.process_time()
    audit(script, personas, corpus, arguments.users, arguments.turns)
    figures["audit_cpu_s"] = time.process_time() - began
    figures["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(to_json(figures))


if __name__ == "__main__":
    main()
