"""`spoc search`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="Which flags: NSGA-II over vLLM's flags, screened on the twin, confirmed by real load.")

FolderArgument = Annotated[Path, typer.Argument(help="folder of a search", metavar="FOLDER")]


@app.command("run")
def run(
    cluster: Annotated[str, typer.Argument(help="cluster name or YAML file", metavar="CLUSTER")],
    profile: Annotated[str, typer.Option(help="how much work: quick, standard, paper or a YAML file")] = "quick",
    trials: Annotated[int | None, typer.Option(min=1, help="trials of the study; default: the profile's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the workload and of NSGA-II")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder for the study; default: outputs/search-CLUSTER")] = None,
    confirm: Annotated[bool, typer.Option(help="put the finalists before real Locust load over HTTP")] = True,
    objective: Annotated[str | None, typer.Option(help="first objective: throughput (output tokens/s) or goodput "
                                                       "(requests/s that meet every SLO on latency); default: the "
                                                       "cluster's")] = None,
    json: JsonOption = None,
) -> None:
    """Search the flags of CLUSTER at its target users; exit 1 when no trial meets the SLOs.

    Example: spoc search run sim-4xh100 --profile quick --seed 1 --out outputs/search-1
    """
    from spoc_lib.config import load_cluster, load_profile
    from spoc_lib.pipeline.runs import outputs_dir
    from spoc_lib.search.run import run_study
    from spoc_lib.search.settings import with_objective
    from spoc_lib.search.workload import script_factory
    from spoc_lib.workload.personas import with_persona_slos

    spec, work = with_persona_slos(load_cluster(cluster)), load_profile(profile)
    if objective:
        spec = with_objective(spec, objective)
    folder = out or outputs_dir() / f"search-{spec.name}"
    result = run_study(spec, work, script_factory(spec, work, seed), folder, seed=seed, trials=trials,
                       confirm=confirm, progress=_progress)
    _finish(result, folder, json)


@app.command("resume")
def resume(
    folder: FolderArgument,
    trials: Annotated[int | None, typer.Option(min=1, help="go on to this many; default: as first asked")] = None,
    json: JsonOption = None,
) -> None:
    """Go on with a search that was interrupted or killed, or that should have more trials.

    Example: spoc search resume outputs/search-sim-4xh100 --trials 64
    """
    from spoc_lib.search.run import run_study
    from spoc_lib.search.settings import open_settings, settings_models
    from spoc_lib.search.workload import script_factory

    settings = open_settings(folder)
    spec, work = settings_models(settings)
    result = run_study(spec, work, script_factory(spec, work, settings["seed"]), folder, seed=settings["seed"],
                       trials=trials or settings["trials"], confirm=settings["confirm"], resume=True,
                       progress=_progress)
    _finish(result, folder, json)


@app.command("show")
def show(folder: FolderArgument, json: JsonOption = None) -> None:
    """The Pareto table, the knee and the findings of a search.

    Example: spoc search show outputs/search-sim-4xh100
    """
    from spoc_lib.search.stored import read_result
    from spoc_lib.search.text import pareto_text

    result = read_result(folder)
    emit(result, json, pareto_text(result))


@app.command("best")
def best(
    folder: FolderArgument,
    form: Annotated[str, typer.Option("--format", help="shell, compose or kubernetes")] = "shell",
    json: JsonOption = None,
) -> None:
    """The ready `vllm serve` command of the knee.

    Example: spoc search best outputs/search-sim-4xh100 --format compose
    """
    from spoc_lib.core.errors import InputError
    from spoc_lib.search.recommend import FORMATS, command
    from spoc_lib.search.settings import open_settings, settings_models
    from spoc_lib.search.stored import read_result

    chosen = next((one for one in FORMATS if one == form), None)
    if chosen is None:
        raise InputError("bad-format", f"--format: unknown format '{form}': use one of {', '.join(FORMATS)}")
    result = read_result(folder)
    cluster, _ = settings_models(open_settings(folder))
    text = command(cluster, result["command_flags"], chosen)
    emit({"command": text, "format": form, "flags": result["command_flags"], "trial": result["chosen_trial"],
          "meets_slos": result["knee"] is not None}, json, text.rstrip("\n"))
    if result["knee"] is None:
        print(f"spoc: {result['findings'][0]}", file=sys.stderr)
        raise typer.Exit(1)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _finish(result, folder: Path, json: str | None) -> None:
    from spoc_lib.search.text import pareto_text

    values = result.to_dict()
    emit({**values, "folder": folder}, json, pareto_text(values) + f"\n\nEvidence: {folder}")
    if result.knee is None:
        raise typer.Exit(1)
