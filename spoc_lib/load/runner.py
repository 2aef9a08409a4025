"""`run`: one rung of load, from the probe of the endpoint to settled books. Runs anywhere, also in a notebook
kernel: Locust is in child processes, this side only waits, reads lines and computes the figures."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from spoc_lib.core import schemas
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.core.files import plain, read_json, write_json, write_text
from spoc_lib.core.limits import need_file_handles
from spoc_lib.core.tables import read_table, write_table
from spoc_lib.engine.http.marks import mark
from spoc_lib.load.books import REPLIES, TABLES
from spoc_lib.load.endpoint import probe, reset_prefix_cache
from spoc_lib.load.gate import stored
from spoc_lib.load.plan import LoadPlan
from spoc_lib.load.processes import Clients, need_ports, undisturbed
from spoc_lib.load.records import planned_rows, read_lines, settle
from spoc_lib.load.reuse import reuse_table, warmed
from spoc_lib.load.summary import summarise
from spoc_lib.load.window import steady_window

Progress = Callable[[dict[str, Any]], None]
#: What a child may need beyond its own bounds before it is killed.
SLACK_S = 15.0
INTERRUPT_GRACE_S = 6.0
START_IN_S = 0.05
#: Files that a client process has open beside its users' connections.
SPARE_HANDLES = 100


@dataclass(frozen=True)
class LoadRun:
    """One rung that was run. Tables as in `core.schemas`; `window` = (start_s, end_s), monotonic seconds;
    `summary` as `load run` prints it."""

    folder: Path
    plan: LoadPlan
    summary: dict[str, Any]
    requests: pd.DataFrame
    chunks: pd.DataFrame
    metrics: pd.DataFrame
    window: tuple[float, float]


def run(plan: LoadPlan, folder: str | Path, progress: Progress | None = None) -> LoadRun:
    """Play `plan`; its tables, `plan.json` and `summary.json` land in `folder` (what an earlier rung left there is
    replaced).

    `progress` is called about once a second with {phase, elapsed_s, duration_s, live, in_flight, finished, planned,
    completed, failed, tokens, ttft_p95_s}. InputError when nobody answers at the endpoint, the model is unknown, or
    the API key is missing. A killed client or a dead server is no error: the books close and the summary says it
    (`valid`, `invalid`). KeyboardInterrupt closes the books first, then goes on.
    """
    began = time.monotonic()
    need_file_handles(plan.users // plan.processes + SPARE_HANDLES)
    if plan.ui_port is not None:
        need_ports(plan.ui_port, 1 if plan.master else plan.processes)
    plan.key()
    endpoint = probe(plan)
    if plan.context_limit is None and plan.fixed is None and endpoint.max_model_len:
        plan = plan.model_copy(update={"context_limit": endpoint.max_model_len})
    folder = Path(folder)
    folders = _clean(folder, plan.processes)
    plan_path = write_text(folder / "plan.json", plan.model_dump_json(indent=2) + "\n")
    clients = Clients(plan_path, folder, folders, plan.master is not None)
    facts: dict[str, Any] = {"notes": list(endpoint.notes), "interrupted": False}
    interrupt: BaseException | None = None
    with ExitStack() as closing:
        try:
            _play(plan, clients, facts, began, progress)
        except KeyboardInterrupt as error:
            closing.enter_context(undisturbed())
            interrupt = error
            facts["interrupted"] = True
        finally:
            clients.stop(INTERRUPT_GRACE_S)
            clients.close()
        facts.setdefault("start_s", time.monotonic())
        facts.setdefault("startup_s", time.monotonic() - began)
        lost = [path for path in folders if not (path / "client.json").exists()]
        facts["lost_clients"] = len(lost)
        facts["lost_why"] = [client.log_tail() for client in clients.all if client.folder in lost]
        facts["stop_s"] = min([client.last.get("end", {}).get("stopped_s", time.monotonic()) for client in clients.all]
                              + [facts["start_s"] + plan.duration_s])
        # a master needs longer
        facts["start_s"] = clients.all[0].last.get("end", {}).get("start_s", facts["start_s"])
        result = _settle(plan, folder, [path for path in folders if path.exists()], facts)
    if interrupt is not None:
        raise interrupt
    return result


def _play(plan: LoadPlan, clients: Clients, facts: dict[str, Any], began: float, progress: Progress | None) -> None:
    """From the clients' preparation to the end of the rung."""
    clients.prepared()
    if plan.cache == "reset":
        reset_prefix_cache(plan)
    facts["start_s"] = time.monotonic() + START_IN_S
    facts["startup_s"] = time.monotonic() - began
    for client in clients.all:
        client.go(facts["start_s"])
    _watch(plan, clients, facts["start_s"], progress)


def read_run(folder: str | Path) -> LoadRun:
    """A rung from its folder; one whose parent process was killed is settled first from what its clients left."""
    folder = Path(folder)
    plan = LoadPlan.model_validate(read_json(folder / "plan.json", "plan of a rung"))
    if not (folder / "summary.json").exists():
        folders = sorted(folder.glob("client-*"))
        if not folders:
            raise InputError("no-rung", f"{folder} holds no records of a rung")
        return _settle(plan, folder, folders, _facts_from(folders, plan))
    summary = read_json(folder / "summary.json", "summary of a rung")
    tables = {name: read_table(folder / f"{name}.parquet", schema) for name, schema in TABLES.items()}
    window = (summary["window"]["start_s"], summary["window"]["end_s"])
    return LoadRun(folder, plan, summary, tables["requests"], tables["chunks"], tables["metrics"], window)


def _clean(folder: Path, processes: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("client-*"):
        shutil.rmtree(old)
    for name in ("summary.json", *(f"{table}.parquet" for table in TABLES)):
        (folder / name).unlink(missing_ok=True)
    return [folder / f"client-{number}" for number in range(processes)]


def _watch(plan: LoadPlan, clients: Clients, start_s: float, progress: Progress | None) -> None:
    """Pass on progress until all clients have ended, each phase an NVTX range; a client that outlives its bounds is
    left to `stop`."""
    deadline = start_s + plan.duration_s + plan.stop_timeout_s + SLACK_S
    told, phase = 0.0, ""
    with ExitStack() as marks:
        for event in clients.events(deadline):
            now = _phase(plan, time.monotonic() - start_s)
            if now != phase:
                phase = now
                marks.close()
                marks.enter_context(mark(f"load {phase} users={plan.users} seed={plan.seed} salt={plan.salt}"))
            if event and event["event"] == "progress" and progress and time.monotonic() - told > 0.5:
                told = time.monotonic()
                progress(_combined(plan, clients, start_s))


def _phase(plan: LoadPlan, elapsed_s: float) -> str:
    ends = ((plan.ramp_s, "ramp"), (plan.ramp_s + plan.warmup_s, "warm-up"), (plan.duration_s, "steady"))
    return next((name for end_s, name in ends if elapsed_s < end_s), "draining")


def _combined(plan: LoadPlan, clients: Clients, start_s: float) -> dict[str, Any]:
    states = [client.last["progress"] for client in clients.all if "progress" in client.last]
    elapsed = time.monotonic() - start_s
    sums = {name: sum(state[name] for state in states)
            for name in ("live", "in_flight", "finished", "planned", "completed", "failed", "tokens")}
    worst = [state["ttft_p95_s"] for state in states if state["ttft_p95_s"] is not None]
    return {"phase": "draining" if elapsed > plan.duration_s else "running", "elapsed_s": elapsed,
            "duration_s": plan.duration_s, **sums, "ttft_p95_s": max(worst, default=None)}


def _settle(plan: LoadPlan, folder: Path, folders: list[Path], facts: dict[str, Any]) -> LoadRun:
    """Close the books, compute the figures, write the summary."""
    reports = [read_json(path / "client.json") for path in folders if (path / "client.json").exists()]
    crashed = [report["crashed"] for report in reports if report["crashed"]]
    streams = sum(report["read_streams"] for report in reports)
    stamped = sum(report["kernel_stamped"] for report in reports)
    facts["error_samples"] = {name: text for report in reports for name, text in report["error_samples"].items()}
    facts["retry_after"] = sum(report["retry_after"] for report in reports)
    facts["stamps"] = "kernel" if streams and stamped == streams else ("process" if not stamped else "mixed")
    facts["interrupted"] = facts["interrupted"] or any(report["interrupted"] for report in reports)
    facts["notes"] += _remarks(reports)
    planned, cut_class = planned_rows(folders), "interrupted" if facts["interrupted"] else "client_lost"
    facts["planned"] = len(planned)
    tables = settle(folders, planned, folder, time.monotonic(), cut_class)
    requests, chunks = _count_replies(tables["requests"], tables["chunks"], folders, facts)
    if requests is not tables["requests"]:
        write_table(folder / "requests.parquet", requests, schemas.REQUESTS)
        write_table(folder / "chunks.parquet", chunks, schemas.CHUNKS)
    window = steady_window(requests, chunks, facts["start_s"], max(facts["stop_s"], facts["start_s"]),
                           settle_s=plan.ramp_s + plan.warmup_s)
    check = stored()
    if check is None:
        facts["notes"].append("no self-check of this host is stored: run 'spoc load selfcheck' to gate the rungs by it")
    summary = summarise(plan, requests, chunks, tables["metrics"], window, facts, check)
    if plan.master is not None:
        summary["workers"] = [{name: report[name] for name in ("worker", "clock_offset_s", "clock_error_s")}
                              for report in reports]
    timed = requests[requests["send_s"].between(window.start_s, window.end_s, inclusive="left")]
    reuse = reuse_table(planned, timed)
    summary["reuse"] = plain(reuse.to_dict("records"))
    summary["notes"] += warmed(reuse, len(timed), plan.cache)
    summary["startup_s"] = facts["startup_s"]
    summary["start_s"] = facts["start_s"]
    summary["folder"] = str(folder)
    write_json(folder / "summary.json", summary)
    if crashed:
        raise SpocError("client-crashed", f"the load client failed on its own account: {crashed[0].strip()}")
    return LoadRun(folder, plan, summary, requests, chunks, tables["metrics"], (window.start_s, window.end_s))


def _remarks(reports: list[dict[str, Any]]) -> list[str]:
    """What the clients saw that a reader of the figures must know."""
    hidden = sum(report["hidden_tokens"] for report in reports)
    odd = sum((Counter(report["odd_events"]) for report in reports), Counter[str]())
    stepped_s = max((report["clock_stepped_s"] for report in reports), default=0.0)
    notes = [f"the server kept {hidden:,} tokens of reasoning to itself: no rate and no gap has them"] if hidden else []
    notes += [f"the answers held {count:,} {kind}" for kind, count in odd.items()]
    if stepped_s:
        notes.append(f"the wall clock was set by {stepped_s:.3f} s meanwhile: the kernel's stamps of up to a second "
                     "before may be off by as much")
    return notes


def _count_replies(requests: pd.DataFrame, chunks: pd.DataFrame, folders: list[Path],
                   facts: dict[str, Any]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Output tokens of replies whose server sent no usage, by the offline tokenizer; the summary names it."""
    replies = [line for folder in folders for line in read_lines(folder / REPLIES)]
    if not replies:
        return requests, chunks
    from spoc_lib.workload.tokenizer import offline_tokenizer

    tokenizer = offline_tokenizer()
    counts = pd.Series({line["request"]: tokenizer.count(line["text"]) for line in replies}, dtype="int64")
    requests, chunks = requests.copy(), chunks.copy()
    mine = requests["request"].isin(counts.index)
    requests.loc[mine, "output_tokens"] = requests.loc[mine, "request"].map(counts).astype(float)
    sizes = requests.set_index("request")["chunks"]
    own = chunks["request"].isin(counts.index)
    ids = chunks.loc[own, "request"]
    chunks.loc[own, "tokens"] = (ids.map(counts) / ids.map(sizes)).astype(float)
    facts["notes"].append(f"the server reports no usage for {len(replies)} answers: their output tokens are counted "
                          f"with the tokenizer {tokenizer.name}")
    return requests, chunks


def _facts_from(folders: list[Path], plan: LoadPlan) -> dict[str, Any]:
    """What a killed parent would have known."""
    reports = [read_json(path / "client.json") for path in folders if (path / "client.json").exists()]
    planned = planned_rows(folders)
    start = min([report["start_s"] for report in reports] + [row["intended_send_s"] for row in planned],
                default=time.monotonic())
    return {"notes": ["settled after the fact: the process that ran this rung was killed"], "interrupted": True,
            "start_s": start, "stop_s": start + plan.duration_s, "startup_s": None,
            "lost_clients": len(folders) - len(reports), "lost_why": []}


def describe(summary: Mapping[str, Any]) -> str:
    """A few readable lines of a rung's summary."""
    def shown(value: Any, scale: float = 1.0) -> str:
        return "-" if value is None or isinstance(value, float) and value != value else f"{scale * float(value):,.1f}"

    def ms(value: Any) -> str:
        return shown(value, 1e3)

    lines = [f"{summary['users']} users, {summary['planned']} requests planned: {summary['completed']} completed, "
             f"{summary['failed']} failed, {summary['censored']} censored; seed {summary['seed']}, salt "
             f"{summary['salt']}",
             f"{shown(summary['output_tokens_per_s'])} output tokens/s; window {summary['window']['verdict']}: "
             f"{summary['window']['reason']}"]
    for name, label in (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("tpot_s", "TPOT")):
        values = summary[name]
        lines.append(f"{label:5} ms  p50 {ms(values['p50']):>10}  p95 {ms(values['p95']):>10}  "
                     f"p99 {ms(values['p99']):>10}")
    layers = [row for row in summary["reuse"] if row["prompt_tokens"]]
    if layers:
        lines.append("from the prefix cache (could be): " + ", ".join(
            f"{row['layer']} {100 * row['cached_ratio']:.0f} % ({100 * row['intended_ratio']:.0f} %)"
            for row in layers))
    if summary["errors"]:
        lines.append("errors: " + ", ".join(f"{name} {count}" for name, count in summary["errors"].items()))
        lines += [f"{name}: {' '.join(text.split())}" for name, text in summary["error_samples"].items() if text]
    lines += [f"client-limited: {text}" for text in summary["client_limits"]]
    lines += [f"invalid: {text}" for text in summary["invalid"]]
    lines += [f"note: {text}" for text in summary["notes"]]
    return "\n".join(lines)

