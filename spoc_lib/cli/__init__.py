"""The command line. One module a group of commands; each command is one library call and a result.

Rooms are imported inside the commands, so `spoc --help` answers at once.
"""

from __future__ import annotations

import errno
import io
import locale
import os
import sys

from spoc_lib.core.errors import SpocError

#: Faults of the machine, not of the workbench: what they mean and what to do.
MACHINE = {
    errno.ENOSPC: "no space is left on the disk: make room, then go on with --resume",
    errno.EDQUOT: "the disk quota is used up: make room, then go on with --resume",
    errno.EFBIG: "a file reached the size limit of this process: raise it (ulimit -f), then go on with --resume",
    errno.EROFS: "the file system is read-only: set SPOC_OUTPUTS to a folder that can be written",
    errno.EACCES: "permission denied: name a folder that you may write with --out or SPOC_OUTPUTS, or mend the rights",
    errno.EEXIST: "a file stands where a folder is wanted: name another --out or SPOC_OUTPUTS",
    errno.ENOTDIR: "a file stands where a folder is wanted: name another --out or SPOC_OUTPUTS",
    errno.EISDIR: "a folder stands where a file is wanted: name another --out",
    errno.EMFILE: "no file handles are left in this process: raise the limit (ulimit -n 65536)",
    errno.ENFILE: "no file handles are left on this machine",
}


def _show_anything() -> None:
    """What a terminal of few letters cannot show is replaced; children write UTF-8 whatever this one reads."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ.pop("PYTHONIOENCODING", None)
    if not sys.flags.utf8_mode and locale.getpreferredencoding(False).lower() not in ("utf-8", "utf8"):
        os.environ["PYTHONUTF8"] = "1"


def main() -> None:
    """Entry point of `spoc`: what the workbench can explain becomes one sentence and an exit status."""
    from spoc_lib.cli.app import app

    _show_anything()
    try:
        app()
    except SpocError as error:
        print(f"spoc: {error.message}", file=sys.stderr)
        sys.exit(error.exit_status)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        print("spoc: no folder takes the compiled code: set NUMBA_CACHE_DIR to one that can be written",
              file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in MACHINE:
            raise
        where = f" ({error.filename})" if error.filename else ""
        print(f"spoc: {MACHINE[error.errno]}{where}", file=sys.stderr)
        sys.exit(1)
