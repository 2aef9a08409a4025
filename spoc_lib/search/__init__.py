"""Which flags: NSGA-II over the engine's flags, screened on the twin, confirmed by real load."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spoc_lib.search.result import StudyResult
    from spoc_lib.search.run import run_study

__all__ = ["StudyResult", "run_study"]


def __getattr__(name: str) -> Any:  # Optuna and the engine are imported only by those who search
    if name == "run_study":
        with warnings.catch_warnings():  # tqdm's word to notebooks, on Optuna's behalf; no bar is ever drawn
            warnings.filterwarnings("ignore", message="IProgress not found")
            from spoc_lib.search.run import run_study

        return run_study
    if name == "StudyResult":
        from spoc_lib.search.result import StudyResult

        return StudyResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
