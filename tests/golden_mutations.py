"""Prove that recordings catch a wrong rule: break one line of the scheduler or the cache, replay, expect a mismatch.

    python tests/golden_mutations.py outputs/golden [more folders of recordings]

Each mutation is applied to a copy of the package in a temporary folder; the checkout is never touched. A mutation is
caught when a handful of the recordings disagrees, and survives when all agree. Exit 1 when one survives, 2 when its
line is no longer there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The rule that a preempted request with output in flight is passed over has no mutation here: with two steps in
#: flight that output is always applied before the next admission, so nothing can observe it.
#: (what is broken, file, the line's text, what it becomes)
MUTATIONS = [
    ("eviction takes the most recently freed block", "block_pool", "popitem(last=False)", "popitem(last=True)"),
    ("a request's blocks are freed from the root", "kv_cache", "self.pool.release(held[::-1])",
     "self.pool.release(held)"),
    ("groups are freed in reverse order", "kv_cache", "for held in request.blocks:\n            self.pool.rel",
     "for held in request.blocks[::-1]:\n            self.pool.rel"),
    ("a look-up returns the newest copy", "block_pool", "return copies[0] if copies", "return copies[-1] if copies"),
    ("a hit may cover the whole prompt", "kv_cache", "length = request.num_tokens - 1", "length = request.num_tokens"),
    ("a sliding hit needs the whole window", "kv_cache", "ceil_div(window - 1, block_size) if window else 0 for",
     "ceil_div(window, block_size) + 1 if window else 0 for"),
    ("a short run at the start does not count", "kv_cache", "            del run[contiguous:]\n",
     "            del run[0:]\n"),
    ("blocks slide out one token early", "kv_cache", "max(0, computed - window + 1) //",
     "max(0, computed - window + 2) //"),
    ("blocks slide out without regard to what is in flight", "kv_cache", "max(0, computed - request.num_in_flight)",
     "max(0, computed)"),
    ("the sliding group's need is not capped", "kv_cache", "if capped and cap is not None",
     "if False and cap is not None"),
    ("free blocks of the hit are not counted as need", "kv_cache", "block.users == 0 for block in in_window",
     "False for block in in_window"),
    ("the watermark counts for nobody", "kv_cache", "self.watermark_blocks if watermark and", "0 if watermark and"),
    ("retention forgets the junction", "kv_cache", "(request.num_prompt - 1, request.junction)",
     "(request.num_prompt - 1,)"),
    ("retention counts the whole prompt", "kv_cache", "(request.num_prompt - 1, request.junction)",
     "(request.num_prompt, request.junction)"),
    ("every sliding block is kept", "kv_cache", "self.retention is None or not self.windows[group]", "True"),
    ("a hit holds one block that slid out", "kv_cache", "kept = cached[skipped:]",
     "kept = cached[max(0, skipped - 1):]"),
    ("the chunk's own need is not checked", "kv_cache",
     "if self._wanted(request, slots, computed, hit, capped=False) + reserve > pool.free:",
     "if self._wanted(request, slots, computed, hit, capped=True) + reserve > pool.free:"),
    ("the oldest running request is preempted", "scheduler", "victim = self.running.pop()",
     "victim = self.running.pop(index)"),
    ("a preempted request goes to the end of the line", "scheduler", "self.waiting.appendleft(request)",
     "self.waiting.append(request)"),
    ("a step admits after a preemption", "scheduler", "if not preempted:", "if True:"),
    ("the threshold holds for a lone request", "scheduler", "if requests > 1 else 0", "if requests > 0 else 0"),
    ("the context limit is one token further", "scheduler", "self.max_model_len - 1 - request.num_computed)",
     "self.max_model_len - request.num_computed)"),
    ("waiting requests overtake one that does not fit", "scheduler",
     "watermark=bool(self.running)):\n                break",
     "watermark=bool(self.running)):\n                skipped += [self.waiting.popleft()]\n                continue"),
    ("the last token is scheduled twice", "scheduler", "request.num_computed + 2 - request.num_placeholders",
     "request.num_computed + 1 - request.num_placeholders"),
    ("the whole prompt need not fit", "scheduler", "whole_prompt=self.reserve_full_isl", "whole_prompt=False"),
    ("output blocks of asynchronous steps are never hashed", "scheduler",
     "if self.asynchronous and status == Status.RUNNING", "if False and status == Status.RUNNING"),
    ("one request more may run", "scheduler", "len(self.running) < self.max_num_seqs",
     "len(self.running) <= self.max_num_seqs"),
]


def replay(package_root: Path, recordings: list[Path]) -> tuple[int, str]:
    """Mismatches (or -1 when the replay broke) of a copy of the package."""
    environment = {**os.environ, "PYTHONPATH": str(package_root)}
    done = subprocess.run([sys.executable, "-m", "spoc_lib", "engine", "replay", *map(str, recordings), "--json", "-"],
                          capture_output=True, text=True, env=environment, cwd=package_root, timeout=600)
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        return -1, (done.stderr.strip().splitlines() or ["no output"])[-1]
    result = json.loads(done.stdout)
    first = result["first_mismatch"]
    return result["mismatches"], f"{Path(first['file']).name} step {first['step']} {first['field']}" if first else ""


def catch(package_root: Path, recordings: list[Path]) -> tuple[int, str]:
    """As `replay`, a growing handful of recordings at a time until one of them disagrees."""
    start, count = 0, 20
    while start < len(recordings):
        mismatches, why = replay(package_root, recordings[start:start + count])
        if mismatches:
            return mismatches, why
        start, count = start + count, 4 * count
    return 0, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recordings", nargs="+", type=lambda name: Path(name).resolve())
    arguments = parser.parse_args()
    # by name, so that folders of synchronous and asynchronous recordings take turns
    recordings = sorted((file for path in arguments.recordings
                         for file in (path.rglob("*.json") if path.is_dir() else [path])),
                        key=lambda file: (file.name, file.parent))
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "spoc_lib", copy / "spoc_lib", ignore=shutil.ignore_patterns("__pycache__"))
        mismatches, why = replay(copy, recordings)
        if mismatches:
            sys.exit(f"without a mutation there are {mismatches} mismatches already: {why}")
        for title, module, before, after in MUTATIONS:
            path = copy / "spoc_lib" / "engine" / "scheduling" / f"{module}.py"
            original = path.read_text(encoding="utf-8")
            if original.count(before) != 1:
                print(f"the line of '{title}' stands {original.count(before)} times in {module}.py", file=sys.stderr)
                sys.exit(2)
            path.write_text(original.replace(before, after), encoding="utf-8")
            mismatches, why = catch(copy, recordings)
            path.write_text(original, encoding="utf-8")
            caught = mismatches != 0
            print(f"{'caught  ' if caught else 'SURVIVED'}  {title}: {mismatches if mismatches >= 0 else 'broke'}"
                  f" {why}", flush=True)
            if not caught:
                survivors.append(title)
    print(f"{len(MUTATIONS) - len(survivors)} of {len(MUTATIONS)} mutations caught")
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
