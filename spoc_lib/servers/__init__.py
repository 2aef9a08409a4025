"""The engine under test as a process: command, launch, readiness, log, teardown; for embedded engines, local processes,
containers, and remote endpoints.

    with launch(cluster, flags, folder) as server:
        ...load server.base_url...
"""

from spoc_lib.servers.commands import launch_command, shell_command
from spoc_lib.servers.failures import LaunchFailure
from spoc_lib.servers.lifecycle import Server, launch, warm_up
from spoc_lib.servers.process import TeardownFailure

__all__ = ["LaunchFailure", "Server", "TeardownFailure", "launch", "launch_command", "shell_command", "warm_up"]
