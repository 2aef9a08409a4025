"""Run notebooks headlessly: papermill for the cells, our own result file for the truth.

A killed kernel leaves later cells looking finished, so a stage counts as done only when it wrote its result.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spoc_lib import config
from spoc_lib.config.shipped import CHECKOUT, shipped_dir
from spoc_lib.core.errors import GateError, InputError, SpocError
from spoc_lib.core.files import read_json, write_text
from spoc_lib.core.limits import need_file_handles
from spoc_lib.core.quickimport import import_jsonschema
from spoc_lib.pipeline import record
from spoc_lib.pipeline.parameters import P04, STAGES, Common, check
from spoc_lib.pipeline.resume import why_again
from spoc_lib.pipeline.runs import Run, outputs_dir
from spoc_lib.report import html, index

Say = Callable[[str], None]
#: What a notebook's kernel and papermill have open at once, at most.
HANDLES = 256


def notebooks_dir() -> Path:
    """The project's `notebooks/` folder."""
    return shipped_dir("notebooks")


def choose_stages(only: str = "", start: str = "") -> list[str]:
    """Stage numbers in order: `only` is a comma list, `start` the first of the rest."""
    numbers = [part.strip().zfill(2) for part in only.split(",") if part.strip()] or list(STAGES)
    for number in [*numbers, *([start.zfill(2)] if start else [])]:
        if number not in STAGES:
            raise InputError("unknown-stage", f"there is no notebook {number}: use one of {', '.join(STAGES)}")
    return [n for n in sorted(set(numbers)) if not start or n >= start.zfill(2)]


def run_stages(run: Run, stages: list[str], parameters: dict[str, dict[str, Any]], *, resume: bool, say: Say) -> None:
    """Execute `stages` of `run` in order. `parameters[number]` are that notebook's, checked before anything starts.

    With `resume`, stages that are done with these very parameters stay; the first one that is not, and all after it,
    run.
    """
    checked = {number: check(number, parameters[number]) for number in stages}
    for number in stages:
        title = f"{number} {STAGES[number].title}"
        reason = skip_reason(number, checked[number]) if len(stages) > 1 else ""
        before = run.stage_state(number)
        if resume and (before["state"] == "done" or before["state"] == "skipped" and reason):
            why = why_again(run, number, checked[number]) if before["state"] == "done" else ""
            if not why:
                _make_up_for_page(run, number)
                say(f"{title}: {before['state']} already, kept")
                continue
            say(f"{title}: {why}, so it and what follows run again")
        resume = False
        if reason:
            run.set_stage(number, state="skipped", reason=reason)
            say(f"{title}: skipped: {reason}")
            continue
        execute(run, number, checked[number].model_dump(), say)


def again(run: Run, cluster: str = "") -> str:
    """How to go on with a run, batch or report, with the command. cluster: the name or path that the run was told, by
    default the name that its run.json holds."""
    state = run.state
    if "batch" in state:
        command = ["spoc", "batch", "--resume", "--run-id", run.id]
    elif "runs" in state:
        command = ["spoc", "report", *state["runs"]]
    else:
        command = ["spoc", "run", cluster or state["cluster"], "--run-id", run.id, "--resume"]
    return f"go on with: {shlex.join(command)}"


def skip_reason(number: str, parameters: Common) -> str:
    """Why this stage has nothing to do on its cluster, or ''. Asked for alone, it is run all the same and says so."""
    cluster = config.load_cluster(parameters.cluster)
    if number == "02" and cluster.engine.kind == "remote":
        return "a remote engine's flags are fixed, so there is nothing to search"
    if isinstance(parameters, P04) and not (cluster.simulated or parameters.trace or parameters.capture):
        return (
            f"no trace to read: capture one at the limit with --capture (spoc nsight plan {parameters.cluster} tells "
            "how by hand), or pass one with --only 04 --set trace=FILE"
        )
    return ""


def execute(run: Run, number: str, parameters: dict[str, Any], say: Say) -> None:
    """One notebook through papermill into the run's folder, then its HTML. GateError when it did not finish."""
    import_jsonschema()
    import papermill
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    logging.getLogger("papermill").setLevel(logging.ERROR)
    # what fails is raised to us; a task that an interrupt leaves behind would print a traceback of its own
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    _write_whole_notebooks()
    need_file_handles(HANDLES)
    stage = STAGES[number]
    output = run.folder / f"{stage.notebook}.ipynb"
    run.set_stage(number, state="running", started_wall_s=time.time())  # its parameters are set when it has begun
    began = time.monotonic()
    reason = ""
    with _watch(run, number, say), _kernel_environment(), _socket_folder() as private:
        try:
            papermill.execute_notebook(
                _literal(notebooks_dir() / f"{stage.notebook}.ipynb"),
                _literal(output),
                progress_bar=False,
                parameters={**parameters, "run_dir": str(run.folder)},
                kernel_name="python3",
                cwd=str(notebooks_dir()),
                start_timeout=120,
                # no ports: none to race for, none to listen in; the sockets' folder is this stage's and nobody else's
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{private}/kernel"}}),
                extra_arguments=["--IPKernelApp.log_level=50"],  # a kernel that is told to go has no last words
            )
        except PapermillExecutionError as error:
            reason = f"{error.ename}: {error.evalue}"
        except KeyboardInterrupt:
            _end_kernels()
            run.set_stage(number, state="interrupted")
            raise
        except Exception as error:  # the kernel died, the disk filled: whatever it was, the stage is not done
            reason = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    if not reason and run.stage_state(number)["state"] != "done":
        reason = "the notebook ended without writing its result"
    if reason:
        run.set_stage(number, state="failed", reason=reason, seconds=seconds)
        if reason.startswith("InputError"):
            raise InputError("stage-refused", f"notebook {number}: {reason.partition(': ')[2]}")
        raise GateError("stage-failed", f"notebook {number} ({stage.title}) failed after {seconds:.0f} s: "
                        f"{reason.splitlines()[0]}; its cells are in {output}; {again(run, parameters['cluster'])}")
    run.set_stage(number, seconds=seconds)
    say(f"{number} {stage.title}: {seconds:.0f} s -> {_render(run, number)}")
    for finding in run.stage_state(number).get("findings", [])[:3]:
        say(f"   {finding}")


def _literal(path: Path) -> str:
    """A path for papermill, which fills in what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _socket_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of this stage's own whose name leaves room for a socket's: 107 bytes at most, all in all."""
    roomy = len(os.fsencode(tempfile.gettempdir())) < 60
    return tempfile.TemporaryDirectory(prefix="spoc-", dir=None if roomy else "/tmp")


@contextlib.contextmanager
def _kernel_environment() -> Iterator[None]:
    """A kernel runs in the notebooks' folder: what this process finds by paths from its own folder is found there too,
    and the workbench itself where it runs from a checkout."""
    whole = {name: os.path.abspath(value) for name in ("SPOC_DATA", "SPOC_CACHE") if (value := os.environ.get(name))}
    paths = [str(CHECKOUT)] if CHECKOUT else []
    paths += [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    whole |= {"SPOC_OUTPUTS": str(outputs_dir()), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    before = {name: os.environ.get(name) for name in whole}
    os.environ.update(whole)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _end_kernels() -> None:
    """Papermill ends its kernel, but not one that was interrupted while it started; we have no other children here."""
    tasks = Path(f"/proc/{os.getpid()}/task")  # Linux; elsewhere a kernel ends by itself once its parent is gone
    for children in tasks.glob("*/children"):
        for pid in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _render(run: Run, number: str) -> Path:
    """The page of a finished notebook."""
    stage = STAGES[number]
    output = run.folder / f"{stage.notebook}.ipynb"
    record.into_notebook(output, read_json(run.folder / stage.folder / "result.json")["provenance"])
    siblings = {f"{s.notebook}.html": f"{s.number} {s.title}" for s in STAGES.values()}
    return html.render(output, output.with_suffix(".html"), f"{stage.number} {stage.title}: {run.id}", siblings)


def _make_up_for_page(run: Run, number: str) -> None:
    """The page of a stage that was killed between its notebook and its page."""
    notebook = run.folder / f"{STAGES[number].notebook}.ipynb"
    if notebook.exists() and not notebook.with_suffix(".html").exists():
        _render(run, number)


def _write_whole_notebooks() -> None:
    """Papermill saves the notebook after every cell, in place: a kill or a full disk would leave half of it. Ours are
    absolute paths, which its handlers know by their beginning like any other scheme."""
    from papermill.iorw import LocalHandler, papermill_io

    class Whole(LocalHandler):
        def write(self, buf: str, path: str) -> None:
            write_text(path, buf)

    if type(papermill_io.get_handler(os.sep)).__name__ != Whole.__name__:
        papermill_io.register(os.sep, Whole())


class _watch:
    """While a notebook runs, repeat its own progress line when it changes (at most every two seconds)."""

    def __init__(self, run: Run, number: str, say: Say) -> None:
        self._path, self._number, self._say = run.folder / "progress.json", number, say
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._path.unlink(missing_ok=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _follow(self) -> None:
        last = ""
        while not self._stop.wait(2.0):
            if self._path.exists():
                text = read_json(self._path)["text"]
                if text != last:
                    self._say(f"   {self._number} … {text}")
                    last = text


def run_cluster(
    cluster_name: str,
    *,
    profile: str | None = None,
    seed: int | None = None,
    stages: list[str],
    settings: dict[str, dict[str, Any]],
    run_id: str = "",
    resume: bool = False,
    say: Say,
) -> Run:
    """`spoc run`: create or reopen the run of one cluster and execute its stages.

    resume: go on with the run `run_id` (started where it is not there yet, so that a scheduler may repeat one and the
    same command), or with the cluster's newest one. What a run was told once (profile, seed, settings) holds until it
    is told otherwise; by default: profile quick, seed 1.
    """
    cluster = config.load_cluster(cluster_name)
    run = _found(cluster, run_id, stages, resume)
    before = run.state if run else {}
    profile = profile or before.get("profile", "quick")
    seed = before.get("seed", 1) if seed is None else seed
    config.load_profile(profile)
    told = {**before.get("settings", {})}
    for number in stages:
        told[number] = {**told.get(number, {}), **settings.get(number, {})}
    common = {"cluster": absolute(cluster_name), "profile": absolute(profile), "seed": seed}
    parameters = {number: {**common, **told[number]} for number in stages}
    checked = {number: check(number, parameters[number]) for number in stages}
    asked = checked.get("04")
    if isinstance(asked, P04) and asked.capture:
        from spoc_lib.pipeline.limit_capture import require

        require(cluster, asked.trace)
    facts = {"cluster": cluster.name, "profile": absolute(profile), "seed": seed, "settings": told}
    run = run or Run.create(cluster.name, run_id, facts)
    with run.exclusive():
        run.update(**facts)
        say(f"run {run.id} in {run.folder}")
        try:
            run_stages(run, stages, parameters, resume=resume, say=say)
        except KeyboardInterrupt:
            say(f"interrupted; {again(run, absolute(cluster_name))}")
            raise
        finally:
            index.rebuild(run.folder.parent)
    return run


def _found(cluster: config.Cluster, run_id: str, stages: list[str], resume: bool) -> Run | None:
    """The run to go on with; None: a new one. InputError when it is another cluster's, or would be overwritten."""
    if not run_id:
        return Run.latest(cluster.name) if resume else None
    try:
        run = Run.open(run_id)
    except SpocError:
        return None
    if not resume and stages == list(STAGES):
        raise InputError("run-exists", f"run '{run_id}' exists: add --resume, or --only/--from to redo stages")
    if run.state.get("cluster") != cluster.name:
        raise InputError("other-cluster", f"run '{run_id}' is of cluster '{run.state.get('cluster')}', not of "
                         f"'{cluster.name}': choose another --run-id")
    return run


def absolute(name_or_path: str) -> str:
    """A cluster or profile for notebooks, which run in their own folder: a relative path is made absolute."""
    return os.path.abspath(os.path.expanduser(name_or_path)) if config.is_path(name_or_path) else name_or_path
