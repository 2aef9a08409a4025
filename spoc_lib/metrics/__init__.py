"""Each figure of a load once: its name, unit, formula and rules (`METRICS`), and the code that every room asks.

    seen = Measured(requests, chunks, window)        # REQUESTS, CHUNKS, (start_s, end_s)
    seen.percentiles("ttft"), seen.numbers("output_tokens_per_s"), seen.samples("itl").percentile(99.9)
"""

from spoc_lib.metrics import definitions as _definitions  # noqa: F401  (fills METRICS)
from spoc_lib.metrics.gaps import Gaps, Streams, streams
from spoc_lib.metrics.measured import EVERYBODY, SHARE_MARK, Measured, Records, Span
from spoc_lib.metrics.occupancy import LITTLE_TOLERANCE, Occupancy, little, occupancy
from spoc_lib.metrics.registry import METRICS, Metric, markdown
from spoc_lib.metrics.samples import Samples

__all__ = ["EVERYBODY", "LITTLE_TOLERANCE", "METRICS", "SHARE_MARK", "Gaps", "Measured", "Metric", "Occupancy",
           "Records", "Samples", "Span", "Streams", "little", "markdown", "occupancy", "streams"]
