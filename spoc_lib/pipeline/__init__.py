"""The notebooks as a pipeline: typed parameters, run folders, stages that resume, batches.

In a notebook::

    from spoc_lib import pipeline
    stage = pipeline.begin("03", globals())
    ...
    stage.finish(result, findings)
"""

from spoc_lib.pipeline.parameters import STAGES
from spoc_lib.pipeline.runs import Run
from spoc_lib.pipeline.stage import Stage, begin

__all__ = ["STAGES", "Run", "Stage", "begin"]
