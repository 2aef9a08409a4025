"""Inside the GPU: kernel traces in Nsight Systems' schema read, decomposed, and turned into a verdict."""

from spoc_lib.nsight.categories import CATEGORIES, TITLES, classify, rule_book
from spoc_lib.nsight.decompose import Decomposition, decompose
from spoc_lib.nsight.roofline import Verdict, roofline

__all__ = ["CATEGORIES", "TITLES", "Decomposition", "Verdict", "classify", "decompose", "roofline", "rule_book"]
