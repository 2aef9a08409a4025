"""SPOC workbench: how many users an LLM server holds under an SLA, with which flags, and what stops it.

Rooms, each importing only from those before it::

    core < config < workload < engine < servers < load < telemetry < search, sweep, nsight < report < pipeline < cli

Importing any of them opens no socket, patches nothing and touches no network.
"""

__version__ = "0.1.0"
