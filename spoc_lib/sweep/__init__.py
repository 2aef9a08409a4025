"""How many users, how sure, and what stops it: SLOs, rungs, the ladder, the capacity and what saturated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spoc_lib.sweep.run import SweepResult, run_sweep

__all__ = ["SweepResult", "run_sweep"]


def __getattr__(name: str) -> Any:  # the driver pulls in the engine; the statistics do not need it
    if name in __all__:
        from spoc_lib.sweep import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
