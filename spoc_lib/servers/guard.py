"""A small process between the workbench and an engine, so that no engine outlives whoever started it.

    python -I -S guard.py LIFELINE_PARENT REPORT GRACE_S CLEANUP_JSON COMMAND...

Standard input is the lifeline: when it closes (the workbench stopped the engine, or was killed, even by SIGKILL) or
the parent is no longer LIFELINE_PARENT, the engine's whole process group gets SIGTERM, after GRACE_S seconds SIGKILL.
The guard is the subreaper of the engine's descendants, so one that left the group is found and killed as well.
Then CLEANUP_JSON (a list of commands) runs, which removes what is no process: a container. Exit status: the engine's
own, 128 + N when signal N ended it, 127 when it could not be started. The descriptor REPORT gets the engine's process
id, and closes without one when it could not be started.

Stands alone: started without site-packages, in some 20 ms.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.05
CLEANUP_TIMEOUT_S = 30


def main(arguments):
    """Start the engine, watch it and the lifeline, end it; the exit status (see above)."""
    parent, report, grace_s = int(arguments[0]), int(arguments[1]), float(arguments[2])
    cleanup, command = json.loads(arguments[3]), arguments[4:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workbench, which then closes the lifeline
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    try:
        engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        print(f"guard: cannot start {command[0]}: {error.strerror}", flush=True)
        return 127
    os.write(report, b"%d\n" % engine.pid)
    os.close(report)
    while engine.poll() is None and not stopped and os.getppid() == parent and not lifeline_closed():
        pass
    end_group(engine, grace_s)
    for one in cleanup:
        try:
            subprocess.run(one, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=CLEANUP_TIMEOUT_S,
                           check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"guard: {' '.join(one)}: {error}", flush=True)
    return engine.returncode if engine.returncode >= 0 else 128 - engine.returncode


def lifeline_closed():
    """Whether standard input has ended; waits one tick for it."""
    readable, _, _ = select.select([0], [], [], TICK_S)
    return bool(readable) and not os.read(0, 1)


def end_group(engine, grace_s):
    """SIGTERM to the group, SIGKILL to all that is left of it after the grace, and to every orphan."""
    signal_group(engine.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        engine.poll()
        reap(engine)
        if engine.returncode is not None and not group_alive(engine.pid):
            break
        time.sleep(TICK_S / 2)
    signal_group(engine.pid, signal.SIGKILL)
    engine.wait()
    for _ in range(200):  # descendants that left the group are our children now
        orphans = [pid for pid in children() if pid != engine.pid]
        if not orphans:
            break
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap(engine)
        time.sleep(TICK_S / 5)


def signal_group(group, number):
    """Send a signal to a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def group_alive(group):
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def children():
    """Processes whose parent is this one (Linux)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def reap(engine):
    """Collect dead orphans, never the engine itself: its exit status belongs to Popen."""
    for pid in children():
        if pid != engine.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
