"""`spoc sweep`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="How many users: the ladder of concurrency, the capacity with its interval, what stops it.")


@app.command("run")
def run(
    cluster: Annotated[str, typer.Argument(help="cluster name or YAML file", metavar="CLUSTER")],
    profile: Annotated[str, typer.Option(help="how much work: quick, standard, paper or a YAML file")] = "quick",
    flags: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="a vLLM flag; may be repeated")] = None,
    seed: Annotated[int, typer.Option(min=0, help="seed of the workload")] = 0,
    out: Annotated[Path | None, typer.Option(help="folder of the sweep; default: outputs/sweep-CLUSTER")] = None,
    http: Annotated[bool, typer.Option(help="run one rung over real HTTP beside its twin (embedded engines)")] = True,
    strict: Annotated[bool, typer.Option("--strict", help="refuse a twin outside its measured range")] = False,
    json: JsonOption = None,
) -> None:
    """Sweep CLUSTER over users until the edge of its SLA is found; a sweep that was cut off is gone on with.

    Exit 1 when the capacity stays unresolved or the HTTP rung and its twin part.
    Example: spoc sweep run sim-4xh100 --flags max_num_batched_tokens=4096 --flags max_num_seqs=256 --json -
    """
    from spoc_lib.config import load_cluster, load_profile, read_flags
    from spoc_lib.pipeline.runs import outputs_dir
    from spoc_lib.sweep import run_sweep
    from spoc_lib.workload import build_script
    from spoc_lib.workload.personas import with_persona_slos

    spec, work = with_persona_slos(load_cluster(cluster)), load_profile(profile)
    named = read_flags(flags or [], "--flags")

    def script(salt: int):
        return build_script(spec.personas, seed, salt=salt, gap_cap_s=work.gap_cap_s, start=work.start,
                            context_limit=spec.context_limit(named))

    folder = out or outputs_dir() / f"sweep-{spec.name}"
    result = run_sweep(spec, work, named, folder, script, seed, confirm_http=http, progress=_progress,
                       strict=strict)
    emit({**result.capacity, "findings": result.findings(), "folder": folder}, json,
         "\n".join([*result.findings(), f"Evidence: {folder}"]))
    compared = result.capacity["twin_vs_http"]
    parted = compared and compared["comparable"] and not compared["passed"]
    if result.capacity["verdict"] != "resolved" or parted:
        raise typer.Exit(1)


@app.command("capacity")
def capacity(
    folder: Annotated[Path, typer.Argument(help="folder of a sweep", metavar="FOLDER")],
    level: Annotated[float | None, typer.Option(help="level of the interval, for example 0.95; default: as swept")]
    = None,
    json: JsonOption = None,
) -> None:
    """The capacity answer of a sweep: users, interval, what binds, what saturated. Exit 1 when it is unresolved.

    Example: spoc sweep capacity outputs/sweep-sim-4xh100 --json -
    """
    from spoc_lib.sweep.capacity import read_capacity, sentence

    answer = read_capacity(folder, level)
    emit(answer, json, sentence(answer) + (f" To run next: {answer['next']}." if answer["next"] else ""))
    if answer["verdict"] != "resolved":
        raise typer.Exit(1)


@app.command("compare")
def compare(
    folders: Annotated[list[Path], typer.Argument(help="folders of sweeps, the reference first", metavar="FOLDER...")],
    metric: Annotated[str, typer.Option(help="the SLOs' metric whose limit is moved: ttft, itl, tpot, …")] = "itl",
    json: JsonOption = None,
) -> None:
    """Capacities of several sweeps side by side: ratios with intervals, over the SLA's limits, per GPU, per price.

    Example: spoc sweep compare outputs/sweep-sim-2xh200 outputs/sweep-sim-4xh100
    """
    from spoc_lib.sweep.compare import compare_folders

    table = compare_folders(folders, metric)
    emit(table.to_dict("records"), json, table.to_string(index=False, float_format=lambda value: f"{value:.3g}"))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
