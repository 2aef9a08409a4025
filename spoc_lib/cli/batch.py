"""`spoc batch`: one run a cluster, then the comparison."""

from __future__ import annotations

from typing import Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit
from spoc_lib.cli.run import Profile, Seed, Settings, progress_to, stop_gently, verdict_lines


def batch(
    clusters: Annotated[list[str] | None, typer.Argument(help="clusters to run and compare")] = None,
    profile: Profile = None,
    seed: Seed = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="clusters at a time, where they share no engine; on one machine they disturb each "
                     "other's clocks"),
    ] = 1,
    run_id: Annotated[str, typer.Option(help="name of the batch's folder; by default batch-DATE-TIME")] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the newest batch, or with --run-id; all else is remembered")
    ] = False,
    settings: Settings = None,
    json: JsonOption = None,
) -> None:
    """One run a cluster (notebooks 01-04), then notebook 05 over all that finished.

    A cluster that fails stops no other; the summary says why it failed, and exit status 1 that one did.

    Example: spoc batch sim-4xh100 sim-2xh200 --profile quick --jobs 2
    """
    from spoc_lib.core.errors import InputError, SpocError
    from spoc_lib.pipeline import batch as batches
    from spoc_lib.pipeline.execute import again
    from spoc_lib.pipeline.parameters import absolute_settings

    stop_gently()
    say = progress_to(json)
    if resume:
        if clusters or settings or profile or seed is not None:
            raise InputError("told-twice", "--resume goes on with what the batch was told: name no clusters, profile, "
                             "seed or settings beside it")
        under_way = batches.reopen(run_id)
    else:
        chosen = absolute_settings(settings or [], ["01", "02", "03", "04"])
        under_way = batches.begin(clusters or [], profile=profile, seed=seed, settings=chosen, batch_id=run_id)
    with under_way.exclusive():
        try:
            outcomes = batches.run_batch(under_way, jobs=jobs, say=say)
        except KeyboardInterrupt:
            say(f"interrupted; {again(under_way)}")
            raise
        lines = batches.summary(under_way, outcomes)
        compared = False
        try:
            batches.compare(under_way, outcomes, say)
            lines += verdict_lines(under_way)
            compared = True
        except SpocError as error:
            lines.append(f"05: {error.message}")
    emit({"outcomes": outcomes, "report": str(under_way.folder) if compared else None}, json, "\n".join(lines))
    raise typer.Exit(0 if compared and all(outcome.state == "done" for outcome in outcomes) else 1)
