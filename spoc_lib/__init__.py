"""SPOC workbench: how many users an LLM server holds under an SLA, with which flags, and what stops it.

Five lines from a blank notebook to a figure::

    import spoc_lib as spoc

    cluster = spoc.cluster("sim-4xh100")
    capacity = spoc.quick_capacity(cluster)
    capacity

Rooms, each importing only from those before it::

    core < config < workload < engine < servers < load < telemetry < sweep, nsight < search < report < pipeline < cli

Importing any of them opens no socket, patches nothing and touches no network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spoc_lib.core.caches import place_compiled_code
from spoc_lib.core.version import VERSION

if TYPE_CHECKING:
    from spoc_lib.interactive import cluster, clusters, compare, latest, quick_capacity, run, runs

place_compiled_code()
__version__ = VERSION
__all__ = ["cluster", "clusters", "compare", "latest", "quick_capacity", "run", "runs"]


def __getattr__(name: str) -> Any:  # so that the import is instant, and the rooms come when they are asked for
    if name in __all__:
        from spoc_lib import interactive

        return getattr(interactive, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
