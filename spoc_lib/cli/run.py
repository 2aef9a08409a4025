"""`spoc run`, `report`, `check`: the notebooks as a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit
from spoc_lib.core.errors import InputError

if TYPE_CHECKING:
    from spoc_lib.pipeline.runs import Run

Profile = Annotated[str | None, typer.Option(help="how much work: quick (default), standard, paper, or a YAML file")]
Seed = Annotated[int | None, typer.Option(min=0, help="seed of workload and search; default 1")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a notebook parameter; repeatable")
]


def register(app: typer.Typer) -> None:
    """Add the pipeline's commands to the top level."""
    app.command("run")(run)
    app.command("report")(report)
    app.command("check")(check)


def run(
    cluster: Annotated[str, typer.Argument(help="a name in data/clusters/ or the path of a cluster file")] = "",
    profile: Profile = None,
    seed: Seed = None,
    only: Annotated[str, typer.Option(help="these notebooks only, for example 03 or 03,04")] = "",
    start: Annotated[str, typer.Option("--from", help="from this notebook on")] = "",
    run_id: Annotated[str, typer.Option(help="name of the run folder; an existing one is used again")] = "",
    resume: Annotated[bool, typer.Option(
        "--resume", help="go on after the last finished stage, as the run was told; a --run-id not there yet starts"
    )] = False,
    from_run: Annotated[str, typer.Option(
        "--from-run", metavar="RUN", help="repeat this run with its own parameters, seeds and files; say what differs"
    )] = "",
    capture: Annotated[bool, typer.Option(
        "--capture", help="trace the engine with nsys at the limit (--set capture=true); the twin: its NVTX ranges")
    ] = False,
    settings: Settings = None,
    json: JsonOption = None,
) -> None:
    """Run the notebooks in order through papermill into outputs/RUN, and render each as HTML.

    Example: spoc run sim-4xh100 --profile quick --set monorepo=~/src/my-repo
    """
    from spoc_lib.pipeline.execute import choose_stages, run_cluster
    from spoc_lib.pipeline.parameters import split_settings

    stop_gently()
    stages = choose_stages(only, start)
    if from_run:
        others = {"CLUSTER": cluster, "--profile": profile, "--seed": seed is not None, "--resume": resume,
                  "--capture": capture, "--set": settings}
        _repeat(from_run, [name for name, given in others.items() if given], stages, run_id, json)
        return
    if not cluster:
        raise InputError("no-cluster", "name a cluster (see data/clusters/), or a run to repeat with --from-run")
    done = run_cluster(cluster, profile=profile, seed=seed, stages=stages,
                       settings=split_settings([*(settings or []), *(["capture=true"] if capture else [])], stages),
                       run_id=run_id, resume=resume, say=progress_to(json))
    emit({"run": done.id, "folder": str(done.folder), "stages": done.state["stages"]}, json, f"done: {done.folder}")


def _repeat(source: str, also_given: list[str], stages: list[str], run_id: str, json: str | None) -> None:
    from spoc_lib.core.files import read_json
    from spoc_lib.pipeline import repeat
    from spoc_lib.pipeline.runs import Run

    if also_given:
        raise InputError("from-run", f"--from-run takes everything from the run that it repeats: leave out "
                         f"{', '.join(also_given)}")
    done = repeat.repeat(Run.open(source), stages=stages, run_id=run_id, say=progress_to(json))
    emit({"run": done.id, "folder": str(done.folder), "stages": done.state["stages"],
          **read_json(done.folder / "repeat.json")}, json, "\n".join([*repeat.sentences(done), f"done: {done.folder}"]))


def report(
    runs: Annotated[list[str], typer.Argument(
        help="runs (ids or folders) with a finished sweep; the word index alone rebuilds outputs/index.html")],
    profile: Annotated[str, typer.Option(help="quick, standard, paper, or a YAML file; default: the first run's own")
                       ] = "",
    settings: Settings = None,
    json: JsonOption = None,
) -> None:
    """Notebook 05 over given runs: the verdict and the comparison; rebuilds outputs/index.html.

    Example: spoc report sim-4xh100-20260101-120000 sim-2xh200-20260101-120500 --set what_if=true
    """
    from spoc_lib.pipeline.batch import report as make_report
    from spoc_lib.pipeline.parameters import split_settings
    from spoc_lib.pipeline.runs import outputs_dir
    from spoc_lib.report import index

    stop_gently()
    if runs == ["index"]:
        page = index.rebuild(outputs_dir())
        emit({"index": str(page)}, json, f"index: {page}")
        return
    chosen = split_settings(settings or [], ["05"])["05"]
    comparison = make_report(runs, profile=profile, settings=chosen, say=progress_to(json))
    emit({"report": str(comparison.folder)}, json, "\n".join(verdict_lines(comparison)))


def check(
    cluster: Annotated[str, typer.Argument(help="a name in data/clusters/ or the path of a cluster file")],
    json: JsonOption = None,
) -> None:
    """Say what a run on this cluster will find missing, and what each lack costs, before anything starts.

    Example: spoc check my-cluster.yaml
    """
    from spoc_lib.pipeline.preflight import preflight

    findings = preflight(cluster)
    text = "\n".join(f"{'ok     ' if f.ok else f.severity:8}{f.subject}: {f.sentence}" for f in findings)
    emit({"findings": findings}, json, text)
    raise typer.Exit(1 if any(not f.ok and f.severity == "stops" for f in findings) else 0)


def verdict_lines(comparison: Run) -> list[str]:
    """The answer in words, and where the page is."""
    from spoc_lib.core.files import read_json

    answer = read_json(comparison.folder / "report.json")
    return [*answer["verdict"], f"report: {comparison.folder / '05_capacity_report.html'}"]


def progress_to(json: str | None) -> Callable[[str], None]:
    """Progress goes to standard output, or to standard error when the result itself is asked for there."""
    import sys

    return lambda text: print(text, file=sys.stderr if json == "-" else sys.stdout, flush=True)


def stop_gently() -> None:
    """SIGTERM (a scheduler's time limit, a container's stop) and a lost terminal end a run as Ctrl-C does: engine and
    kernel go, the state says `interrupted`. A signal that is ignored here (nohup) stays ignored."""
    import signal

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
