"""Inside the GPU: kernel traces in Nsight Systems' schema read, decomposed, and turned into a verdict."""

from spoc_lib.nsight.categories import CATEGORIES, TITLES, classify, rule_book
from spoc_lib.nsight.collectives import Collectives, collectives
from spoc_lib.nsight.decompose import Decomposition, decompose
from spoc_lib.nsight.diff import Diff, diff
from spoc_lib.nsight.idle import explain_idle
from spoc_lib.nsight.measured import capture_overhead, measured_steps
from spoc_lib.nsight.roofline import Verdict, roofline, shown_types

__all__ = ["CATEGORIES", "TITLES", "Collectives", "Decomposition", "Diff", "Verdict", "capture_overhead",
           "classify", "collectives", "decompose", "diff", "explain_idle", "measured_steps", "roofline", "rule_book",
           "shown_types"]
