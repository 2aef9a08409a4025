"""`spoc run`, `batch`, `report`, `check`: the notebooks as a pipeline."""

from __future__ import annotations

from typing import Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit

Profile = Annotated[str, typer.Option(help="how much work: quick, standard, paper, or a YAML file")]
Seed = Annotated[int, typer.Option(min=0, help="seed of workload and search")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a notebook parameter; repeatable")
]


def register(app: typer.Typer) -> None:
    """Add the pipeline's commands to the top level."""
    app.command("run")(run)
    app.command("batch")(batch)
    app.command("report")(report)
    app.command("check")(check)


def run(
    cluster: Annotated[str, typer.Argument(help="a name in data/clusters/ or the path of a cluster file")],
    profile: Profile = "quick",
    seed: Seed = 1,
    only: Annotated[str, typer.Option(help="these notebooks only, for example 03 or 03,04")] = "",
    start: Annotated[str, typer.Option("--from", help="from this notebook on")] = "",
    run_id: Annotated[str, typer.Option(help="name of the run folder; an existing one is used again")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last finished stage")] = False,
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

    stages = choose_stages(only, start)
    done = run_cluster(
        cluster,
        profile=profile,
        seed=seed,
        stages=stages,
        settings=split_settings([*(settings or []), *(["capture=true"] if capture else [])], stages),
        run_id=run_id,
        resume=resume,
        say=_say(json),
    )
    emit(
        {"run": done.id, "folder": str(done.folder), "stages": done.state["stages"]},
        json,
        f"done: {done.folder}",
    )


def batch(
    clusters: Annotated[list[str], typer.Argument(help="clusters to run and compare")],
    profile: Profile = "quick",
    seed: Seed = 1,
    jobs: Annotated[
        int, typer.Option(min=1, help="clusters at a time; on one machine they disturb each other's clocks")
    ] = 1,
    settings: Settings = None,
    json: JsonOption = None,
) -> None:
    """One run a cluster (notebooks 01-04), then notebook 05 over all of them.

    Example: spoc batch sim-4xh100 sim-2xh200 --profile quick
    """
    from spoc_lib.pipeline.batch import report as make_report
    from spoc_lib.pipeline.batch import run_batch
    from spoc_lib.pipeline.parameters import split_settings

    say = _say(json)
    split_settings(settings or [], ["01", "02", "03", "04"])
    arguments = [
        "--profile",
        profile,
        "--seed",
        str(seed),
        *(w for s in settings or [] for w in ("--set", s)),
    ]
    outcomes = run_batch(clusters, arguments, jobs=jobs, say=say)
    finished = [o.run for o in outcomes if o.status == 0 and o.run]
    comparison = make_report(finished, profile=profile, say=say) if finished else None
    result = {"outcomes": outcomes, "report": comparison and str(comparison.folder)}
    lines = [f"{o.cluster}: failed (exit {o.status}): {o.reason}" for o in outcomes if o.status]
    if comparison:
        lines += _verdict(comparison)
    emit(result, json, "\n".join(lines))
    raise typer.Exit(0 if len(finished) == len(clusters) else 1)


def report(
    runs: Annotated[list[str], typer.Argument(help="runs (ids or folders) with a finished sweep")],
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

    chosen = split_settings(settings or [], ["05"])["05"]
    comparison = make_report(runs, profile=profile, settings=chosen, say=_say(json))
    emit({"report": str(comparison.folder)}, json, "\n".join(_verdict(comparison)))


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


def _verdict(comparison) -> list[str]:
    """The answer in words, and where the page is."""
    from spoc_lib.core.files import read_json

    answer = read_json(comparison.folder / "report.json")
    return [*answer["verdict"], f"report: {comparison.folder / '05_capacity_report.html'}"]


def _say(json: str | None):
    """Progress goes to standard output, or to standard error when the result itself is asked for there."""
    import sys

    return lambda text: print(text, file=sys.stderr if json == "-" else sys.stdout, flush=True)
