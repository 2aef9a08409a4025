"""Which runs notebook 05 answers for: those named in its parameter, else its own."""

from __future__ import annotations

from spoc_lib.core.errors import InputError
from spoc_lib.pipeline.parameters import P05, of_kind
from spoc_lib.pipeline.runs import Run
from spoc_lib.pipeline.stage import Stage
from spoc_lib.report.answer import Answer, distinct


def answers_for(stage: Stage) -> list[Answer]:
    """The answers of the runs in the parameter `runs` (ids or folders, separated by commas), in their order."""
    named = [name.strip() for name in of_kind(P05, stage.parameters).runs.split(",") if name.strip()]
    runs = [Run.open(name) for name in named] or [stage.run]
    for run in runs:
        if run.stage_state("03")["state"] != "done":
            raise InputError("no-sweep",
                             f"run '{run.id}' has no finished sweep (03) to report on: name finished runs in "
                             f"the parameter 'runs', or run notebook 03 first")
    return distinct([Answer.read(run.folder) for run in runs])
