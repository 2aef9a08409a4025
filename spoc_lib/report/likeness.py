"""Whether two runs asked the same question, what is compared between them, and what differs besides."""

from __future__ import annotations

from typing import Any

from spoc_lib.report.answer import Answer


def hindrances(answer: Answer, reference: Answer) -> list[str]:
    """Why the numbers of the two runs do not mean the same, each with both values."""
    asked = [
        ("SLOs", *("; ".join(sorted(slo.name for slo in one.cluster.slos)) for one in (answer, reference))),
        ("personas", *_personas(answer, reference)),
        ("cap on think time", *(f"{one.capacity['gap_cap_s']:g} s" for one in (answer, reference))),
        ("start of the users", *(_profile(one).get("start", "?") for one in (answer, reference))),
        ("model", answer.cluster.model_name, reference.cluster.model_name),
        ("numbers", answer.label, reference.label),
    ]
    found = [f"other {what} ({mine} against {theirs})" for what, mine, theirs in asked if mine != theirs]
    lengths = answer.capacity["rung_s"], reference.capacity["rung_s"]
    if max(lengths) > 2 * min(lengths):
        found.append(f"rungs of {lengths[0]:g} s against {lengths[1]:g} s see different tails")
    return found


def differences(answer: Answer, reference: Answer) -> tuple[list[str], list[str]]:
    """(what is compared: engine, hardware, flags, calibration; what else differs: versions, seeds, client)."""
    mine, theirs = answer.made, reference.made
    changed = _differ([
        ("engine", engine_name(answer), engine_name(reference)),
        ("hardware", _hardware(answer), _hardware(reference)),
        ("flags", _flags(answer), _flags(reference)),
        ("calibration", answer.calibration or "none", reference.calibration or "none"),
    ])
    notes = _differ([
        ("workbench", mine.get("git", "?"), theirs.get("git", "?")),
        ("seed", _seed(answer), _seed(reference)),
        ("profile", _profile(answer).get("name", "?"), _profile(reference).get("name", "?")),
        ("client", str(mine.get("client", {}).get("cpu", "?")), str(theirs.get("client", {}).get("cpu", "?"))),
    ])
    return changed, notes


def subject(answer: Answer, reference: Answer) -> str:
    """What is held against what: clusters where their hardware differs, else engine versions where these differ, else
    the runs with their dates."""
    mine, theirs = engine_name(answer), engine_name(reference)
    if _hardware(answer) != _hardware(reference) or "" in (mine, theirs):
        mine, theirs = answer.cluster.name, reference.cluster.name
    if mine != theirs:
        return f"{mine} against {theirs}"
    return f"{_dated(answer)} against {_dated(reference)}"


def engine_name(answer: Answer) -> str:
    """`vLLM 0.32.0`, `the twin of vLLM 0.32.0`; empty where no version was recorded."""
    version = (answer.made.get("engine") or {}).get("version")
    twin = "the twin of " if answer.cluster.simulated else ""
    return f"{twin}vLLM {version}" if version else ""


def _differ(asked: list[tuple[str, str, str]]) -> list[str]:
    return [f"{what}: {mine or '?'} against {theirs or '?'}" for what, mine, theirs in asked if mine != theirs]


def _profile(answer: Answer) -> dict[str, Any]:
    return answer.made.get("profile") or {}


def _personas(*answers: Answer) -> list[str]:
    """Each run's persona file by its hash, for the same name may hold other people; by name where one has no hash."""
    digests = [(one.made.get("data_sha256") or {}).get("personas", "")[:12] for one in answers]
    names = [str((one.made.get("parameters") or {}).get("personas") or one.cluster.personas) for one in answers]
    return digests if all(digests) else names


def _hardware(answer: Answer) -> str:
    return f"{answer.cluster.hardware.count} x {answer.cluster.hardware.gpu_name}"


def _flags(answer: Answer) -> str:
    parallel = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    set_ones = [f"{name}={value}" for name, value in sorted(answer.flags.items()) if name not in parallel]
    return " ".join(set_ones) or "defaults"


def _seed(answer: Answer) -> str:
    return str((answer.made.get("parameters") or {}).get("seed", "?"))


def _dated(answer: Answer) -> str:
    finished = str(answer.made.get("finished", ""))[:16].replace("T", " ")
    return f"{answer.run} of {finished}" if finished else answer.run
