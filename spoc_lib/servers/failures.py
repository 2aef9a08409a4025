"""Why an engine did not start or died, read from its log: a class, and the line that says so."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from spoc_lib.core.errors import SpocError

MOST_LOG_BYTES = 4_000_000
QUOTED_CHARACTERS = 300

FREE_MEMORY, OUT_OF_MEMORY, NO_KV_ROOM = "free-memory", "out-of-memory", "no-kv-room"
PORT_BUSY, MODEL_NOT_FOUND, BAD_FLAGS, CRASH = "port-busy", "model-not-found", "bad-flags", "crash"
STARTUP_TIMEOUT, COMMAND_NOT_FOUND = "startup-timeout", "command-not-found"

#: In order: the first class with a matching line wins, since later lines of a log are consequences.
_PATTERNS: list[tuple[str, re.Pattern[str]]] = [(name, re.compile(pattern)) for name, pattern in (
    (FREE_MEMORY, r"Free memory on device .*(is less than|Desired GPU memory utilization)"),
    (NO_KV_ROOM, r"No available memory for the cache blocks|larger than the available KV cache memory"
                 r"|Cannot auto-fit max_model_len|KV cache has \d+ blocks, one request"
                 r"|weights and overhead take more than"),
    (OUT_OF_MEMORY, r"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|std::bad_alloc"
                    r"|Cannot allocate memory|^\S*MemoryError|DefaultCPUAllocator: (can't|not enough)"),
    (PORT_BUSY, r"[Aa]ddress already in use|Errno 98|cannot listen on|port is already allocated"),
    (MODEL_NOT_FOUND, r"Repository Not Found|RepositoryNotFoundError:|Invalid repository ID|HFValidationError:"
                      r"|is not a local folder and is not a valid model|does not appear to have a file named"
                      r"|LocalEntryNotFoundError|couldn't connect to .*huggingface|unknown (model|cluster) '"
                      r"|No such file or directory: '[^']*(config|tokenizer)[^']*\.json"),
    (BAD_FLAGS, r"unrecognized arguments|error: argument |invalid choice|validation errors? for |Invalid value for"
                r"|No such option|unexpected argument|: field '[^']+':"
                r"|ValueError: .*(max_num_|max_model_len|max-model-len|tensor.parallel|long_prefill|block.size"
                r"|gpu_memory|watermark|kv.cache.dtype)"
                r"|divisible by tensor parallel size|heads of .* cannot be divided"),
)]
#: What a traceback ends with.
_EXCEPTION = re.compile(r"\b[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b|Segmentation fault|Fatal Python error")
_HARMLESS = re.compile(r"^\S* ?(\([\w =-]+\)\s*)*(INFO|WARNING)\b|^\s+raise ")
#: What a log line begins with before the message: process name, level, time, place.
_PREFIX = re.compile(r"^(\([\w =-]+\)\s*)*((INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The class of a failure and the log line that shows it ('' when the log says nothing)."""

    failure_class: str
    line: str


class LaunchFailure(SpocError):
    """An engine did not become ready, or died. `failure_class`: one of this module's; `line`: quoted from the log."""

    def __init__(self, failure_class: str, message: str, line: str = "") -> None:
        super().__init__(failure_class, message)
        self.line = line

    def __reduce__(self):
        return type(self), (self.code, self.message, self.line)

    @property
    def failure_class(self) -> str:
        """The kind of failure, for tables."""
        return self.code


def diagnose(log_path: Path, exit_status: int | None, *, served: bool) -> Diagnosis:
    """Classify the end of an engine. `served`: it had been ready, so memory ran out under load, not at start."""
    lines = read_log(log_path)
    for name, pattern in _PATTERNS:
        number = next((number for number, line in enumerate(lines) if pattern.search(line)), None)
        if number is None or (served and name in (FREE_MEMORY, NO_KV_ROOM, BAD_FLAGS, PORT_BUSY, MODEL_NOT_FOUND)):
            continue
        line = lines[number]
        if "validation error" in line:  # pydantic: the sentence stands on the next line
            line = f"{quoted(line)}: {quoted(' '.join(lines[number + 1:number + 3]).partition(' [type=')[0])}"
        if name == OUT_OF_MEMORY:
            name += "-under-load" if served else "-at-start"
        return Diagnosis(name, quoted(line))
    if exit_status == 2 and not served:
        return Diagnosis(BAD_FLAGS, quoted(lines[-1]) if lines else "")
    errors = [line for line in lines if _EXCEPTION.search(line) and not _HARMLESS.search(line)]
    return Diagnosis(CRASH, quoted((errors or lines or [""])[-1]))


def read_log(path: Path) -> list[str]:
    """The log's lines without trailing space or terminal colours, empty ones left out; of a huge log its end."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - MOST_LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]


def quoted(line: str) -> str:
    """A log line without its prefix of process name, level, time and place, cut to a readable length."""
    bare = _PREFIX.sub("", line).strip()
    return bare if len(bare) <= QUOTED_CHARACTERS else bare[:QUOTED_CHARACTERS] + "…"


def sentence(diagnosis: Diagnosis, what: str, exit_status: int | None, log_path: Path) -> str:
    """One sentence for the user: what happened, why, where to read on."""
    why = {
        FREE_MEMORY: "less GPU memory is free than gpu_memory_utilization asks for",
        NO_KV_ROOM: "the KV cache cannot hold one request of max_model_len",
        "out-of-memory-at-start": "memory ran out while it started",
        "out-of-memory-under-load": "memory ran out under load",
        PORT_BUSY: "its port was taken", MODEL_NOT_FOUND: "the model was not found",
        BAD_FLAGS: "it refused its flags", CRASH: "it crashed",
    }[diagnosis.failure_class]
    status = "" if exit_status is None else f", exit status {exit_status}"
    if exit_status == 137 and diagnosis.failure_class == CRASH:
        status += " (SIGKILL: somebody, or the kernel short of memory, killed it)"
    quote = f": “{diagnosis.line}”" if diagnosis.line else ""
    return f"the engine {what}, {why}{status}{quote} (log: {log_path})"
