"""Replay of schedules recorded from the real engine: every field of every step must agree.

A recording holds `config`, `requests` (token ids in and out, `arrived_step`, `finished_step`) and `steps`, one entry
a step (null where there was nothing to do). Requests arrive before the step of their `arrived_step` is scheduled, and
one with an `aborted_step` (optional) is dropped before that step is scheduled, after its arrivals.
Synchronous: a step's output is applied before the next is scheduled. Asynchronous: the output of step k is applied
after step k + 1 is scheduled. A request's `finished_step` counts the steps done when its last output was applied
(its index + 1), in both modes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json
from spoc_lib.engine.scheduling.content import TokenContent
from spoc_lib.engine.scheduling.kv_cache import KVCache
from spoc_lib.engine.scheduling.request import Request
from spoc_lib.engine.scheduling.scheduler import Scheduler, SchedulerOutput

Count = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RecordedConfig(_Record):
    """Engine configuration of a recording; `groups` holds each KV group's window (0 = full attention)."""

    max_num_batched_tokens: Count
    max_num_seqs: Count
    block_size: Count
    num_blocks: Count
    max_model_len: Count
    enable_prefix_caching: bool
    long_prefill_token_threshold: NonNegative = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_chunked_prefill: bool = True
    async_scheduling: bool = False
    max_concurrent_batches: Count | None = None
    watermark: Annotated[float, Field(ge=0)] = 0.0
    groups: Annotated[list[NonNegative], Field(min_length=1)]
    prefix_cache_retention_interval: NonNegative | None = 0
    scheduler_reserve_full_isl: bool = True

    @property
    def concurrent_batches(self) -> int:
        """Steps that may be under way at once."""
        return self.max_concurrent_batches or (2 if self.async_scheduling else 1)


class RecordedRequest(_Record):
    """A request of a recording, with its tokens and the steps at which it came and went."""

    id: str
    arrived_step: NonNegative
    prompt_token_ids: Annotated[list[int], Field(min_length=1)]
    output_token_ids: list[int]
    max_tokens: Count
    finished_step: NonNegative | None = None
    aborted_step: NonNegative | None = None


class RecordedStep(_Record):
    """What the real scheduler did in one step: tokens by request, and the state after it."""

    scheduled: dict[str, int]
    new: dict[str, int]
    preempted: list[str]
    running: NonNegative
    waiting: NonNegative
    kv_usage: float


class Recording(_Record):
    """A schedule of the real engine; a step without work is null."""

    config: RecordedConfig
    requests: list[RecordedRequest]
    steps: list[RecordedStep | None]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place where a replay left its recording. `field` is one of a step's, or `finished_step`."""

    file: str
    step: int
    field: str
    recorded: Any
    replayed: Any
    request: str | None = None


@dataclass(frozen=True, slots=True)
class FileResult:
    """How a recording and its replay agree."""

    file: str
    steps: int
    mismatches: int
    first: Mismatch | None


def load_recording(path: Path) -> Recording:
    """A recording from its JSON file; InputError when it cannot be read or a field is wrong."""
    recording = yamlfile.parse(Recording, read_json(path, "recording"), str(path))
    names = [request.id for request in recording.requests]
    if len(set(names)) != len(names):
        raise InputError("bad-field", f"{path}: field 'requests': two requests carry the same id")
    return recording


def find_recordings(paths: list[str]) -> list[Path]:
    """Files as given; of a directory all *.json below it, sorted. InputError when there are none."""
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        found = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        if not found:
            raise InputError("no-recordings", f"{path} holds no recording (*.json)")
        files.extend(found)
    return files


def build_scheduler(config: RecordedConfig) -> Scheduler:
    """The plain core as a recording's configuration describes it."""
    cache = KVCache(
        num_blocks=config.num_blocks, block_size=config.block_size, windows=config.groups,
        caching=config.enable_prefix_caching, max_model_len=config.max_model_len,
        in_flight_tokens=config.max_num_batched_tokens * config.concurrent_batches,
        watermark=config.watermark, retention=config.prefix_cache_retention_interval)
    return Scheduler(
        cache, max_num_batched_tokens=config.max_num_batched_tokens, max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len, long_prefill_token_threshold=config.long_prefill_token_threshold,
        adaptive_threshold=config.long_prefill_token_threshold_adaptive,
        chunked_prefill=config.enable_chunked_prefill,
        reserve_full_isl=config.scheduler_reserve_full_isl, asynchronous=config.async_scheduling)


class _Comparison:
    """Counts disagreements and keeps the first."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.count = 0
        self.first: Mismatch | None = None

    def equal(self, step: int, field: str, recorded: Any, replayed: Any, request: str | None = None) -> None:
        if recorded != replayed:
            self.count += 1
            self.first = self.first or Mismatch(self.file, step, field, recorded, replayed, request)


def replay(recording: Recording, file: str = "") -> FileResult:
    """Play a recording on the plain core and compare every step and every finish."""
    scheduler = build_scheduler(recording.config)
    comparison = _Comparison(file)
    arrivals: dict[int, list[Request]] = {}
    aborts: dict[int, list[Request]] = {}
    finished = {request.id: request.finished_step for request in recording.requests}
    for entry in recording.requests:
        request = Request(entry.id, TokenContent(entry.prompt_token_ids, recording.config.block_size),
                          len(entry.prompt_token_ids), entry.max_tokens, output=_replayed(entry.output_token_ids),
                          stop_at=_stopped_at(entry, recording.config.max_model_len))
        arrivals.setdefault(entry.arrived_step, []).append(request)
        if entry.aborted_step is not None:
            aborts.setdefault(entry.aborted_step, []).append(request)
    in_flight: SchedulerOutput | None = None
    for number, recorded in enumerate(recording.steps):
        scheduler.waiting.extend(arrivals.pop(number, ()))
        for request in aborts.pop(number, ()):
            scheduler.finish([request])
        output = scheduler.schedule() if scheduler.running or scheduler.waiting else None
        _compare_step(comparison, number, recorded, output, scheduler)
        applied = in_flight if recording.config.async_scheduling else output
        in_flight = output
        for result in scheduler.update(applied) if applied else ():
            if result.finish_reason:
                comparison.equal(number, "finished_step", finished.pop(result.request_id), number + 1,
                                 result.request_id)
    for name, step in finished.items():
        comparison.equal(len(recording.steps), "finished_step", step, None, name)
    return FileResult(file, len(recording.steps), comparison.count, comparison.first)


def _stopped_at(entry: RecordedRequest, max_model_len: int) -> int | None:
    """A reply that finished before max_tokens and before the context limit was ended by the model."""
    tokens = len(entry.output_token_ids)
    ended = (entry.finished_step is not None and tokens < entry.max_tokens
             and len(entry.prompt_token_ids) + tokens < max_model_len)
    return tokens if ended else None


def _replayed(output: list[int]):
    """Recorded output tokens; past their end -1, so that a replay that runs too long shows as a mismatch."""
    return lambda index: output[index] if index < len(output) else -1


def _compare_step(comparison: _Comparison, number: int, recorded: RecordedStep | None,
                  output: SchedulerOutput | None, scheduler: Scheduler) -> None:
    if recorded is None or output is None:
        idle = output is None or not (output.scheduled or output.preempted)
        comparison.equal(number, "idle", recorded is None, output is None if recorded is not None else idle)
        return
    comparison.equal(number, "scheduled", recorded.scheduled,
                     {request.id: tokens for request, tokens in output.scheduled.items()})
    comparison.equal(number, "new", recorded.new, output.admitted)
    comparison.equal(number, "preempted", sorted(recorded.preempted), sorted(r.id for r in output.preempted))
    comparison.equal(number, "running", recorded.running, len(scheduler.running))
    comparison.equal(number, "waiting", recorded.waiting, len(scheduler.waiting))
    comparison.equal(number, "kv_usage", round(recorded.kv_usage, 6), round(scheduler.cache.usage, 6))


def replay_files(paths: list[str]) -> dict[str, Any]:
    """Replay files and folders: `files`, `steps`, `mismatches`, `first_mismatch` (None, or in full), and
    `failed_files` with their counts. InputError at the first file that is no recording."""
    results = [replay(load_recording(path), str(path)) for path in find_recordings(paths)]
    first = next((result.first for result in results if result.first), None)
    return {
        "files": len(results),
        "steps": sum(result.steps for result in results),
        "mismatches": sum(result.mismatches for result in results),
        "first_mismatch": asdict(first) if first else None,
        "failed_files": {result.file: result.mismatches for result in results if result.mismatches},
    }
