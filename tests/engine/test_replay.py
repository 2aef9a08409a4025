"""Replay of recorded schedules: the shipped kinds match, faults are found and told, bad files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spoc_lib.core.errors import InputError
from spoc_lib.engine.scheduling.replay import find_recordings, load_recording, replay, replay_files

CONFIG = {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 4, "num_blocks": 20, "max_model_len": 64,
          "enable_prefix_caching": True, "long_prefill_token_threshold": 0, "async_scheduling": False,
          "watermark": 0.0, "groups": [0], "prefix_cache_retention_interval": 0, "scheduler_reserve_full_isl": True}


def by_hand() -> dict:
    """Two requests worked out by hand: a prompt of 10 in chunks of 8 and 2, then a copy of it that hits 8 tokens."""
    prompt = list(range(10))
    step = {"new": {}, "preempted": [], "waiting": 0}
    return {
        "config": CONFIG,
        "requests": [
            {"id": "a", "arrived_step": 0, "prompt_token_ids": prompt, "output_token_ids": [90, 91, 92],
             "max_tokens": 3, "finished_step": 4},
            {"id": "b", "arrived_step": 2, "prompt_token_ids": prompt, "output_token_ids": [95], "max_tokens": 1,
             "finished_step": 3},
        ],
        "steps": [
            step | {"scheduled": {"a": 8}, "new": {"a": 0}, "running": 1, "kv_usage": 2 / 19},
            step | {"scheduled": {"a": 2}, "running": 1, "kv_usage": 3 / 19},
            # b shares two blocks and needs one of its own
            step | {"scheduled": {"a": 1, "b": 2}, "new": {"b": 8}, "running": 2, "kv_usage": 4 / 19},
            step | {"scheduled": {"a": 1}, "running": 1, "kv_usage": 3 / 19},
            None,
        ],
    }


def write(path: Path, recording: dict) -> Path:
    path.write_text(json.dumps(recording))
    return path


def test_a_schedule_worked_out_by_hand(tmp_path):
    result = replay(load_recording(write(tmp_path / "hand.json", by_hand())))
    assert (result.steps, result.mismatches, result.first) == (5, 0, None)


@pytest.mark.parametrize("folder", ["full_attention", "sliding_window", "random_sync", "random_async"])
def test_recordings_of_the_real_engine(shared, folder):
    result = replay_files([str(shared(f"data/golden_schedules/{folder}"))])
    assert result["files"] >= 6 and result["steps"] > 500
    assert result["mismatches"] == 0, result["first_mismatch"]


@pytest.mark.parametrize("field, value", [
    ("scheduled", {"a": 7}), ("new", {"a": 4}), ("preempted", ["a"]), ("running", 2), ("waiting", 1),
    ("kv_usage", 0.5),
])
def test_every_field_of_a_step_is_compared(tmp_path, field, value):
    recording = by_hand()
    recording["steps"][0][field] = value
    first = replay(load_recording(write(tmp_path / "wrong.json", recording))).first
    assert (first.step, first.field, first.recorded) == (0, field, value)


def test_a_reply_that_the_model_ended(tmp_path):
    recording = by_hand()
    recording["requests"][0]["max_tokens"] = 30
    assert replay(load_recording(write(tmp_path / "ended.json", recording))).mismatches == 0


def test_finishes_and_idle_steps_are_compared(tmp_path):
    recording = by_hand()
    recording["requests"][1]["finished_step"] = 4
    recording["steps"][4] = recording["steps"][3]
    recording["steps"][0] = None
    result = replay(load_recording(write(tmp_path / "wrong.json", recording)))
    assert result.mismatches == 3
    assert result.first.field == "idle"


def test_a_request_that_never_finishes_is_a_mismatch(tmp_path):
    recording = by_hand()
    recording["steps"] = recording["steps"][:2]
    recording["requests"] = recording["requests"][:1]
    first = replay(load_recording(write(tmp_path / "short.json", recording))).first
    assert (first.field, first.recorded, first.replayed, first.request) == ("finished_step", 4, None, "a")


def test_cli_counts_and_shows_the_first_mismatch(tmp_path, here):
    write(tmp_path / "good.json", by_hand())
    done = here("engine", "replay", str(tmp_path), "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) | {"first_mismatch": None} == {
        "files": 1, "steps": 5, "mismatches": 0, "first_mismatch": None, "failed_files": {}}
    recording = by_hand()
    recording["steps"][2]["running"] = 3
    write(tmp_path / "wrong.json", recording)
    done = here("engine", "replay", str(tmp_path))
    assert done.returncode == 1
    assert "2 files, 10 steps, 1 mismatches" in done.stdout
    assert "wrong.json, step 2, field running" in done.stdout
    assert "recorded 3" in done.stdout and "replayed 2" in done.stdout


@pytest.mark.parametrize("content, wanted", [
    ("{", "not valid JSON"),
    ("[]", "top level"),
    (json.dumps({"config": CONFIG, "requests": [], "steps": [{"scheduled": {}}]}), "steps.0"),
    (json.dumps(by_hand() | {"config": CONFIG | {"groups": []}}), "config.groups"),
    (json.dumps(by_hand() | {"requests": by_hand()["requests"] + by_hand()["requests"][:1]}), "the same id"),
])
def test_bad_recordings_are_refused_with_one_sentence(tmp_path, content, wanted):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(InputError, match=wanted):
        replay_files([str(path)])


def test_absent_files_and_empty_folders_are_refused(tmp_path, here):
    done = here("engine", "replay", str(tmp_path / "none.json"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    with pytest.raises(InputError, match="no recording"):
        find_recordings([str(tmp_path)])
