"""`spoc engine`: the twin. Replays and virtual-clock runs here; serving, accuracy and calibration in their files."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from spoc_lib.cli import engine_fit, engine_serve
from spoc_lib.cli.output import JsonOption, emit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="The twin of vLLM V1: serve it over HTTP, run it on a virtual clock, hold it to recordings.")


@app.command()
def replay(
    files: Annotated[list[str], typer.Argument(help="recorded schedules (JSON), or folders of them")],
    json: JsonOption = None,
) -> None:
    """Replay schedules recorded from the real engine and compare every field of every step.

    Exit 1 on any mismatch, which is shown in full.

    Example: spoc engine replay recordings/ --json -
    """
    from spoc_lib.engine.scheduling.replay import replay_files

    result = replay_files(files)
    text = f"{result['files']} files, {result['steps']} steps, {result['mismatches']} mismatches"
    first = result["first_mismatch"]
    if first:
        subject = f"request {first['request']}, " if first["request"] else ""
        text += (f"\nfirst mismatch: {first['file']}, step {first['step']}, {subject}field {first['field']}"
                 f"\n  recorded {first['recorded']}\n  replayed {first['replayed']}")
    emit(result, json, text)
    if result["mismatches"]:
        raise typer.Exit(1)


@app.command()
def simulate(
    cluster: Annotated[str, typer.Argument(help="cluster name or YAML file")],
    users: Annotated[int, typer.Option(min=1, help="live conversations")],
    duration: Annotated[float, typer.Option(min=1, help="simulated seconds")] = 300,
    warmup: Annotated[float, typer.Option(min=0, help="simulated seconds before the window that counts")] = 60,
    personas: Annotated[str | None, typer.Option(help="persona set or YAML file; default: the cluster's")] = None,
    seed: Annotated[int, typer.Option(help="seed of the script")] = 0,
    gap_cap: Annotated[float, typer.Option(min=0, help="cap on think time, seconds")] = 60,
    start: Annotated[Literal["stationary", "cold"], typer.Option(help="where users stand at first")] = "stationary",
    assignments: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE",
                                                          help="engine flag, vLLM's name; repeatable")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="refuse what lies outside the measured range")] = False,
    json: JsonOption = None,
) -> None:
    """Play a workload against the twin on the virtual clock.

    Example: spoc engine simulate sim-4xh100 --users 100 --duration 300 --set max_num_batched_tokens=2048
    """
    from spoc_lib.config import read_flags
    from spoc_lib.engine.simulate import simulate

    result = simulate(cluster, users=users, duration_s=duration, warmup_s=warmup, personas=personas, seed=seed,
                      gap_cap_s=gap_cap, start=start, flags=read_flags(assignments or [], "--set"), strict=strict)
    emit(result, json, "\n".join([
        f"{result['users']} users, {result['simulated_s']:.0f} simulated s in {result['wall_s']:.2f} s "
        f"({result['speed']:.0f} x real time; setting up took {result['setup_s']:.2f} s), simulated",
        f"TTFT p50 {result['ttft_s']['p50']:.3f} s, p95 {result['ttft_s']['p95']:.3f} s; "
        f"ITL p50 {result['itl_s']['p50'] * 1e3:.2f} ms, p95 {result['itl_s']['p95'] * 1e3:.2f} ms",
        f"{result['output_tokens_per_s']:.0f} output tokens/s, {result['prompt_tokens_per_s']:.0f} prompt tokens/s, "
        f"{result['cached_ratio']:.1%} of prompt tokens cached, {result['preemptions']} preemptions",
        *(f"outside what was measured: {sentence}" for sentence in result["passport"].get("outside", [])),
    ]))


engine_fit.register(app)
engine_serve.register(app)
