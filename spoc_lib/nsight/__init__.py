"""Inside the GPU: kernel traces in Nsight Systems' schema read, decomposed, and turned into a verdict."""

from spoc_lib.nsight.categories import CATEGORIES, TITLES, classify, rule_book
from spoc_lib.nsight.collectives import Collectives, collectives
from spoc_lib.nsight.decompose import Decomposition, decompose
from spoc_lib.nsight.diff import Diff, diff
from spoc_lib.nsight.roofline import Verdict, roofline

__all__ = ["CATEGORIES", "TITLES", "Collectives", "Decomposition", "Diff", "Verdict", "classify", "collectives",
           "decompose", "diff", "roofline", "rule_book"]
